"""Columns that no layout reads: from every kind of source to the row of their prompt, in a file of their own."""

import csv
import datetime
import decimal
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from support.messages import naming
from support.row_options import ROWS, load_rows, write_one_here
from support.tiny_run import write_lines

from pipeline.configuration.groups import DataConfig
from pipeline.data import cache, selection, shards, sources
from pipeline.data.cache import StageData, data_fingerprint
from pipeline.data.readers import to_json
from pipeline.data.selection import DataOptions
from pipeline.preparation.inputs import prepare_data

PROMPT_COLUMNS = {"prompt_ids", "prompt_id", "messages", "num_tokens"}


def prompts(number: int, start: int = 0, **extra: object) -> list[dict[str, Any]]:
    """Prompts that their column `answer` names again, and other columns that all of them share."""
    return [{"prompt": f"question {i}?", "answer": i, **extra} for i in range(start, start + number)]


def options_of(folder: Path, *paths: str, **changes: Any) -> DataOptions:
    plain = {"cache_dir": str(folder / "cache"), "data_split": "none", "eval_fraction": 0.0}
    return DataOptions(data_path=paths, **(plain | changes))


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    write_lines(folder / name, rows)
    return str(folder / name)


def questions(rows) -> list[str]:
    return [json.loads(row["messages"])[0]["content"] for row in rows]


def extras(rows) -> list[dict[str, Any]]:
    return [json.loads(row["extra"]) for row in rows]


def folder_of(built: StageData) -> Path:
    return Path(built.train.cache_files[0]["filename"]).parent


def answers_fit(rows) -> bool:
    return questions(rows) == [f"question {extra['answer']}?" for extra in extras(rows)]


# --- sources ---


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    return written(folder, rows)


def csv_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return str(folder / "rows.csv")


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def saved_set(folder: Path, rows: list[dict[str, Any]]) -> str:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


@pytest.mark.parametrize("write", [jsonl, csv_file, parquet, saved_set])
def test_columns_of_every_kind_of_file_reach_their_row(write, bpe_tokenizer, tmp_path):
    built = load_rows("ppo", options_of(tmp_path, write(tmp_path, prompts(5, tests="a, b"))), bpe_tokenizer)
    kind = str if write is csv_file else int  # a CSV file has texts alone
    assert extras(built.train) == [{"answer": kind(n), "tests": "a, b"} for n in range(5)]
    assert answers_fit(built.train) and len(built.eval) == 0 and set(built.eval[:]) == PROMPT_COLUMNS


def test_columns_of_a_hub_set_reach_their_row(bpe_tokenizer, tmp_path, monkeypatch):
    rows = {"train": prompts(4), "test": prompts(2, start=10)}
    served = {name: datasets.Dataset.from_list(part) for name, part in rows.items()}
    monkeypatch.setattr(sources, "_load_hub", lambda path: served)
    built = load_rows("ppo", options_of(tmp_path, "some/set"), bpe_tokenizer)
    assert [extra["answer"] for extra in extras(built.train)] == [0, 1, 2, 3] and answers_fit(built.train)
    assert [extra["answer"] for extra in extras(built.eval)] == [10, 11] and answers_fit(built.eval)


def test_nested_values_and_any_character_come_back_as_they_were(bpe_tokenizer, tmp_path):
    rows = prompts(2, cases=[{"in": [1, 2.5], "out": None}], note="\u00fc \U0001f600 \0 \u2028 </s>")
    lines = "\n".join([json.dumps(rows[0]), json.dumps({**rows[1], "bad\ud800": "\ud800", "none": None})])
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    built = load_rows("ppo", options_of(tmp_path, str(tmp_path / "rows.jsonl")), bpe_tokenizer)
    for row, extra in zip(rows, extras(built.train), strict=True):
        assert {name: extra[name] for name in ("answer", "cases", "note")} == {
            name: row[name] for name in ("answer", "cases", "note")
        }
    assert extras(built.train)[1]["bad\ud800"] == "\ud800" and "none" not in extras(built.train)[1]


def test_dates_and_decimals_have_a_form_and_other_values_are_not_passed(bpe_tokenizer, tmp_path, caplog):
    when = datetime.datetime(2026, 11, 2, 3, 4, 5, tzinfo=datetime.UTC)
    more = {"when": when, "day": when.date(), "price": decimal.Decimal("1.50"), "raw": b"\xff",
            "took": datetime.timedelta(seconds=90), "nested": {"raw": [b"a"], "day": when.date()}}  # fmt: skip
    data = DataConfig(data_path=[parquet(tmp_path, prompts(2, **more))], data_split="none", eval_fraction=0.0,
                      data_output_path=str(tmp_path / "cache"))  # fmt: skip
    with caplog.at_level(logging.INFO):
        built = prepare_data(selection.options_of(data, **ROWS["ppo"]), bpe_tokenizer)
    expected = {"when": "2026-11-02T03:04:05+00:00", "day": "2026-11-02", "price": 1.5, "took": 90.0}
    assert extras(built.train) == [{"answer": n, **expected} for n in range(2)]
    said = [record.getMessage() for record in caplog.records]
    path = tmp_path / "rows.parquet"
    assert naming(f"{path} ... rewards ... answer, day, price, took, when") in said
    assert naming(f"{path} ... not read ... nested, raw") in said


def test_the_order_of_the_columns_changes_nothing():
    assert (
        to_json({"b": 1, "a": b"", "c": "x"}) == to_json({"c": "x", "a": b"", "b": 1}) == ('{"b": 1, "c": "x"}', {"a"})
    )


# --- which rows ---


def test_other_stages_read_and_keep_none(bpe_tokenizer, tmp_path):
    rows = [{**row, "chosen": "a", "rejected": "b"} for row in prompts(6)]
    for stage in ("sft", "reward"):
        built = load_rows(stage, options_of(tmp_path, written(tmp_path, rows)), bpe_tokenizer)
        assert "extra" not in built.train.column_names and not list(folder_of(built).glob("*columns*"))
        assert list(built.counts.unread.values()) == [{"answer"}] and built.counts.passed == {}
    built = load_rows("ppo", options_of(tmp_path, written(tmp_path, rows)), bpe_tokenizer)
    assert list(built.counts.passed.values()) == [{"answer"}] and built.counts.unread == {}
    assert answers_fit(built.train), "columns of the layout are not among them"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "6 x 7?", "answer": "42"},
        {"prompt": "6 x 7?", "completion": "42"},
        {"instruction": "6 x 7?", "input": "", "output": "42"},
    ],
)
def test_a_response_is_passed_for_rewards_that_compare_with_it(row, bpe_tokenizer, tmp_path):
    path = written(tmp_path, [{**row, "level": 3}])
    built, name = load_rows("ppo", options_of(tmp_path, path), bpe_tokenizer), [*row][-1]
    assert extras(built.train) == [{name: "42", "level": 3}] and questions(built.train) == ["6 x 7?"]
    assert built.counts.passed == {path: {name, "level"}} and built.counts.unread == {}
    assert load_rows("sft", options_of(tmp_path, path), bpe_tokenizer).counts.unread == {path: {"level"}}


def test_rows_without_other_columns_have_no_file_of_them(bpe_tokenizer, tmp_path):
    path = written(tmp_path, [{"prompt": f"question {n}?", "split": "train"} for n in range(3)])
    built = load_rows("ppo", options_of(tmp_path, path), bpe_tokenizer)
    assert set(built.train.column_names) == PROMPT_COLUMNS and built.counts.passed == {}
    assert {file.name for file in folder_of(built).iterdir()} == {
        "CACHEDIR.TAG", "counts.json", "eval.arrow", "train.arrow",
    }  # fmt: skip


def test_a_row_that_goes_takes_its_columns_and_of_equal_prompts_the_first_stays(bpe_tokenizer, tmp_path, monkeypatch):
    """Shares, held-out rows, prompts that are too long or repeated, and several shards between them."""
    monkeypatch.setattr(shards, "SHARD_RECORDS", 7)
    rows = prompts(60)
    rows[20:20] = [{"prompt": "long " * 100, "answer": -1}]
    rows += [{**row, "answer": -2} for row in prompts(30)]
    options = options_of(tmp_path, written(tmp_path, rows), data_split="1,1,2", eval_fraction=0.2)
    built = load_rows("ppo", options, bpe_tokenizer)
    counts = built.counts
    assert counts["prompt repeated"] and counts["prompt longer than max_prompt_seq_len"] == 1
    assert 10 < len(built.train) < 40 < 60 - len(built.eval)
    assert answers_fit(built.train) and answers_fit(built.eval) and len(built.eval) > 3


def test_sources_may_have_different_columns(bpe_tokenizer, tmp_path):
    paths = [
        written(tmp_path, prompts(3, level="easy"), "first.jsonl"),
        written(tmp_path, [{"prompt": f"plain {n}?"} for n in range(2)], "second.jsonl"),
        written(tmp_path, [{"prompt": "last?", "tests": [1]}], "third.jsonl"),
    ]
    built = load_rows("ppo", options_of(tmp_path, *paths), bpe_tokenizer)
    expected = [*({"answer": n, "level": "easy"} for n in range(3)), {}, {}, {"tests": [1]}]
    assert extras(built.train) == expected
    assert built.counts.passed == {paths[0]: {"answer", "level"}, paths[2]: {"tests"}}


def test_rows_that_a_ratio_repeats_keep_their_columns(bpe_tokenizer, tmp_path):
    large, small = written(tmp_path, prompts(12), "a.jsonl"), written(tmp_path, prompts(2, start=50), "b.jsonl")
    options = options_of(tmp_path, f"{large}:0.8", f"{small}:0.2", mixture="ratio")
    built = load_rows("ppo", options, bpe_tokenizer)
    found = [extra["answer"] for extra in extras(built.train)]
    assert found[:12] == list(range(12)) and sorted(set(found[12:])) == [50, 51] and len(found) == 15
    assert answers_fit(built.train)


# --- the files ---


def test_the_file_of_the_rows_has_the_same_bytes_with_and_without(bpe_tokenizer, tmp_path, monkeypatch):
    """As an independent writer makes them of the columns that rows always had; shard by shard, also held-out ones."""
    monkeypatch.setattr(shards, "SHARD_RECORDS", 10)
    schema = pa.schema({"prompt_ids": pa.list_(pa.int32()), "prompt_id": pa.int64(), "messages": pa.large_string(),
                        "num_tokens": pa.int32()}.items())  # fmt: skip
    found = []
    for name, rows in (("with", prompts(25)), ("without", [{"prompt": row["prompt"]} for row in prompts(25)])):
        (tmp_path / name).mkdir()
        options = options_of(tmp_path, written(tmp_path / name, rows), eval_fraction=0.3)
        found.append(load_rows("ppo", options, bpe_tokenizer))
    for split, rows in (("train", found[0].train), ("eval", found[0].eval)):
        values = rows.remove_columns("extra").to_list()
        with pa.OSFile(str(tmp_path / "alone.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for first in range(0, len(values), 10):
                writer.write_batch(pa.RecordBatch.from_pylist(values[first : first + 10], schema=schema))
        alone = (tmp_path / "alone.arrow").read_bytes()
        assert (
            len(values) > 3 and [(folder_of(built) / f"{split}.arrow").read_bytes() for built in found] == [alone] * 2
        )
    assert data_fingerprint(found[0].train) == data_fingerprint(found[1].train)
    names = {file.name for file in folder_of(found[0]).iterdir()} - {
        file.name for file in folder_of(found[1]).iterdir()
    }
    assert names == {"train.columns.arrow", "eval.columns.arrow"}


def test_a_changed_column_changes_its_own_hash_alone(bpe_tokenizer, tmp_path):
    built = []
    for rows in (prompts(5), prompts(4) + prompts(1, start=4, level=1), prompts(5)[::-1]):
        built.append(load_rows("ppo", options_of(tmp_path, written(tmp_path, rows)), bpe_tokenizer).train)
    same, changed, turned = (
        [data_fingerprint(rows, columns=columns) for rows in built] for columns in (False, True, True)
    )
    assert same[0] == same[1] != same[2] and len(set(changed)) == 3 and turned[0] != same[0]


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(bpe_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_RECORDS", 10)
    options = options_of(tmp_path, written(tmp_path, prompts(35)))
    alone = folder_of(load_rows("ppo", options, bpe_tokenizer))
    here = write_one_here(monkeypatch)
    together = folder_of(load_rows("ppo", replace(options, cache_dir=str(tmp_path / "other")), bpe_tokenizer))
    assert 1 <= len(here) <= 2
    assert {file.name: file.read_bytes() for file in alone.iterdir()} == {
        file.name: file.read_bytes() for file in together.iterdir()
    }


def test_a_cache_of_an_earlier_version_is_made_anew(bpe_tokenizer, tmp_path, monkeypatch):
    """It has neither the file nor the counts of columns."""
    options = options_of(tmp_path, written(tmp_path, prompts(3)))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "FORMAT_VERSION", 6)
        old = folder_of(load_rows("ppo", options, bpe_tokenizer))
    (old / "train.columns.arrow").unlink()
    built = load_rows("ppo", options, bpe_tokenizer)
    assert folder_of(built) != old and answers_fit(built.train)
