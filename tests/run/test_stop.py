"""Signals to a stage's process: before its loop, in it, twice, and when its supervisor has died."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, sys, tempfile, time
from pathlib import Path
from pipeline import heartbeat
from pipeline.run.stop_request import StopRequest, quit_now, stop_without

def early():
    quit_now("early", 75)

stop = StopRequest(early)
{setup}
print("ready", flush=True)
end = time.monotonic() + 30
while not ({condition}) and time.monotonic() < end:
    time.sleep(0.01)
print("stopping", flush=True)
time.sleep({saving_s})
os._exit(3)
"""


def program(setup: str = "", condition: str = "False", saving_s: float = 0.0) -> subprocess.Popen[str]:
    code = PROGRAM.format(setup=setup, condition=condition, saving_s=saving_s)
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_loop_it_ends_at_once(number):
    process = program()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 75 and stderr == "early\n"


@pytest.mark.parametrize(
    "setup",
    [
        "stop.is_set()",
        "heartbeat.start(Path(tempfile.mkdtemp()) / 'beat.json'); heartbeat.beat('train', 0)",
    ],
)
def test_in_the_loop_it_waits_until_asked(setup):
    process = program(setup, "stop._first is not None")
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=10)
    assert process.returncode == 3 and stdout == "stopping\n"


@pytest.mark.slow
def test_a_second_signal_counts_after_two_seconds():
    process = program("stop.is_set()", "stop.is_set()", saving_s=20.0)
    process.send_signal(signal.SIGTERM)
    for pause_s in (0.1, 1.0):
        time.sleep(pause_s)
        process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "the same one, sent several times"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT


def test_a_rank_stops_when_its_supervisor_has_died():
    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = program(f"stop_without({supervisor.pid}); stop.is_set()", "stop.is_set()")
    time.sleep(1.2)
    assert process.poll() is None
    supervisor.kill()
    process.communicate(timeout=10)
    assert process.returncode == 3
    supervisor.wait()


def test_outcomes_are_read_by_a_living_supervisor_only(tmp_path, monkeypatch):
    import socket

    from pipeline.run.outcome import SUPERVISOR, is_reported, write_outcome

    here = socket.gethostname()
    monkeypatch.delenv("RANK", raising=False)
    for name, reported in (
        (f"{os.getpid()}@{here}", True),
        (f"{2**22 + 1}@{here}", False),
        (f"{os.getpid()}@elsewhere", False),
    ):
        monkeypatch.setenv(SUPERVISOR, name)
        write_outcome(tmp_path, 0, 75, "stopped")
        assert is_reported(75, tmp_path) == reported
    monkeypatch.delenv(SUPERVISOR)
    assert not is_reported(75, tmp_path)
    monkeypatch.setenv(SUPERVISOR, f"{os.getpid()}@{here}")
    assert not is_reported(1, tmp_path), "another end than the one that was told"
