"""A kind of rows that this project does not have, the worked example: added from outside, and read."""

import importlib
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from support.messages import naming
from support.row_options import write_one_here
from support.tiny_run import write_lines
from support.worked_examples import apply, examples

from pipeline.configuration.groups import DataConfig
from pipeline.data import shards
from pipeline.data.row_kinds import PAIRS, PROMPTS, ROW_KINDS, SEQUENCES
from pipeline.data.selection import options_of, share_of
from pipeline.data.turns import Message, prompt_hash
from pipeline.errors import InputError
from pipeline.preparation.inputs import prepare_data


@pytest.fixture
def labelled(monkeypatch, tmp_path) -> dict:
    """Return options of data sets of the example's kind, from a module that this process has imported."""
    apply(examples()["row_kind"], tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "labelled_rows", raising=False)
    for name, kind in ROW_KINDS.items():
        monkeypatch.setitem(ROW_KINDS, name, kind)
    importlib.import_module("labelled_rows")
    yield {"rows": "labelled", "shares": (1, 2), "title": "kto"}
    monkeypatch.delitem(ROW_KINDS, "labelled")


def data_of(folder, name="rows", **changes) -> DataConfig:
    rows = [{"prompt": f"{n}?", "completion": f"answer {n}", "label": n % 3 > 0} for n in range(60)]
    write_lines(folder / f"{name}.jsonl", [*rows, {"prompt": "no answer"}, {**rows[1], "completion": "long " * 200}])
    options = {"data_output_path": str(folder / f"cache of {name}"), "eval_fraction": 0.0, "data_split": "1,1,1"}
    return DataConfig(data_path=[str(folder / f"{name}.jsonl")], **options | changes)


def test_rows_of_a_kind_that_a_package_adds_are_read(labelled, bpe_tokenizer, tmp_path):
    built = prepare_data(options_of(data_of(tmp_path), **labelled, max_seq_len=200), bpe_tokenizer)
    mine = [n for n in range(60) if share_of(prompt_hash([Message("user", f"{n}?")]), 1234, (1 / 3,) * 3) in (1, 2)]
    assert 30 < len(mine) < 50 and [row["label"] for row in built.train] == [n % 3 > 0 for n in mine]
    for n, row in zip(mine, built.train, strict=True):
        prompt, ids = f"\n\nHuman: {n}?\n\nAssistant:", row["ids"]
        assert bpe_tokenizer.decode(ids[: row["prompt_length"]]) == prompt
        assert bpe_tokenizer.decode(ids) == f"{prompt} answer {n}</s>" and row["num_tokens"] == len(ids)
    types = {"ids": pa.list_(pa.int32()), "prompt_length": pa.int32(), "label": pa.bool_(), "num_tokens": pa.int32()}
    assert built.train.data.table.schema == pa.schema(types.items())
    (folder,) = {path.name for path in (tmp_path / "cache of rows").iterdir()}
    assert folder.startswith("labelled-1-2-")


def test_it_is_reported_as_others_are(labelled, bpe_tokenizer, tmp_path, caplog):
    whole = prepare_data(options_of(data_of(tmp_path, data_split="none"), **labelled, max_seq_len=200), bpe_tokenizer)
    assert whole.counts["no response"] == 1 and whole.counts["response beyond max_seq_len"] == 1
    assert whole.counts.lengths.total() == 1 and len(whole.train) == 60
    with pytest.raises(InputError, match=naming("stage kto: --data-split 1,0,0 ... no training row")):
        prepare_data(options_of(data_of(tmp_path, data_split="1,0,0"), **labelled), bpe_tokenizer)


@pytest.mark.slow
def test_other_processes_know_it(labelled, bpe_tokenizer, tmp_path, monkeypatch):
    """They import the module by its name, and write the same bytes."""
    monkeypatch.setattr(shards, "SHARD_RECORDS", 10)
    data = data_of(tmp_path)
    alone = prepare_data(options_of(data, **labelled), bpe_tokenizer)
    here = write_one_here(monkeypatch)
    other = data.model_copy(update={"data_output_path": str(tmp_path / "other")})
    together = prepare_data(options_of(other, **labelled), bpe_tokenizer)
    assert here == ["labelled-000000.arrow"], "the job writes the others"
    files = [built.train.cache_files[0]["filename"] for built in (alone, together)]
    assert files[0] != files[1] and Path(files[0]).read_bytes() == Path(files[1]).read_bytes()


def test_schemas_of_the_stages_are_those_of_their_caches():
    """A checkpoint knows its rows by their bytes; `extra` is moved to a file of its own (test_other_columns.py)."""
    ids, number = pa.list_(pa.int32()), pa.int32()
    sequences = {"ids": ids, "trained": pa.list_(pa.bool_()), "num_trained": number, "num_tokens": number}
    pairs = {"chosen_ids": ids, "rejected_ids": ids, "prompt_length": number, "margin": pa.float32()}
    prompts = {"prompt_ids": ids, "prompt_id": pa.int64(), "messages": pa.large_string()}
    assert SEQUENCES.schema() == pa.schema(sequences.items())
    assert PAIRS.schema() == pa.schema({**pairs, "num_tokens": number}.items())
    assert PROMPTS.schema() == pa.schema({**prompts, "extra": pa.large_string(), "num_tokens": number}.items())
