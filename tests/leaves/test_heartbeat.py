"""Signs of life: what a rank writes, and whom the supervisor takes for hung."""

import os
import socket
import subprocess
import time

import pytest

from pipeline import heartbeat
from pipeline.heartbeat import Beat, beat, read_beat
from pipeline.launching import rank_watch
from pipeline.launching.rank_watch import RankState, RankWatch
from pipeline.processes import Process, in_sessions, read_process
from pipeline.run.outcome import Outcome

HOST = socket.gethostname()


@pytest.fixture
def heart(tmp_path):
    heartbeat.start(tmp_path / "beats" / "rank-3.json")
    yield tmp_path / "beats" / "rank-3.json"
    heartbeat.end()


def test_without_a_stage_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    beat("train", 1)
    assert list(tmp_path.iterdir()) == [] and heartbeat.current_phase() == "start"


def test_a_new_phase_is_written_at_once_and_steps_twice_a_second(heart, monkeypatch):
    assert read_beat(heart).phase == "start" and read_beat(heart.with_name("rank-0.json")) is None
    now = [time.monotonic()]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    found = []
    for phase, step, passed_s in (
        ("train", 1, 0.0), ("train", 2, 0.2), ("train", 3, 0.2), ("train", 4, 0.2), ("save", 4, 0.0),
    ):  # fmt: skip
        now[0] += passed_s
        beat(phase, step)
        found.append((read_beat(heart).phase, read_beat(heart).step))
    assert found == [("train", 1), ("train", 1), ("train", 1), ("train", 4), ("save", 4)]


def test_the_last_step_is_told_at_the_end(heart):
    beat("train", 1)
    beat("train", 2)
    heartbeat.end()
    assert read_beat(heart).step == 2
    beat("train", 9)
    assert read_beat(heart).step == 2


def test_a_full_disk_ends_no_run(heart, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heartbeat, "replace_json", full)
    beat("train", 1)
    monkeypatch.undo()
    beat("save", 2)
    assert read_beat(heart).phase == "save"


def test_a_beat_is_cheap(heart):
    beat("train", 0)
    started = time.perf_counter()
    for step in range(10_000):
        beat("train", step)
    assert time.perf_counter() - started < 0.5  # 50 us a call, twenty times what was measured


# --- who hangs --------------------------------------------------------------------------------------------------------


def rank(number, *, heard_s_ago, phase="train", step=5, status="sleeping", code=None):
    """A rank of this machine in the state that is told."""
    said = Outcome(number, code, "", False, os.getpid(), HOST, "s", 0.0)
    process = Process(os.getpid(), status, 0.0, 0)
    return RankState(said, time.monotonic() - heard_s_ago, Beat(phase, step, 0.0), process)


def watch(tmp_path, *ranks):
    found = RankWatch(tmp_path, "s")
    found.ranks = {state.outcome.rank: state for state in ranks}
    return found


def test_the_memory_of_a_rank_is_what_it_held_before_it_was_ending(tmp_path, monkeypatch):
    """The kernel takes a process's memory away before the process is gone."""
    polled = iter([Process(7, "running", 1.0, 300), Process(7, "running", 1.0, 0)])
    monkeypatch.setattr(rank_watch, "read_process", lambda _: next(polled))
    state = rank(0, heard_s_ago=1)
    found = watch(tmp_path, state)
    for _ in range(2):
        found.poll_rank(0, state)
        assert state.process.rss_bytes == 300


@pytest.mark.parametrize(
    ("ranks", "hung"),
    [
        ([{"heard_s_ago": 9}, {"heard_s_ago": 8}], None),
        ([{"heard_s_ago": 11}, {"heard_s_ago": 12}], 1),
        ([{"heard_s_ago": 12, "step": 6}, {"heard_s_ago": 11, "step": 5}], 1),  # the step counts more
        ([{"heard_s_ago": 12}, {"heard_s_ago": 2, "status": "stopped"}], 1),
        ([{"heard_s_ago": 1}, {"heard_s_ago": 2, "status": "stopped"}], None),  # a moment's stop is no hang
        ([{"heard_s_ago": 12, "code": 0}, {"heard_s_ago": 2}], None),
        ([], None),
    ],
)
def test_the_rank_that_hangs(tmp_path, ranks, hung):
    states = [rank(number, **known) for number, known in enumerate(ranks)]
    found = watch(tmp_path, *states).hung(10)
    assert (found and found.outcome.rank) == hung
    assert watch(tmp_path, *states).hung(0) is None, "0 is never"


@pytest.mark.parametrize(("phase", "worked_s", "hangs"), [("start", 5, False), ("start", 0, True), ("train", 5, True)])
def test_reading_a_model_is_no_hang_while_the_processor_is_used(tmp_path, monkeypatch, phase, worked_s, hangs):
    monkeypatch.setattr(rank_watch, "in_sessions", lambda _: [Process(1, "running", worked_s, 0)])
    found = watch(tmp_path, rank(0, heard_s_ago=11, phase=phase), rank(1, heard_s_ago=11, phase=phase))
    assert (found.hung(10) is not None) == hangs
    assert (found.hung(10) is not None) == hangs, "and it was heard of now"


@pytest.mark.parametrize(("behind", "hangs"), [("start", False), ("train", True)])
def test_ranks_may_wait_for_one_that_reads_a_model(tmp_path, monkeypatch, behind, hangs):
    monkeypatch.setattr(rank_watch, "in_sessions", lambda _: [Process(1, "running", 5.0, 0)])
    reading, waiting = rank(0, heard_s_ago=9.9, phase=behind, step=0), rank(1, heard_s_ago=11, phase="train", step=1)
    found = watch(tmp_path, reading, waiting)
    assert (found.hung(10) is not None) == hangs
    reading.alive_s -= 0.2  # a moment later, when nothing can have been worked
    assert (found.hung(10) is not None) == hangs, "all were heard of at the same time"


# --- processes --------------------------------------------------------------------------------------------------------


def test_the_kernels_view_of_this_process():
    me = read_process(os.getpid())
    assert me and me.status == "running" and not me.is_stopped
    assert 2**24 < me.rss_bytes < 2**36 and me.cpu_s > 0.1
    assert me.pid in {process.pid for process in in_sessions([os.getsid(0)])}
    assert read_process(2**22 + 1) is None


def test_a_process_that_its_parent_has_not_collected_is_gone():
    child = subprocess.Popen(["true"])  # not os.fork: pytest's process may be too large for it
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    os.kill(child.pid, 0)  # its parent may still collect it
    assert read_process(child.pid) is None
    child.wait()
