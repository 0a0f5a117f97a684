"""The wait for other ranks: who is missing is told ever more rarely, and a stop and a time limit end it."""

import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from support.messages import naming
from support.ports import free_port
from support.source_tree import ROOT

from pipeline import rendezvous
from pipeline.errors import EnvironmentFault

# A rank of which rank 0 does not come: nothing listens on its port.
WAITING = """
import logging, sys
from pipeline import rendezvous
from pipeline.run.stop_request import StopRequest, quit_now

rendezvous.FIRST_LINE_S = 0.02
StopRequest(lambda: quit_now("early", 75))
rendezvous.wait_for_port("127.0.0.1", int(sys.argv[1]), 30.0)
"""


@pytest.fixture
def store(monkeypatch):
    from torch.distributed import TCPStore

    monkeypatch.setattr(rendezvous, "FIRST_LINE_S", 0.05)
    monkeypatch.setattr(rendezvous, "POLL_S", 0.01)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def come(store, *ranks: int) -> None:
    """Count ranks as there, without their wait."""
    for rank in ranks:
        with pytest.raises(EnvironmentFault):
            rendezvous.wait_for_ranks(store, rank, 100, address="", timeout_s=0.0)


def test_the_missing_ranks_are_named_until_the_last_has_come(store, caplog):
    """Rank 2 comes three times, as one that was started again, and counts once."""
    come(store, 2, 2, 2)
    late = threading.Timer(0.5, come, (store, 1, 3))
    late.start()
    rendezvous.wait_for_ranks(store, 0, 4, address="a:29500", timeout_s=10.0)
    late.join()
    lines = [record.message for record in caplog.records if "a:29500" in record.message]
    assert list(set(lines)) == [naming("2 of 4 ranks at a:29500 (1, 3)")]
    assert 1 <= len(lines) <= 4, "at 0.05, 0.1, 0.2 and 0.4 s at most"


def test_a_limit_ends_the_wait(store):
    with pytest.raises(EnvironmentFault, match=naming("0.01 s ... 1 of 2 ranks at a:1 (0)")):
        rendezvous.wait_for_ranks(store, 1, 2, address="a:1", timeout_s=0.01)
    with pytest.raises(EnvironmentFault, match=naming("19 of 20 ranks at a:1 (0, 2, 3, 4, 5, 6, 7, 8, ...)")):
        rendezvous.wait_for_ranks(store, 1, 20, address="a:1", timeout_s=0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_wait_for_rank_0(number):
    port = free_port()
    command = [sys.executable, "-c", WAITING, str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr
    line = process.stderr.readline()
    assert line == naming(f"rank 0 at 127.0.0.1:{port} (Connection refused)")
    process.send_signal(number)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 75 and rest.endswith("early\n")
