"""Two real ranks through the launch script: one is killed, raises or hangs, or the run is asked to stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rank_run import ROOT, Ended, RankRun, listening_addresses, start, words
from support.messages import naming

HOST = socket.gethostname()
Start = Callable[..., RankRun]
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Iterator[Start]:
    """Starts runs of step 1, and leaves none."""
    runs: list[RankRun] = []

    def begin(**changes: object) -> RankRun:
        runs.append(start(1, tmp_path, folder, **changes))
        return runs[-1]

    yield begin
    for each in runs:
        each.clean_up()


def disturb(run: RankRun, rank: int, number: int) -> Ended:
    """Send a signal to a rank after a few steps, and wait for the end of all."""
    run.wait_for_steps(3)
    since = time.monotonic()
    run.send(rank, number)
    return run.ended(since)


def assert_named(run: RankRun, ended: Ended, *causes: str) -> None:
    """Exit 1, nothing left, and the last lines say who, where, when, why."""
    assert ended.code == 1 and run.left() == [], ended.stderr
    assert f"error: rank 1 on {HOST}, step " in ended.last_lines and ", phase " in ended.last_lines
    assert "log/rank-1.txt" in ended.stderr.splitlines()[-1]
    assert all(cause in ended.last_lines for cause in causes), ended.stderr
    assert ended.stderr.count("error: rank ") == 1
    assert "Traceback" not in ended.stderr and "sigkill_handler" not in ended.stderr


@pytest.mark.slow
def test_a_killed_rank(run: Start) -> None:
    job = run()
    ended = disturb(job, 1, signal.SIGKILL)
    assert_named(job, ended, "killed by SIGKILL", "out of memory?", " MiB", "GiB were free")
    assert ended.took_s < 30.0


@pytest.mark.slow
def test_a_rank_that_raises(run: Start) -> None:
    job = run()
    ended = disturb(job, 1, signal.SIGUSR1)
    assert_named(job, ended, "ValueError: on purpose")
    assert ended.took_s < 30.0
    assert "step 0, phase" not in ended.last_lines, "a rank that can still speak says its exact step"
    assert "ValueError: on purpose" in (job.run_dir / "log" / "rank-1.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_hangs(run: Start) -> None:
    job = run(rank_timeout_s=5)
    ended = disturb(job, 1, signal.SIGSTOP)
    assert_named(job, ended, "no sign of life for 5 s in phase train", "its process is stopped (SIGSTOP)")
    assert 4.0 < ended.took_s < 40.0


@dataclass(frozen=True)
class Story:
    """A run that was looked at while it ran, met by two others, one with a run folder of its own, and stopped."""

    run: RankRun
    ended: Ended
    pid: int
    listening: set[str]
    second: subprocess.CompletedProcess[str]
    third: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Story:
    own = tmp_path_factory.mktemp("story")
    job = start(1, own, folder)
    try:
        job.wait_for_steps(3)
        listening = listening_addresses([job.pid(0), job.pid(1)])
        script = str(ROOT / "launch" / "single_gpu.sh")
        second, third = (
            subprocess.run(
                ["bash", script, "1", *flags], env=os.environ | {"PYTHON": sys.executable},
                cwd=own, capture_output=True, text=True, timeout=60, check=False,
            )
            for flags in (words(1, folder), words(1, folder, run_dir="third", max_steps=1))
        )  # fmt: skip
        since = time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        return Story(job, job.ended(since), job.process.pid, listening, second, third)
    finally:
        job.clean_up()


@pytest.mark.slow
def test_a_stop_saves_and_exits_75(story: Story) -> None:
    ended = story.ended
    assert ended.code == 75 and ended.took_s < 30.0 and story.run.left() == [], ended.stderr
    last = json.loads((story.run.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert ended.stderr.splitlines()[-1].startswith(f"stopped at step {last} of ")
    assert (story.run.run_dir / "checkpoints" / f"step-{last}" / "manifest.json").is_file()
    assert "Traceback" not in ended.stderr and "sigkill_handler" not in ended.stderr and "error" not in ended.stderr


def test_only_loopback_is_listened_on(story: Story) -> None:
    assert story.listening and story.listening <= LOOPBACK


def test_a_second_run_in_the_folder_is_refused(story: Story) -> None:
    assert story.second.returncode == 3
    lines = story.second.stderr.splitlines()
    assert len(lines) == 1 and lines[0] == naming(f"pid {story.pid} on {HOST}")


def test_a_second_run_of_the_same_output_is_refused_whatever_its_run_folder(story: Story) -> None:
    assert story.third.returncode == 3
    (line,) = story.third.stderr.splitlines()
    assert line == naming(f"pid {story.pid} on {HOST} ... another --output-dir")


@pytest.mark.slow
def test_a_stop_while_ranks_start(run: Start) -> None:
    job = run()
    job.pid(0)
    since = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    ended = job.ended(since)
    assert ended.code == 75 and job.left() == [], ended.stderr
    assert "stopped before the first step" in ended.last_lines and "Traceback" not in ended.stderr


def test_a_stop_before_any_rank_has_started(run: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATE_RANKS", "5")
    job = run()
    job.wait(lambda: (job.run_dir / "run.lock").is_file() and (job.run_dir / "run.lock").read_text() != "")
    job.process.send_signal(signal.SIGTERM)
    ended = job.ended(time.monotonic())
    assert ended.code == 75 and job.left() == [], ended.stderr
    assert "before any rank had started" in ended.last_lines and "Traceback" not in ended.stderr
