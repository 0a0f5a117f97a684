"""`python -m benchmarks.race`: the search over TRL's settings, and both sides of a tiny row on a CPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.source_tree import ROOT

from benchmarks.race.__main__ import ROWS, START, Race, candidates
from benchmarks.speed.jobs import BenchError


def made(folder: Path) -> Race:
    return Race(ROWS["tiny"], folder, "", folder / "race.jsonl")


def test_the_search_keeps_what_is_faster_and_goes_on_after_a_failure(tmp_path, monkeypatch):
    """A step is shorter with larger micro-batches until 64, which does not fit, and with each of two other settings."""

    def trl(self, name, settings):
        if settings["micro_batch"] == 64:
            raise BenchError("out of memory")
        seconds = 10 - settings["micro_batch"] / 16 + settings["gradient_checkpointing"]
        seconds -= settings["vllm_gpu_memory_utilization"] == 0.2
        return {"step_s": seconds + (settings["weights"] == "float32")}

    monkeypatch.setattr(Race, "trl", trl)
    best = made(tmp_path).search(START)
    assert best == START | {"micro_batch": 32, "vllm_gpu_memory_utilization": 0.2}
    lines = [json.loads(line) for line in (tmp_path / "race.jsonl").read_text().splitlines()]
    assert len(lines) == 1 + len(list(candidates(START))) <= 12
    assert [line["turn"] for line in lines] == [*range(len(lines))]
    assert sum("error" in line for line in lines) == 1 and all(line["side"] == "search" for line in lines)


def test_a_start_that_fails_is_no_end_of_the_search(tmp_path, monkeypatch):
    def trl(self, name, settings):
        if not settings["gradient_checkpointing"]:
            raise BenchError("out of memory")
        return {"step_s": 5.0}

    monkeypatch.setattr(Race, "trl", trl)
    assert made(tmp_path).search(START)["gradient_checkpointing"] is True
    monkeypatch.setattr(Race, "trl", lambda *_: (_ for _ in ()).throw(BenchError("no")))
    with pytest.raises(BenchError, match="no settings"):
        made(tmp_path).search(START)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed, which is raced against")
def test_both_sides_of_a_tiny_row_run(tmp_path):
    words = ["tiny", "--work", tmp_path / "work", "--json", tmp_path / "race.jsonl", "--turns", "1"]
    words += ["--settings", '{"micro_batch": 2, "weights": "float32"}']
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.race", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = map(json.loads, (tmp_path / "race.jsonl").read_text().splitlines())
    for found in (ours, theirs):
        phases = found["generate_s"] + found["score_s"] + found["train_s"]
        assert found["mean_length"] > 1 and 0.5 * found["step_s"] < phases < 1.5 * found["step_s"]
        assert found["steps"] == ROWS["tiny"].steps
    assert done.stdout.startswith("tiny: ours ")
    prompts = [(tmp_path / f"work/tiny/{side}.jsonl").read_text().splitlines() for side in ("ours", "trl")]
    assert len(prompts[0]) == len(prompts[1]) == ROWS["tiny"].prompts * (ROWS["tiny"].steps + ROWS["tiny"].warm_up)
    assert all(
        json.loads(mine)["prompt"] in json.loads(theirs)["prompt"] for mine, theirs in zip(*prompts, strict=True)
    )
