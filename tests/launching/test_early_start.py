"""Ranks start while `train.py` looks at models and data: they import, and touch nothing before its word.

Ranks and the look are stand-ins but in the last two tests.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import forks
from support.command_run import run_command
from support.launch_stub import ROOT, TINY, started, stub_environment, train, write_program

from pipeline.errors import InputError
from pipeline.launching.request import parse_request
from pipeline.preparation import stage_job
from pipeline.preparation.stage_job import may_start_early
from pipeline.processes import WAITS, is_alive
from rlhf.train import starts_early
from rlhf.train_plan import make_plan
from step1_sft.stage import STAGE

TWO = ("--step", "1", *TINY, "--deployment-type", "single_node", "--num-gpus", "2")


def early_ranks(folder: Path) -> list[int]:
    file = folder / "log.jsonl.early"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(is_so, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(is_so())


@pytest.mark.slow
def test_ranks_that_wait_are_those_that_run(tmp_path):
    done = train(tmp_path, *TWO, STUB_LOOK="0", STUB_OUTCOMES="0,0")
    assert done.returncode == 0 and "== stage 1: done in" in done.stdout, done.stderr
    assert len(early_ranks(tmp_path)) == 2, "both, while the look ran: it waits for one of them"
    assert [words[0] for words in started(tmp_path)] == ["step1_sft.main"]


@pytest.mark.slow
def test_only_the_first_stage_starts_early(tmp_path):
    done = train(tmp_path, "--step", "1", "2", *TINY, gpus=1, STUB_LOOK="0", STUB_OUTCOMES="0")
    assert done.returncode == 0, done.stderr
    assert len(early_ranks(tmp_path)) == 1
    assert [words[0] for words in started(tmp_path)] == ["step1_sft.main", "step2_reward.main"]


def test_a_refused_run_leaves_no_process_and_no_file(tmp_path):
    done = train(tmp_path, *TWO, STUB_LOOK="2")
    assert done.returncode == 2 and "error" not in done.stderr and "== stage" not in done.stdout
    assert early_ranks(tmp_path) and not any(map(is_alive, early_ranks(tmp_path)))
    assert started(tmp_path) == [] and not (tmp_path / "output").exists()


def test_ranks_that_wait_end_with_a_killed_train(tmp_path):
    look = f'#!/bin/sh\n[ "$1 $2" != "-m rlhf.preflight" ] || exec sleep 4\nexec {sys.executable} "$@"\n'
    variables = stub_environment(tmp_path, gpus=2) | {"PYTHON": str(write_program(tmp_path / "slow_look", look))}
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *TWO], cwd=tmp_path, env=variables)
    assert wait_until(lambda: len(early_ranks(tmp_path)) == 2)
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(is_alive, early_ranks(tmp_path))), 10.0)
    assert started(tmp_path) == [] and not (tmp_path / "output").exists()


def test_flags_that_are_still_to_be_measured_are_not_started_with():
    assert may_start_early(parse_request("single_gpu", ["1"]))
    for words, may in (([], True), (["--auto", "fit"], True), (["--auto", "measure"], False)):
        plan = make_plan(["--step", "1", *TINY, "--data-path", "a.jsonl", *words], prog="train.py")
        assert starts_early(plan.chosen[0], plan.config, dry_run=False) == may


@pytest.mark.parametrize("words", [("single_gpu", "--enable-each-rank-log", "logs"), ("multi_node",)])
def test_ranks_of_other_hosts_or_with_files_of_their_own_are_not_started_early(words):
    assert not may_start_early(parse_request(words[0], [*words[1:], "1"]))


def test_ranks_start_before_their_supervisor_reads_flags_and_end_if_these_are_wrong(monkeypatch):
    """It may take a second: a DeepSpeed JSON among the flags needs an import of deepspeed."""
    ranks: list[subprocess.Popen[bytes]] = []

    def start(*_: object) -> dict[int, subprocess.Popen[bytes]]:
        ranks.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return dict(enumerate(ranks))

    monkeypatch.setenv(WAITS, "1")
    monkeypatch.setattr(stage_job, "start_early", start)
    request = parse_request("single_gpu", ["1", "--no-such-flag", "1"])
    with pytest.raises(InputError, match="--no-such-flag"):
        stage_job.run_job(STAGE, request, SimpleNamespace(first=None, second=None))  # type: ignore[arg-type]
    (rank,) = ranks
    assert rank.returncode == -signal.SIGKILL


def test_a_rank_without_its_word_ends_before_it_reads_a_flag(tmp_path):
    done = run_command("step1_sft", ["--no-such-flag", "1"], folder=tmp_path, **{WAITS: "1"})  # its input is empty
    assert (done.code, done.stdout, done.stderr) == (75, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["step1_sft", "step2_reward", "step3_ppo"])
def test_a_rank_imports_all_that_it_runs_before_its_word(tmp_path, stage):
    command = [sys.executable, "-X", "importtime", "-m", f"{stage}.main", "--output-dir", "out"]
    variables = forks.environment() | {WAITS: "1", "DS_ACCELERATOR": "cpu"}
    with (tmp_path / "imports").open("w") as file:
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdin=subprocess.PIPE, stderr=file)
    wanted = ("torch", "deepspeed", "transformers", "datasets", f"{stage}.training")
    try:
        lines = (tmp_path / "imports").read_text
        assert wait_until(lambda: all(f" {name}\n" in lines() for name in wanted), 120.0)
        assert process.poll() is None
    finally:
        process.stdin.close()
    assert process.wait(60) == 75 and os.listdir(tmp_path) == ["imports"]
