"""`python -m benchmarks.race`: the search over TRL's settings, and both sides of tiny rows on a CPU."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.source_tree import ROOT

from benchmarks.race.__main__ import Race
from benchmarks.race.sides import ROWS, START, TRIED, candidates
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
    best = made(tmp_path).search(START["grpo"])
    assert best == START["grpo"] | {"micro_batch": 32, "vllm_gpu_memory_utilization": 0.2}
    lines = [json.loads(line) for line in (tmp_path / "race.jsonl").read_text().splitlines()]
    assert len(lines) == 1 + len(list(candidates("grpo", START["grpo"]))) <= 12
    assert [line["turn"] for line in lines] == [*range(len(lines))]
    assert sum("error" in line for line in lines) == 1 and all(line["side"] == "search" for line in lines)


def test_a_search_that_was_cut_off_tries_the_rest(tmp_path, monkeypatch):
    """What failed is tried again: it may have been the end of the job that made it fail."""
    runs = []

    def trl(self, name, settings):
        runs.append(name)
        if len(runs) == 7:
            raise BenchError("cut off")
        return {"step_s": 10 - settings["micro_batch"] / 16 + (settings["weights"] == "float32")}

    monkeypatch.setattr(Race, "trl", trl)
    best = made(tmp_path).search(START["grpo"])
    lines = (tmp_path / "race.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "race.jsonl").write_text("".join(lines[:8]))
    del runs[:-1]
    assert made(tmp_path).search(START["grpo"]) == best
    assert runs[1:] == ["trl-search-6", *(f"trl-search-{turn}" for turn in range(8, len(lines)))]
    replace(made(tmp_path), row=ROWS["grpo-1.5b"]).search(START["grpo"])
    assert runs[-len(lines) :] == [f"trl-search-{turn}" for turn in range(len(lines))], "another row of the same file"


def test_a_start_that_fails_is_no_end_of_the_search(tmp_path, monkeypatch):
    def trl(self, name, settings):
        if not settings["gradient_checkpointing"]:
            raise BenchError("out of memory")
        return {"step_s": 5.0}

    monkeypatch.setattr(Race, "trl", trl)
    assert made(tmp_path).search(START["grpo"])["gradient_checkpointing"] is True
    monkeypatch.setattr(Race, "trl", lambda *_: (_ for _ in ()).throw(BenchError("no")))
    (tmp_path / "race.jsonl").unlink()
    with pytest.raises(BenchError, match="no settings"):
        made(tmp_path).search(START["grpo"])


@pytest.mark.parametrize("kind", TRIED)
def test_at_most_twelve_settings_are_tried(kind):
    assert 1 + len(list(candidates(kind, START[kind]))) <= 12


def raced(folder: Path, row: str) -> list[dict[str, Any]]:
    """The lines of one turn of a row of tiny models: ours and TRL's."""
    words = [row, "--work", folder / "work", "--json", folder / "race.jsonl", "--turns", "1"]
    call = [sys.executable, "-m", "benchmarks.race", *map(str, words), "--settings", '{"micro_batch": 2}']
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{row}: ours ")
    return [json.loads(line) for line in (folder / "race.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed, which is raced against")
def test_both_sides_of_a_tiny_row_run(tmp_path):
    ours, theirs = raced(tmp_path, "tiny")
    for found in (ours, theirs):
        phases = found["generate_s"] + found["score_s"] + found["train_s"]
        assert found["mean_length"] > 1 and 0.5 * found["step_s"] < phases < 1.5 * found["step_s"]
        assert found["steps"] == ROWS["tiny"].steps
    prompts = [(tmp_path / f"work/tiny/{side}.jsonl").read_text().splitlines() for side in ("ours", "trl")]
    assert len(prompts[0]) == len(prompts[1]) == ROWS["tiny"].prompts * (ROWS["tiny"].steps + ROWS["tiny"].warm_up)
    assert all(
        json.loads(mine)["prompt"] in json.loads(theirs)["prompt"] for mine, theirs in zip(*prompts, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "sft"])
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed, which is raced against")
def test_both_sides_of_a_supervised_row_train_on_the_same_tokens(tmp_path, kind):
    ours, theirs = raced(tmp_path, f"tiny-{kind}")
    row = ROWS[f"tiny-{kind}"]
    longest = row.prompts * (2 if kind == "dpo" else 1) * (row.prompt + row.answer)
    for found in (ours, theirs):
        assert 0.8 * longest < found["tokens_per_step"] <= longest, "rows of full length"
        assert found["steps"] == row.steps and found["step_s"] > 0
