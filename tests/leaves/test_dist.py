"""Meeting the other ranks: over loopback where all are here, errors that follow from others, and rank 0's own."""

import os
import socket
import subprocess
import sys

import pytest
from support.source_tree import ROOT

from pipeline import dist
from pipeline.errors import EnvironmentFault

TWO_RANKS = """
import os
import torch
from pipeline import dist
from pipeline.errors import InputError

def told(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:80], dist.follows_from_another_rank(error)

def wrong():
    raise InputError("no such file")

world = dist.start(timeout_s=30)
print(world.rank, os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], flush=True)
print(world.rank, told(lambda: dist.on_main(wrong)), flush=True)
print(world.rank, told(lambda: dist.on_main(lambda: 1 / 0)), flush=True)
torch.distributed.barrier()
if world.rank == 1:
    os._exit(0)
lost = told(lambda: [dist.sum_over_ranks(torch.ones(10)) for _ in range(1000)])
print(world.rank, "lost a peer", lost and lost[1], flush=True)
os._exit(0)
"""


def test_errors_of_rank_0_and_lost_ranks_are_told_apart():
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(dist.free_port())}
    command = [sys.executable, "-c", TWO_RANKS]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=common | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=60)[0].splitlines() for process in ranks]
    assert said[0] == [
        "0 lo lo",
        "0 ('InputError: no such file', False)",
        "0 ('ZeroDivisionError: division by zero', False)",
        "0 lost a peer True",
    ]
    assert said[1] == [
        "1 lo lo",
        "1 ('InputError: no such file', False)",
        "1 ('PeerError: rank 0 failed: ZeroDivisionError: division by zero', True)",
    ]


@pytest.mark.parametrize(
    ("address", "agent", "expected"),
    [
        ("127.0.0.1", None, True),
        ("localhost", None, True),
        ("127.0.0.1", "True", False),  # torchrun's store is there already
        ("10.0.0.7", None, False),
        ("node-1", None, False),
    ],
)
def test_when_only_loopback_is_used(monkeypatch, address, agent, expected):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    assert dist.on_loopback() == expected


def test_a_taken_port_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"--master_port {port}: Address already in use"):
            dist.listening_socket(port)
    with dist.listening_socket(port) as free:
        assert free.getsockname() == ("127.0.0.1", port)


def test_a_lone_rank_follows_from_nobody():
    assert not dist.follows_from_another_rank(RuntimeError("Connection reset by peer"))
    assert dist.on_main(lambda: 7) == 7
