"""Weights & Biases, executed offline: what its own file of a run holds."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_run import run_command

pytest.importorskip("wandb", reason="the wandb package is not installed (requirements/trackers.txt)")

pytestmark = pytest.mark.slow

BLOCK, FIRST, LAST = 32768, (1, 2), (1, 4)  # of LevelDB's log format, in which wandb writes


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A run of two steps, continued to four, in `out/`; and its metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.delenv("WANDB_PROJECT", raising=False)
        for steps in (2, 4):
            train(folder, steps)
    return folder


def train(folder: Path, steps: int, *more: object) -> None:
    words = ["--model-name-or-path", "base", "--data-path", "train.jsonl", "--data-split", "none", "--max-seq-len", 48]
    size = ["--per-device-train-batch-size", 2, "--max-steps", steps, "--lr-scheduler-type", "constant"]
    ended = run_command("step1_sft", [*words, *size, "--output-dir", "out/sft", "--enable-wandb", *more], folder=folder)
    assert ended.code == 0 and "wandb: not available" not in ended.stderr, ended.stderr[-2000:]


def payloads(file: Path) -> Iterator[bytes]:
    """The records of a file: parts of 7 bytes of header (checksum, length, kind) and content; none crosses a block."""
    data, at, content = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        content = part if kind in FIRST else content + part
        if kind in LAST:
            yield content


def runs(folder: Path) -> list[tuple[Any, list[dict[str, Any]]]]:
    """(description, logged lines) of each start, in order."""
    from wandb.proto import wandb_internal_pb2 as messages

    found = []
    for file in sorted((folder / "out" / "runs" / "sft").rglob("*.wandb")):
        records = [messages.Record.FromString(payload) for payload in payloads(file)]
        lines = [
            {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        found.append((next(record.run for record in records if record.HasField("run")), lines))
    return found


def test_a_run_is_logged_under_its_project_group_and_name(folder: Path) -> None:
    run, lines = runs(folder)[0]
    assert (run.project, run.run_group, run.display_name) == ("rlhf-pipeline", "out", "out-sft")
    settings = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert (settings["max_steps"], settings["model_name_or_path"], settings["seed"]) == (2, "base", 1234)
    assert [line["_step"] for line in lines] == [0, 1, 2]


def test_a_resumed_run_continues(folder: Path) -> None:
    (first, before), (second, after) = runs(folder)
    assert first.run_id == second.run_id
    logged = {line["_step"]: line["loss"] for line in [*before, *after] if "loss" in line}
    metrics = [json.loads(line) for line in (folder / "out/runs/sft/metrics.jsonl").read_text().splitlines()]
    assert logged == {line["step"]: pytest.approx(line["loss"]) for line in metrics if "loss" in line}
    assert list(logged) == [1, 2, 3, 4]


def test_a_run_that_starts_over_is_another_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    known = {run.run_id for run, _ in runs(folder)}
    train(folder, 2, "--overwrite", "true")
    assert runs(folder)[-1][0].run_id not in known
