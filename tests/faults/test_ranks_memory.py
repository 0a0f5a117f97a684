"""Two real ranks, of which one runs out of memory: the job is started again with the halved micro-batch."""

import json
import re
import time
from pathlib import Path

import pytest
from rank_run import START_S, RankRun, start
from safetensors.torch import load_file
from support.messages import naming

SETTINGS = {"max_steps": 4, "learning_rate": 1e-3, "adam_eps": 1e-3, "print_steps": 1}
CAUSE = "phase train: out of memory: 2.00 GiB asked for, 44.69 MiB free of 79.11 GiB on the device"


def run_to_the_end(folder: Path, data: Path, *, code: int = 0, **changes: object) -> RankRun:
    folder.mkdir()
    job = start(1, folder, data, **SETTINGS | changes)
    try:
        ended = job.ended(time.monotonic(), 3 * START_S)
    finally:
        job.clean_up()
    assert ended.code == code and job.left() == [], ended.stderr
    return job


@pytest.fixture(scope="module")
def plain(folder: Path) -> RankRun:
    """A run that was asked for smaller micro-batches."""
    return run_to_the_end(folder / "plain", folder, per_device_train_batch_size=2, gradient_accumulation_steps=2)


def restarts(job: RankRun) -> list[str]:
    return [line.removeprefix(f"{CAUSE}; ") for line in job.stderr.splitlines() if "starting again" in line]


def micro_batches(job: RankRun) -> list[int]:
    lines = map(json.loads, (job.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["micro_batch_size"] for line in lines if "micro_batch_size" in line]


def assert_same_model(job: RankRun, expected: RankRun) -> None:
    found, other = (load_file(each.folder / "sft/out/model.safetensors") for each in (job, expected))
    assert max((found[name] - other[name]).abs().max().item() for name in other) < 1e-6


@pytest.mark.faults
def test_a_job_starts_again_from_its_last_checkpoint(tmp_path: Path, folder: Path, plain: RankRun, monkeypatch) -> None:
    """Rank 1 fails in the third step; --overwrite was for the first start."""
    monkeypatch.setenv("OUT_OF_MEMORY", "1:2:3")
    job = run_to_the_end(tmp_path / "halved", folder, save_steps=2, overwrite="true")
    assert restarts(job) == [naming("the last checkpoint ... --per-device-train-batch-size 2 instead of 4")]
    assert micro_batches(job) == [4, 4, 2, 2] and not re.search("Traceback|error: ", job.stderr)
    assert_same_model(job, plain)
    state = json.loads((job.run_dir / "checkpoints/step-4/state.json").read_text())["state"]
    assert state["halved"] == {"train": [4, 2]}


@pytest.mark.faults
def test_a_job_without_a_checkpoint_starts_over_once_per_halving(
    tmp_path: Path, folder: Path, plain: RankRun, monkeypatch
) -> None:
    monkeypatch.setenv("OUT_OF_MEMORY", "0:1:1")
    job = run_to_the_end(tmp_path / "halved", folder)
    first = "the first step ... --per-device-train-batch-size"
    assert restarts(job) == [naming(f"{first} 2 instead of 4"), naming(f"{first} 1 instead of 4")]
    assert micro_batches(job) == [1] * 4
    assert_same_model(job, plain)


@pytest.mark.faults
def test_one_row_that_does_not_fit_ends_the_job(tmp_path: Path, folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("OUT_OF_MEMORY", "1:0:1")
    job = run_to_the_end(tmp_path / "none", folder, code=3)
    assert len(restarts(job)) == 2
    first = next(line for line in job.stderr.splitlines() if line.startswith("error: "))
    assert first == naming(f"error: {CAUSE} ... --per-device-train-batch-size 1 ... --max-seq-len")
