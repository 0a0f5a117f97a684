"""Limits of reward workers: their memory, and the life of the processes that functions start."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.messages import naming
from support.reward_functions import MARK, functions_in, marked, nothing_left, scored, to

from pipeline.files import GIB
from pipeline.processes import memory_of_machine, python_environment
from pipeline.rewards.pool import Failure
from pipeline.rewards.worker_flags import WorkerFlags, reward_pool

HUNGRY = """
import resource
import numpy
def f(completions, mib):
    return [len(bytearray(mib[0] << 20)) >> 20]
def limit(completions):
    return [resource.getrlimit(resource.RLIMIT_DATA)[1] >> 20]
"""


def test_a_worker_has_so_much_memory_and_no_more(tmp_path):
    functions = functions_in(tmp_path / "f.py", HUNGRY, "f limit")
    with reward_pool(WorkerFlags(reward_worker_gib=0.5, reward_workers=1), functions) as pool:
        pool.check(["mib"])
        little, much = scored(pool, *(to("a", columns={"mib": mib}) for mib in (200, 600)))
    assert little == {"f": [200.0], "limit": [512.0]} and much["limit"] == [512.0]
    assert much["f"] == [Failure("raised", naming("MemoryError; ... --reward-worker-gib (f.py:5)"))]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 3), (1000, 1000)])
def test_without_the_flag_half_of_the_memory_is_shared(tmp_path, monkeypatch, ranks, workers):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    functions = functions_in(tmp_path / "f.py", HUNGRY, "limit")
    with reward_pool(WorkerFlags(reward_workers=workers), functions) as pool:
        pool.check(())
        ((found,),) = (one["limit"] for one in scored(pool, to("a")))
    assert found == max(memory_of_machine() // 2 // ranks // workers, GIB) >> 20


def all_end(mark: str) -> bool:
    limit = time.monotonic() + 20
    while marked(mark) and time.monotonic() < limit:
        time.sleep(0.05)
    return marked(mark) == []


# A process of its own session whose parent has ended, and one in the worker's group.
STARTING = """
import os, subprocess, time
def f(completions):
    subprocess.Popen(["sleep", "600"])
    subprocess.run(["bash", "-c", "sleep 600 &"], start_new_session=True)
    return [float(os.getpid())] * len(completions)
def hangs(completions):
    f(completions)
    time.sleep(600)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["f", "hangs"])
def test_processes_that_a_function_starts_end_with_the_run(tmp_path, name):
    functions = functions_in(tmp_path / "f.py", STARTING, name)
    with nothing_left(), reward_pool(WorkerFlags(reward_timeout_s=2, reward_workers=1), functions) as pool:
        pool.check(())
        scored(pool, to("a"))


def test_processes_that_a_function_starts_end_with_a_worker_that_dies(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, mark := f"dies-{os.getpid()}")
    with reward_pool(WorkerFlags(reward_workers=1), functions_in(tmp_path / "f.py", STARTING, "f")) as pool:
        pool.check(())
        ((pid,),) = (one["f"] for one in scored(pool, to("a")))
        assert isinstance(pid, float), pid
        assert len(marked(mark)) == 4
        os.kill(int(pid), signal.SIGKILL)
        assert all_end(mark)
        ((again,),) = (one["f"] for one in scored(pool, to("a")))
    assert again != pid


PARENT = """
import sys
from support.reward_functions import to
from pipeline.rewards.functions import parse_reward_functions
from pipeline.rewards.worker_flags import WorkerFlags, reward_pool
pool = reward_pool(WorkerFlags(), parse_reward_functions(sys.argv[1:]))
pool.check(())
pool.gather([pool.submit(to("a"))])
print("done", flush=True)
input()
"""


def test_processes_that_a_function_starts_end_with_a_rank_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, mark := f"killed-{os.getpid()}")
    (tmp_path / "f.py").write_text(STARTING)
    environment = python_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{os.path.dirname(os.path.dirname(__file__))}"
    command = [sys.executable, "-c", PARENT, f"{tmp_path}/f.py:f"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment) as parent:
        assert parent.stdout and parent.stdout.readline() == b"done\n" and len(marked(mark)) == 5
        parent.kill()
    assert all_end(mark)


STOPPED_AS_IT_FORKS = """
import os, signal, time
from pipeline.rewards import worker
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
worker.guarded(os.getppid())
time.sleep(60)
"""


def test_a_guard_that_is_stopped_as_it_starts_its_worker_ends_both():
    """Python drops an error that a signal raises while it forks."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_AS_IT_FORKS], env=python_environment(), capture_output=True, timeout=50,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"") and time.monotonic() - start < 20
