"""Records wait in a file: what is read back is what was written, and memory hardly grows with the rows."""

import json
import os
import random
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.row_options import of_stage
from support.source_tree import ROOT
from support.tiny_run import write_lines

from pipeline.data.counts import Counts, Origin
from pipeline.data.formats import read_records
from pipeline.data.readers import Row
from pipeline.data.selection import DataOptions, select_records
from pipeline.data.sources import read_rows
from pipeline.data.spool import Spool, records_at

# Prepares a file, and prints the largest resident memory in KiB of this process and of one that it started. It is read
# before the prepared file is mapped: pages of that count as memory of the process, but are the kernel's cache.
PROGRAM = """
import json, sys
import psutil
from pipeline.data import shards
from pipeline.data.cache import load_or_build
from pipeline.data.selection import DataOptions
from pipeline.models.tokenizers import load_tokenizer

def peak(process):
    try:
        lines = [line for line in open(f"/proc/{process}/status") if line.startswith("VmHWM")]
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has ended since it was listed
    return int(lines[0].split()[1]) if lines else 0  # a process that has ended has no memory

def look():
    children = max((peak(child.pid) for child in psutil.Process().children(recursive=True)), default=0)
    peaks[:] = peak("self"), max(peaks[1], children)

def add_and_look(progress, number, add=shards.RowProgress.add):
    if number > 1:  # a shard: a look at all processes takes milliseconds, too long for each row that is read
        look()  # processes that tokenise may have ended when all shards are there
    add(progress, number)

def join_and_look(*words, join=shards.join):
    look()
    return join(*words)

peaks, shards.join, shards.RowProgress.add = [0, 0], join_and_look, add_and_look
options = DataOptions(data_path=(sys.argv[1],), cache_dir=sys.argv[2], data_split="none", rows="prompts")
built = load_or_build(options, load_tokenizer(sys.argv[3]))
print(json.dumps({"rows": len(built.train) + len(built.eval), "KiB": peaks}))
"""
FEW, MANY = 20_000, 200_000
BYTES_PER_ROW = 100  # the texts of a row below are 1,000


def test_records_are_read_back_as_they_were(tmp_path):
    rows = [
        {"prompt": "\u00fc \u4f60\u597d \U0001f600 \u2028 \\ \n", "chosen": "a\tb", "rejected": "", "margin": 0.1},
        {"messages": [{"role": role, "content": role} for role in ("system", "user", "assistant")], "split": "test"},
        {"text": "line\nline", "na\ud800me": 1},
        {"prompt": "q", "completion": "c", "label": False, "tests": ["\ud800 \u2028", {"a": None}]},
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1 / 3},
    ]
    raw = (Row(row, Origin("f\udc80.jsonl", number, "f"), None) for number, row in enumerate(rows, 1))
    records = list(read_records(raw, Counts(), passes_columns=True))
    with Spool(tmp_path / "records.jsonl") as spool:
        for record in records:
            spool.append(record)
        order = [3, 0, 2, 1]
        assert len(records) == 4, "the empty response is no record"
        assert list(records_at(spool.file, spool.starts(np.array(order)))) == [records[position] for position in order]
    assert not spool.file.exists()


def test_a_full_disk_leaves_no_file(tmp_path):
    """Closing fails, too, where buffered lines find no room."""
    (record,) = read_records(iter([Row({"text": "word"}, Origin("f.jsonl", 1, "f"), None)]), Counts())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(OSError, match="too large"), Spool(tmp_path / "records.jsonl") as spool:
            for _ in range(1_000):
                spool.append(record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not spool.file.exists()


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_choice_is_that_of_lists_of_records(stage, tmp_path):
    """The reference holds the records in lists, and says for each of them what the documentation says."""
    numbers = random.Random(3)
    for name in ("first", "second"):
        rows = [{"prompt": f"{numbers.randrange(60)}?", "response": "ab"[numbers.randrange(2)]} for _ in range(120)]
        write_lines(tmp_path / f"{name}.jsonl", rows + [{"text": f"{numbers.randrange(9)}"} for _ in range(12)])
    held_out = [{"prompt": f"{n}?", "response": "a", "split": "test" if n < 12 else "train"} for n in range(20)]
    write_lines(tmp_path / "held.jsonl", held_out + held_out[:3])
    paths = tuple(f"{tmp_path}/{name}.jsonl" for name in ("first", "second"))
    options = DataOptions(data_path=paths, eval_data_path=(f"{tmp_path}/held.jsonl",), data_split="none")
    with Spool(tmp_path / "records.jsonl") as spool:
        selected = select_records(of_stage(stage, options), spool, counts := Counts())
        found = [[r.origin for r in records_at(spool.file, spool.starts(part))] for part in selected]

    train = [record for path in paths for record in read_records(read_rows(path), Counts())]
    evaluation = [r for r in read_records(read_rows(options.eval_data_path[0]), Counts()) if r.split == "test"]
    evaluated = {record.prompt_id for record in evaluation}
    left = [record for record in train if record.prompt_id not in evaluated]
    if stage == "ppo":
        left, evaluation = (
            [r for n, r in enumerate(part) if not r.messages or r.prompt_id not in {s.prompt_id for s in part[:n]}]
            for part in (left, evaluation)
        )
    assert found == [[record.origin for record in part] for part in (left, evaluation)]
    assert counts["prompt is also an evaluation prompt"] == sum(r.prompt_id in evaluated for r in train) > 0
    contents = [(r.messages, r.chosen, r.text) for r in left]
    repeated = sum(content in contents[:n] for n, content in enumerate(contents))
    assert counts["row repeated"] == (repeated if stage == "sft" else 0) and repeated > 0
    assert (counts["prompt repeated"] > 3) is (stage == "ppo")


@pytest.mark.faults
def test_memory_grows_by_few_bytes_a_row(bpe_folder, tmp_path):
    (program := tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    peaks = []
    for number in (FEW, MANY):
        with (tmp_path / f"{number}.jsonl").open("w", encoding="utf-8") as file:
            for row in range(number):
                file.write(json.dumps({"prompt": f"{row}?", "chosen": f"{row} " + "c" * 500, "rejected": "r" * 500}))
                file.write("\n")
        command = [sys.executable, str(program), file.name, str(tmp_path / f"cache-{number}"), str(bpe_folder)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
        found = json.loads(done.stdout)
        assert found["rows"] == number and len(os.listdir(tmp_path / f"cache-{number}")) == 1
        peaks.append(found["KiB"])
    per_row = [(many - few) * 1024 / (MANY - FEW) for few, many in zip(*peaks, strict=True)]
    print(f"bytes a row: {per_row[0]:.0f} here, {per_row[1]:.0f} in a process that tokenises; KiB: {peaks}")
    assert max(per_row) < BYTES_PER_ROW
