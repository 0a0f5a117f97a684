"""Meeting the other ranks: over loopback where all are here, errors that follow from others, and rank 0's own."""

import os
import socket
from datetime import timedelta

import pytest
from support.messages import naming
from support.two_ranks import run_two_ranks

from pipeline import dist
from pipeline.errors import EnvironmentFault
from pipeline.models.loading import default_device
from pipeline.rendezvous import LOOPBACK, read_environment

PEERS = """
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"], flush=True)
print(dist.on_main(lambda: time.sleep(2.5)), flush=True)
print(time.time() - heartbeat.read_beat(pathlib.Path("beat-1.json")).time < 1.5, flush=True)
print(told(lambda: dist.on_main(lambda: fail(InputError("no such file")))), flush=True)
print(told(lambda: dist.on_main(lambda: 1 / 0)), flush=True)
torch.distributed.barrier()
if rank == 1:
    os._exit(0)
lost = told(lambda: [dist.sum_over_ranks(torch.ones(10)) for _ in range(1000)])
print("lost a peer", lost and lost[1], flush=True)
os._exit(0)
"""
MACHINES = """
os.environ["LOCAL_RANK"] = "0"  # a machine each
print(dist.on_each_machine(lambda: time.sleep(3.0 * rank) or rank))
print(told(lambda: dist.on_each_machine(lambda: time.sleep(3.0) or (fail(InputError("b.jsonl:8")) if rank else 0))))
if rank:
    time.sleep(3.0)
dist.finish()
print("end", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_waiting_and_errors_of_rank_0_and_lost_ranks(tmp_path):
    """The work of 2.5 s on rank 0 lasts longer than the timeout of collectives, 2 s."""
    printed = run_two_ranks(PEERS, tmp_path)
    both = ["lo lo", "None", "True", "('InputError: no such file', False)"]
    assert printed[0] == [*both, "('ZeroDivisionError: division by zero', False)", "lost a peer True"]
    assert printed[1] == [*both, "('PeerError: rank 0 failed: ZeroDivisionError: division by zero', True)"]


@pytest.mark.slow
def test_machines_work_and_end_at_their_own_speed(tmp_path):
    printed = run_two_ranks(MACHINES, tmp_path)
    assert printed[0] == printed[1] == ["0", "('InputError: b.jsonl:8', False)", "end"]


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
        with pytest.raises(EnvironmentFault, match=naming(f"--master-port {port} ... already in use")):
            dist.listening_socket(port)
    with dist.listening_socket(port) as free:
        assert free.getsockname() == ("127.0.0.1", port)


def test_a_lone_rank_takes_a_free_port_as_it_is_found(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    assert read_environment() == (0, 1, 0)
    store = dist.loopback_store(LOOPBACK, 0, 0, 1, timedelta(seconds=10))
    assert store.port == int(os.environ["MASTER_PORT"]) > 0
    with pytest.raises(EnvironmentFault, match="Address already in use"):
        dist.listening_socket(store.port)


def test_a_lone_rank_follows_from_nobody():
    assert not dist.follows_from_another_rank(RuntimeError("Connection reset by peer"))
    assert dist.on_main(lambda: 7) == 7


def test_the_cpu_is_taken_on_a_machine_with_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: os.environ["CUDA_VISIBLE_DEVICES"] != "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # as DeepSpeed's launcher says it, also on a CPU
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert dist.pick_device(0).type == "cuda"
    with pytest.raises(EnvironmentFault, match="this machine has 1 GPUs"):
        dist.pick_device(1)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert dist.pick_device(1).type == "cpu"


def test_deepspeed_is_told_that_there_is_no_gpu(monkeypatch):
    """Else it warns when a command of a single process imports it, as transformers does when it saves."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")
    assert default_device().type == "cpu" and os.environ["DS_ACCELERATOR"] == "cpu"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR")
    assert default_device().type == "cuda" and "DS_ACCELERATOR" not in os.environ
