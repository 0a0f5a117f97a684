"""Options for the rows of each stage, and for the text of stage 3, by one word; and preparation by two processes."""

import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from subprocess import Popen
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from pipeline.data import shards
from pipeline.data.cache import StageData, load_or_build
from pipeline.data.counts import Counts, Origin
from pipeline.data.formats import Record, read_records
from pipeline.data.readers import Row
from pipeline.data.selection import DataOptions

ROWS = {
    "sft": {"rows": "sequences", "shares": (0,), "title": "sft"},
    "reward": {"rows": "pairs", "shares": (1,), "title": "reward"},
    "ppo": {"rows": "prompts", "shares": (2,), "title": "ppo"},
    "text": {"rows": "blocks", "shares": (), "title": "text"},
}


def of_stage(stage: str, options: DataOptions) -> DataOptions:
    """The same options for the rows of a stage."""
    return replace(options, **ROWS[stage])


def load_rows(stage: str, options: DataOptions, tokenizer: PreTrainedTokenizerBase) -> StageData:
    """The rows of a stage."""
    return load_or_build(of_stage(stage, options), tokenizer)


def write_one_here(monkeypatch: pytest.MonkeyPatch, write: Callable[..., None] = shards.write_shard) -> list[str]:
    """Have two processes tokenise, which are ready behind the first shard; returns the shards of this process."""
    here, jobs, start = list[str](), list[tuple[Popen[bytes], Connection]](), shards.start_job

    def write_until_ready(shard, *rest) -> None:
        here.append(shard.file.name)
        write(shard, *rest)
        assert jobs[-1][1].poll(100.0), "no other process is ready"

    monkeypatch.setattr(shards, "PARALLEL_RECORDS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(shards, "start_job", lambda: jobs.append(start()) or jobs[-1])
    monkeypatch.setattr(shards, "write_shard", write_until_ready)
    return here


def read(*values: dict[str, Any], **options: Any) -> tuple[list[Record], Counts]:
    """Read the records of a file `f` with these rows; return what was counted as well."""
    counts = Counts()
    rows = [Row(value, Origin("f", number), None) for number, value in enumerate(values, 1)]
    return list(read_records(rows, counts, **options)), counts
