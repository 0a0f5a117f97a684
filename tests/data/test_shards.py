"""Tokenising in shards: one result for any number of processes, kept when a preparation is killed; blocks of documents.

The process that prepares is this one, or a program that is killed.
"""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.launch_stub import write_program
from support.messages import naming
from support.row_options import load_rows, write_one_here
from support.source_tree import ROOT

from pipeline.data import cache, shards
from pipeline.data.cache import StageData
from pipeline.data.row_kinds import PAIRS, ROW_KINDS
from pipeline.data.selection import DataOptions
from pipeline.data.spool import Spool
from pipeline.data.templates import encode_text
from pipeline.errors import EnvironmentFault, InputError
from pipeline.heartbeat import RowProgress

EOS = 2

SLOW_PAIRS = """
import time
from dataclasses import replace

from pipeline.data.row_kinds import PAIRS


def make(maker, record):
    time.sleep(0.02)
    return maker.pair(record)


KIND = replace(PAIRS, make=make)
"""
PROGRAM = """
import sys
import slow_pairs
from pipeline.data import cache, shards
from pipeline.data.cache import load_or_build
from pipeline.data.row_kinds import ROW_KINDS
from pipeline.data.selection import DataOptions
from pipeline.models.tokenizers import load_tokenizer

shards.SHARD_RECORDS, shards.PARALLEL_RECORDS = 10, 0
shards.num_processes = lambda _: 2
ROW_KINDS["pairs"] = slow_pairs.KIND
options = DataOptions(rows="pairs", shares=(1,), data_path=(sys.argv[1],), cache_dir=sys.argv[2])
load_or_build(options, load_tokenizer(sys.argv[3]))
"""


@pytest.fixture
def options(tmp_path) -> DataOptions:
    """95 rows, of which some are dropped, in shards of 10."""
    rows = [
        {"prompt": f"question {i % 90}?", "chosen": "good " * (1 + 40 * (i % 9 == 0)), "rejected": f"bad {i}"}
        for i in range(95)
    ]
    return options_of(tmp_path, rows)


def options_of(folder: Path, rows: list[dict]) -> DataOptions:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return DataOptions(data_path=(str(file),), cache_dir=str(folder / "cache"), max_seq_len=64, data_split="none")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_RECORDS", 10)


def files_of(built: StageData) -> dict[str, bytes]:
    """Every file of a prepared folder."""
    return {path.name: path.read_bytes() for path in Path(built.train.cache_files[0]["filename"]).parent.iterdir()}


@pytest.mark.slow
def test_several_processes_give_the_same_bytes(options, bpe_tokenizer, small_shards, monkeypatch, tmp_path, caplog):
    alone = load_rows("reward", options, bpe_tokenizer)
    assert alone.counts["pair longer than max_seq_len"] > 5
    monkeypatch.setattr("pipeline.heartbeat.PROGRESS_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO)
    events: list[str] = []
    start, select = shards.start_job, cache.select_records
    monkeypatch.setattr(shards, "start_job", lambda: events.append("started") or start())
    monkeypatch.setattr(cache, "select_records", lambda *words: (select(*words), events.append("read"))[0])
    here = write_one_here(monkeypatch)
    together = load_rows("reward", replace(options, cache_dir=str(tmp_path / "other")), bpe_tokenizer)
    assert files_of(together) == files_of(alone)
    assert 1 <= len(here) <= 2 and here[0] == "pairs-000000.arrow", "this process writes until the others are ready"
    assert events == ["started", "read"], "one job for the whole preparation, which imports while this process reads"
    assert "tokenising train rows: 2 processes" in caplog.text
    assert "train rows: 87 of 87" in caplog.text, "rows of the other processes are told, too"


def test_the_error_of_the_earliest_shard_is_told(options, bpe_tokenizer, small_shards, monkeypatch):
    monkeypatch.setattr(shards, "PARALLEL_RECORDS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    begun: list[str] = []

    def refused(shard, *_):
        begun.append(shard.file.name)
        raise InputError(f"{shard.file.name} is refused")

    monkeypatch.setattr(shards, "write_shard", refused)
    with pytest.raises(InputError, match=r"pairs-00000[01].arrow is refused"):
        load_rows("reward", options, bpe_tokenizer)
    assert len(begun) == 1, "nobody begins another shard behind an error"


def test_a_process_that_is_not_ready_delays_nobody(options, bpe_tokenizer, small_shards, monkeypatch, tmp_path):
    """One that never is, here."""
    monkeypatch.setattr(shards, "PARALLEL_RECORDS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(sys, "executable", str(write_program(tmp_path / "python", "#!/bin/sh\nexec sleep 20\n")))
    started, of_other_tests = time.monotonic(), psutil.Process().children()
    assert len(load_rows("reward", options, bpe_tokenizer).train) > 50
    assert time.monotonic() - started < 10 and psutil.Process().children() == of_other_tests


def test_a_process_that_the_system_refuses_is_told_as_such(options, bpe_tokenizer, small_shards, monkeypatch, tmp_path):
    monkeypatch.setattr(shards, "PARALLEL_RECORDS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-program"))
    with pytest.raises(EnvironmentFault, match=naming("cannot be started ... No such file ... ulimit")):
        load_rows("reward", options, bpe_tokenizer)


class OddError(Exception):
    """An exception that pickle writes and cannot read again."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(f"row {row}: {why}")


def test_a_process_answers_with_an_error_that_no_pipe_carries(monkeypatch):
    def refused(shard, *_):
        raise OddError(shard, "odd")

    monkeypatch.setattr(shards, "write_shard", refused)
    monkeypatch.setattr(shards, "_work", ("tokenizer", "options"), raising=False)
    error = shards.error_of(7)
    assert isinstance(error, RuntimeError) and "OddError: row 7: odd" in str(error)


def test_the_size_of_shards_does_not_change_rows_and_counts(options, bpe_tokenizer, monkeypatch, tmp_path):
    whole = load_rows("sft", options, bpe_tokenizer)
    monkeypatch.setattr(shards, "SHARD_RECORDS", 7)
    parts = load_rows("sft", replace(options, cache_dir=str(tmp_path / "other")), bpe_tokenizer)
    assert parts.train.to_list() == whole.train.to_list() and parts.eval.to_list() == whole.eval.to_list()
    assert parts.counts.lines() == whole.counts.lines()
    questions = [bpe_tokenizer.decode(row["ids"]).split("question ")[1].split("?")[0] for row in parts.train]
    assert [int(number) for number in questions[:80]] == sorted(map(int, questions[:80])), "the order of the file"


def test_repeated_prompts_are_left_out_whatever_the_shards(options, bpe_tokenizer, small_shards):
    built = load_rows("ppo", options, bpe_tokenizer)
    assert built.counts["prompt repeated"] == 5 and len(built.train) + len(built.eval) == 90


def test_small_sets_start_no_processes():
    assert shards.num_processes(1_999) == 1
    assert shards.num_processes(10_000_000) == len(os.sched_getaffinity(0))


def test_an_interrupted_preparation_goes_on(options, bpe_tokenizer, small_shards, monkeypatch, tmp_path, caplog):
    write, written = shards.write_shard, []

    def interrupted(shard, *arguments):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(shard.file.name)
        write(shard, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_rows("reward", options, bpe_tokenizer)

    def noted(shard, *arguments):
        written.append(shard.file.name)
        write(shard, *arguments)

    monkeypatch.setattr(shards, "write_shard", noted)
    caplog.set_level(logging.INFO)
    again = load_rows("reward", options, bpe_tokenizer)
    assert len(written) == len(set(written)) + 1, "each once: only evaluation rows have a first shard of the same name"
    assert "train: 3 of 9 shards" in caplog.text
    afresh = load_rows("reward", replace(options, cache_dir=str(tmp_path / "other")), bpe_tokenizer)
    assert files_of(again) == files_of(afresh)


def test_a_full_disk_keeps_what_is_finished(options, bpe_tokenizer, small_shards, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    for module, name in ((Spool, "append"), (shards, "join")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(EnvironmentFault, match=naming("cannot be written ... No space left")):
                load_rows("reward", options, bpe_tokenizer)
    monkeypatch.setattr(
        shards.ShardWriters, "write", lambda _, missing, what: missing and "eval" not in what and pytest.fail()
    )
    with pytest.raises(EnvironmentFault, match="eval.shards"):
        load_rows("reward", options, bpe_tokenizer)


def test_documents_are_joined_with_eos_and_cut_into_blocks(bpe_tokenizer, monkeypatch, tmp_path):
    texts = ["The quick brown fox.", "jumps", "over the lazy dog", "Boil water."] * 5
    stream = [token for text in texts for token in [*encode_text(bpe_tokenizer, text), EOS]]
    for size, shard_records in ((7, 3), (len(stream) - 1, 1), (5, 1000)):
        folder = tmp_path / f"{size}"
        folder.mkdir()
        monkeypatch.setattr(shards, "SHARD_RECORDS", shard_records)
        options = replace(options_of(folder, [{"text": text} for text in texts]), max_seq_len=size, eval_fraction=0.0)
        rows = load_rows("text", options, bpe_tokenizer).train.to_list()
        assert [token for row in rows for token in row["ids"]] == stream[: len(stream) - (len(stream) % size == 1)]
        assert all(len(row["ids"]) == size for row in rows[:-1])
        for row in rows:
            assert row["trained"] == [False] + [True] * (len(row["ids"]) - 1)
            assert (row["num_tokens"], row["num_trained"]) == (len(row["ids"]), len(row["ids"]) - 1)


def test_documents_follow_conversations_in_stage_1(bpe_tokenizer, tmp_path):
    rows = [{"text": "The quick brown fox."}, {"prompt": "tea?", "response": "yes"}]
    options = replace(options_of(tmp_path, rows), eval_fraction=0.0)
    conversation, block = load_rows("sft", options, bpe_tokenizer).train.to_list()
    assert conversation["ids"][-1] == EOS and not conversation["trained"][1]
    assert block["ids"] == [*encode_text(bpe_tokenizer, "The quick brown fox."), EOS]


def test_progress_tells_rows_and_rate(caplog, monkeypatch):
    """And the last row has a line where an earlier one had: all are told."""
    caplog.set_level(logging.INFO)
    now = [0.0]
    monkeypatch.setattr("pipeline.heartbeat.time.monotonic", lambda: now[0])
    progress = RowProgress("tokenising", 4000)
    for _ in range(4):
        now[0] += 2.0
        progress.add(1000)
    assert caplog.messages == [naming(f"{done} of 4,000 rows ... 500 rows/s") for done in ("3,000", "4,000")]


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_pairs(monkeypatch, tmp_path) -> str:
    """The name of a module whose pairs take 20 ms each; it is imported here, and by name in the processes."""
    (tmp_path / "slow_pairs.py").write_text(SLOW_PAIRS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_pairs", raising=False)
    monkeypatch.setitem(ROW_KINDS, "pairs", importlib.import_module("slow_pairs").KIND)
    return "slow_pairs"


def forks(process: psutil.Process) -> list[psutil.Process]:
    """The processes that the job of a process has forked."""
    jobs = [child for child in process.children() if "pipeline.data.shards" in " ".join(child.cmdline())]
    return [fork for job in jobs for fork in job.children()]


@pytest.mark.slow
def test_a_killed_preparation_leaves_no_process_and_goes_on(
    bpe_tokenizer, bpe_folder, small_shards, slow_pairs, monkeypatch, tmp_path, caplog
):
    options = options_of(
        tmp_path, [{"prompt": f"{i}?", "chosen": "a " * 50 + str(i), "rejected": "b " * 50} for i in range(800)]
    )
    command = [sys.executable, "-c", PROGRAM, options.data_path[0], options.cache_dir, str(bpe_folder)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    while len(forks(psutil.Process(process.pid))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=5.0)
    assert len(children) == 3 and alive == []
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(ROW_KINDS, "pairs", PAIRS)
    options = DataOptions(data_path=options.data_path, cache_dir=options.cache_dir)
    again = load_rows("reward", options, bpe_tokenizer)
    assert "shards are finished already" in caplog.text
    afresh = load_rows("reward", replace(options, cache_dir=str(tmp_path / "other")), bpe_tokenizer)
    assert files_of(again) == files_of(afresh)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["job", "fork"])
def test_a_process_that_is_killed_is_named(which, options, bpe_tokenizer, small_shards, slow_pairs, monkeypatch):
    """And the same command goes on behind the shards that are finished."""
    write_one_here(monkeypatch)
    here = psutil.Process()
    of_other_tests = here.children()

    def kill() -> None:
        deadline = time.monotonic() + 100.0
        while len(found := forks(here)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (found[0].parent() if which == "job" else found[0]).kill()

    with ThreadPoolExecutor(1) as pool:
        killed = pool.submit(kill)
        with pytest.raises(EnvironmentFault, match=naming("killed (out of memory ... finished shards")):
            load_rows("reward", options, bpe_tokenizer)
        killed.result()
    assert here.children() == of_other_tests
    assert len(load_rows("reward", options, bpe_tokenizer).train) > 50


@pytest.mark.slow
def test_errors_of_processes_are_one_line(options, bpe_tokenizer, small_shards, monkeypatch):
    write_one_here(monkeypatch, write=lambda *_: None)
    bpe_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}"
    with pytest.raises(InputError, match=r"rewrites earlier turns .*; --template human_assistant") as refused:
        load_rows("reward", replace(options, template="tokenizer"), bpe_tokenizer)
    assert "in error_of" in "".join(refused.value.__notes__)
