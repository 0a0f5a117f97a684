"""The same disturbances many times (R6 and R7 of the goals), and the rarer ones: minutes, run by `make test-faults`."""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_run import ROOT, RUN_FOLDERS, Ended, RankRun, environment_of, launch, start, words
from support.messages import naming
from support.tiny_run import read_metrics

pytestmark = pytest.mark.faults

NUM_STOPS = 20
NUM_FAULTS = 10  # of each of the three kinds
HOST = socket.gethostname()


def newest_checkpoint(run_dir: Path) -> int:
    """The step of the newest complete checkpoint; 0 where there is none."""
    return max((int(file.parent.name[5:]) for file in run_dir.glob("checkpoints/step-*/manifest.json")), default=0)


def finish(run: RankRun, since: float) -> Ended:
    """The end of a run, and no process of it left."""
    try:
        ended = run.ended(since)
        assert run.left() == [], ended.stderr
        return ended
    finally:
        run.clean_up()


def test_stops_at_random_times_of_step_3(tmp_path: Path, folder: Path) -> None:
    """One run, stopped 20 times and started again by the same command; a stop loses no step."""
    chance = random.Random(6)
    took = []
    for number in range(NUM_STOPS):
        run = start(3, tmp_path, folder)
        if number % 5:
            run.wait_for_steps(1)
            time.sleep(chance.uniform(0.0, 3.0))
        else:
            run.pid(0)
            time.sleep(chance.uniform(0.0, 10.0))
        since = time.monotonic()
        run.process.send_signal(chance.choice([signal.SIGTERM, signal.SIGINT]))
        ended = finish(run, since)
        took.append(ended.took_s)
        assert ended.code == 75 and "Traceback" not in ended.stderr and "error:" not in ended.stderr, ended.stderr
        if run.steps():
            last = max(line["step"] for line in read_metrics(run.run_dir))
            assert last - newest_checkpoint(run.run_dir) <= 1, ended.stderr
    print(f"stops: {NUM_STOPS}, seconds: median {sorted(took)[NUM_STOPS // 2]:.1f}, longest {max(took):.1f}")
    assert max(took) < 30.0


FAULTS = {
    "killed": (signal.SIGKILL, "killed by SIGKILL"),
    "raising": (signal.SIGUSR1, "ValueError: on purpose"),
    "stopped": (signal.SIGSTOP, "no sign of life for"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_one_rank(tmp_path: Path, folder: Path, kind: str) -> None:
    """At random times of random steps, of either rank: named in time, and nothing is left."""
    number, words_of_cause = FAULTS[kind]
    limit_s = 15.0 if kind == "stopped" else 10.0
    chance = random.Random(kind)
    took = []
    for _ in range(NUM_FAULTS):
        rank, step = chance.choice([0, 1]), chance.choice([1, 2, 3])
        run = start(step, tmp_path, folder, rank_timeout_s=5)
        run.wait_for_steps(1)
        time.sleep(chance.uniform(0.0, 2.0))
        since = time.monotonic()
        run.send(rank, number)
        ended = finish(run, since)
        took.append(ended.took_s)
        assert ended.code == 1 and f"error: rank {rank} on {HOST}, step " in ended.last_lines, ended.stderr
        assert words_of_cause in ended.last_lines and f"log/rank-{rank}.txt" in ended.last_lines
        assert ended.stderr.count("error: rank ") == 1 and "Traceback" not in ended.stderr
    print(f"{kind}: {NUM_FAULTS}, seconds: median {sorted(took)[NUM_FAULTS // 2]:.1f}, longest {max(took):.1f}")
    assert max(took) < limit_s


def test_a_rank_that_hangs_in_python(tmp_path: Path, folder: Path) -> None:
    """Its process is not stopped: the rank that is furthest behind, or was heard of first, is the one."""
    run = start(1, tmp_path, folder, rank_timeout_s=5)
    run.wait_for_steps(3)
    since = time.monotonic()
    run.send(1, signal.SIGUSR2)
    ended = finish(run, since)
    assert ended.code == 1 and ended.took_s < 15.0
    assert naming("5 s ... phase train") in ended.last_lines.splitlines() and "SIGSTOP" not in ended.last_lines


def test_a_rank_without_memory(tmp_path: Path, folder: Path) -> None:
    """The kernel refuses memory: the rank says so, with what it held. A row at a time is no batch to be halved."""
    run = start(1, tmp_path, folder, per_device_train_batch_size=1)
    run.wait_for_steps(3)
    since = time.monotonic()
    resource.prlimit(run.pid(1), resource.RLIMIT_AS, (2**33, 2**33))
    run.send(1, signal.SIGRTMIN)  # takes 16 GiB
    ended = finish(run, since)
    assert ended.code == 3 and ended.took_s < 10.0 and f"error: rank 1 on {HOST}" in ended.last_lines, ended.stderr
    assert naming("error: phase train ... out of memory ... the host") in ended.last_lines.splitlines()
    assert "(this process held 0." in ended.last_lines


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_supervisor_the_rank_that_fails_says_so(tmp_path: Path, folder: Path, rank: int) -> None:
    """By torchrun: the first error of any rank is printed, and what follows from it is not."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "step1_sft.main",
        *words(1, folder),
    ]  # fmt: skip
    run = launch(tmp_path, command, tmp_path / RUN_FOLDERS[1])
    run.wait_for_steps(3)
    (failing,) = (pid for pid in run.left() if f"\0RANK={rank}\0" in environment_of(pid))
    os.kill(failing, signal.SIGUSR1)
    ended = finish(run, time.monotonic())
    assert ended.code == 1
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: rank {rank} on {HOST}: ValueError: on purpose",
        f"error: the traceback is in sft/runs/out/log/rank-{rank}.txt",
    ]


def train(folder: Path, data: Path, *more: str) -> RankRun:
    """train.py with step 1 on two ranks."""
    given = words(1, data)
    flags = [f"--sft.{word[2:]}" if word.startswith("--") else word for word in given]
    command = [
        sys.executable, str(ROOT / "train.py"), "--step", "1", "--deployment-type", "single_node", "--num-gpus", "2",
        "--actor-model", "tiny", *more, *flags,
    ]  # fmt: skip
    return launch(folder, command, folder / RUN_FOLDERS[1])


def test_train_restarts_a_killed_step_from_its_checkpoint(tmp_path: Path, folder: Path) -> None:
    run = train(tmp_path, folder, "--max-restarts", "1", "--overwrite", "--sft.save-steps", "5")
    run.wait_for_steps(12)
    run.send(1, signal.SIGKILL)
    first = run.steps()
    run.wait(lambda: run.stderr.count("sft rows:") == 2)
    assert run.stderr.count("resuming from") == 0
    run.wait(lambda: run.steps() > first)
    since = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    ended = finish(run, since)
    assert ended.code == 75 and ended.took_s < 30.0, ended.stderr
    assert f"error: rank 1 on {HOST}" in ended.stderr and "killed by SIGKILL" in ended.stderr
    assert ended.stderr.count("resuming from") == 1, "--overwrite was for the first time"
    steps = [line["step"] for line in read_metrics(run.run_dir) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), "it went on from a checkpoint"


@pytest.mark.parametrize("victim", ["train.py", "supervisor"])
def test_nothing_is_left_where_a_parent_is_killed(tmp_path: Path, folder: Path, victim: str) -> None:
    """kill -9 of train.py or of the supervisor: the ranks save and end."""
    run = train(tmp_path, folder)
    run.wait_for_steps(3)
    if victim == "train.py":
        run.process.kill()
    else:
        (supervisor,) = (pid for pid in run.left() if "rlhf.launch" in command_of(pid))
        os.kill(supervisor, signal.SIGKILL)
    end = time.monotonic() + 30.0
    while run.left() and time.monotonic() < end:
        time.sleep(0.1)
    left = run.left()
    run.clean_up()
    assert left == [], run.stderr
    assert newest_checkpoint(run.run_dir) > 0, run.stderr


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def test_a_second_run_without_a_launch_script_is_refused(tmp_path: Path, folder: Path) -> None:
    """By `python -m` and by torchrun; the run that was there goes on."""
    run = start(1, tmp_path, folder)
    run.wait_for_steps(1)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for launcher in ([], torchrun):
        command = [sys.executable, *launcher, "-m", "step1_sft.main", *words(1, folder)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == (1 if launcher else 3)
        assert naming(f"pid {run.process.pid} on {HOST}") in done.stderr.splitlines()
    run.wait_for_steps(1)
    run.process.send_signal(signal.SIGTERM)
    assert finish(run, time.monotonic()).code == 75
