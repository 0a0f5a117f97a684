"""Sources mixed by ratios: how many rows of each are trained on, which of them, and what the report says of it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.messages import naming
from support.row_options import load_rows, of_stage
from support.tiny_run import write_lines

from pipeline.data.cache import cache_key
from pipeline.data.selection import DataOptions, mixed_sizes, ratios_of
from pipeline.errors import InputError
from pipeline.preparation.inputs import row_lines

COLUMN = {"sft": "ids", "reward": "chosen_ids", "ppo": "prompt_ids"}


def write_source(folder: Path, name: str, number: int, **extra: object) -> str:
    rows = [{"prompt": f"{name} {n}?", "chosen": f"good {n}", "rejected": "bad", **extra} for n in range(number)]
    write_lines(folder / f"{name}.jsonl", rows)
    return str(folder / f"{name}.jsonl")


@pytest.fixture
def options(tmp_path: Path) -> DataOptions:
    """12 rows of which 0.8 are wanted, and 2 rows of which 0.2 are wanted: 3 for the 12."""
    paths = f"{write_source(tmp_path, 'large', 12)}:0.8", f"{write_source(tmp_path, 'small', 2)}:0.2"
    extra = {"eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), "data_split": "none"}
    return DataOptions(data_path=paths, mixture="ratio", **extra)


def prompts(rows, tokenizer, column: str) -> Counter[str]:
    """How often each prompt occurs."""
    texts = (tokenizer.decode(row[column]) for row in rows)
    return Counter(text.split("Human: ")[1].split("?")[0] for text in texts)


def test_sizes_are_the_least_that_lose_no_row():
    """By hand: of 30 rows at 0.6 one hundredth is half a row, of 5 at 0.4 an eighth; so 20 for the second."""
    assert mixed_sizes({"a": 30, "b": 5}, {"a": 0.6, "b": 0.4}) == {"a": 30, "b": 20}
    assert mixed_sizes({"a": 30, "b": 5}, {"a": 1.0, "b": 1.0}) == {"a": 30, "b": 30}
    assert mixed_sizes({"a": 30, "b": 5, "c": 7}, {"a": 0.3, "b": 0.6, "c": 0.1}) == {"a": 30, "b": 60, "c": 10}
    with pytest.raises(InputError, match=naming("--mixture ratio ... b has no training row")):
        mixed_sizes({"a": 30, "b": 0}, {"a": 0.6, "b": 0.4})


def test_weights_that_repeat_a_source_without_end_are_refused_by_name(options, bpe_tokenizer):
    """By hand: 12 rows at 1e-6 are rows for 12 million at 1, which are 6 million times the 2 there are; 6,000 / 6."""
    large, small = (path.rpartition(":")[0] for path in options.data_path)
    slip = replace(options, data_path=(f"{large}:0.000001", f"{small}:1"))
    line = naming("--mixture ratio", f"{small}:1", "2 training rows", "6,000,000 times", f"the 12 of {large}:1e-06")
    with pytest.raises(InputError, match=line):
        load_rows("sft", slip, bpe_tokenizer)
    assert mixed_sizes({"a": 6000, "b": 6}, {"a": 1.0, "b": 1.0}) == {"a": 6000, "b": 6000}
    for weight in (0.9990, 1e-300, 5e-324):
        with pytest.raises(InputError, match=naming("b:1 ... 6 training rows")):
            mixed_sizes({"a": 6000, "b": 6}, {"a": weight, "b": 1.0})


@pytest.mark.parametrize("stage", COLUMN)
def test_training_rows_are_in_the_ratio_of_the_weights(stage, options, bpe_tokenizer):
    """12 rows at 0.8 and 2 at 0.2: each of the 12 once, and 3 of the others, one of them twice."""
    built = load_rows(stage, options, bpe_tokenizer)
    found = prompts(built.train, bpe_tokenizer, COLUMN[stage])
    assert {name: number for name, number in found.items() if name.startswith("large")} == {
        f"large {n}": 1 for n in range(12)
    }
    assert sorted(number for name, number in found.items() if name.startswith("small")) == [1, 2]
    assert len(built.train) == 15
    if stage == "ppo":
        assert len(set(built.train["prompt_id"][:])) == 15, "copies of a prompt would get the same random numbers"
    lines = row_lines(stage, built.counts, "none", num_sequences=len(built.train))
    assert lines[0] == naming(f"{stage} rows", "14 to train on (sequences: 15), 0 held out", "of 14")
    assert [line.partition("jsonl: ")[2] for line in lines if "jsonl: " in line] == [
        naming("12 to train on (1.00 times each) ... 0 held out, of 12"),
        naming("2 to train on (1.50 times each) ... 0 held out, of 2"),
    ]


def test_rows_that_are_dropped_are_no_part_of_the_ratio(options, bpe_tokenizer, tmp_path):
    """Of ten rows of the small source eight are too long: the two others stand for it."""
    rows = [{"prompt": f"small {n}?", "chosen": "good " * 100 * (n > 1) + "end", "rejected": "bad"} for n in range(10)]
    write_lines(tmp_path / "small.jsonl", rows)
    built = load_rows("reward", replace(options, max_seq_len=60), bpe_tokenizer)
    found = prompts(built.train, bpe_tokenizer, "chosen_ids")
    assert sum(number for name, number in found.items() if name.startswith("small")) == 3 and len(found) == 14


def test_held_out_rows_are_never_repeated_and_the_same_as_of_shares(options, bpe_tokenizer, tmp_path):
    write_source(tmp_path, "held", 3)
    lines = [json.loads(line) for name in ("small", "held") for line in (tmp_path / f"{name}.jsonl").open()]
    write_lines(
        tmp_path / "small.jsonl", [{**row, "split": "test" if n > 1 else "train"} for n, row in enumerate(lines)]
    )
    built = load_rows("sft", options, bpe_tokenizer)
    assert prompts(built.eval, bpe_tokenizer, "ids") == {f"held {n}": 1 for n in range(3)}
    assert len(built.train) == 15


def test_the_seed_chooses_which_rows_are_repeated(options, bpe_tokenizer, tmp_path):
    write_source(tmp_path, "small", 40)
    options = replace(options, data_path=(f"{tmp_path}/large.jsonl:0.1", f"{tmp_path}/small.jsonl:0.5"))
    seeds = [load_rows("sft", replace(options, seed=seed), bpe_tokenizer).train["ids"][:] for seed in (1, 1, 2)]
    assert len(seeds[0]) == 12 + 60 and seeds[0] == seeds[1] and seeds[0] != seeds[2]
    repeated = [ids for ids in seeds[0] if seeds[0].count(ids) == 2]
    assert len(repeated) == 40 and max(map(seeds[0].count, seeds[0])) == 2


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_mixture_of_several_shards_has_the_same_rows(stage, options, bpe_tokenizer, monkeypatch, tmp_path):
    """Rows are mixed shard by shard: which of them are repeated, and as what, is that of the whole source."""
    whole = load_rows(stage, options, bpe_tokenizer).train.to_list()
    monkeypatch.setattr("pipeline.data.shards.SHARD_RECORDS", 1)
    parts = load_rows(stage, replace(options, cache_dir=str(tmp_path / "other")), bpe_tokenizer)
    assert parts.train.to_list() == whole and len(parts.train.data.table["num_tokens"].chunks) == len(whole) == 15


def test_shares_and_ratios_are_cached_apart(options, bpe_tokenizer):
    load_rows("sft", options, bpe_tokenizer)
    keys = {cache_key(of_stage("sft", replace(options, mixture=kind)), bpe_tokenizer) for kind in ("share", "ratio")}
    assert len(keys) == 2
    shared = load_rows("sft", replace(options, mixture="share"), bpe_tokenizer)
    assert max(prompts(shared.train, bpe_tokenizer, "ids").values()) == 1 and shared.counts.factors == {}


def test_another_seed_keeps_other_rows_of_a_source_with_a_weight(tmp_path, bpe_tokenizer):
    kept = {"cache_dir": str(tmp_path / "cache"), "eval_fraction": 0.0, "data_split": "none"}
    options = DataOptions(data_path=(f"{write_source(tmp_path, 'one', 40)}:0.5",), **kept)
    found = []
    for seed in (1, 1, 2):
        rows = load_rows("ppo", replace(options, seed=seed), bpe_tokenizer).train
        found.append(set(prompts(rows, bpe_tokenizer, "prompt_ids")))
    assert found[0] == found[1] != found[2] and all(8 < len(names) < 32 for names in found)


def test_a_source_that_is_given_twice_has_the_sum_of_its_weights():
    options = DataOptions(data_path=("a:0.5", "b:0.2"), sft_only_data_path=("a:0.25",))
    assert ratios_of(options) == {"a": 0.75, "b": 0.2}
