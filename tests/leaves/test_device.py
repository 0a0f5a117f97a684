"""Constants of a GPU are measured once, kept by device, torch and driver, and read again; nvidia-smi is a stand-in."""

import json
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.launch_stub import write_program
from support.messages import naming
from support.two_ranks import run_two_ranks

from pipeline import dist
from pipeline.device import (
    CONTEXT,
    NCCL,
    DeviceConstants,
    bytes_of_cuda,
    constants_file,
    store_constants,
    stored_constants,
)
from pipeline.run import measure_device

CPU = torch.device("cpu")
ADDED = """
from pipeline.run import measure_device
measured, add = [], torch.distributed.all_reduce

def counted(values, **group):
    values.fill_(rank + 1)
    add(values, **group)
    measured.append((values.numel(), set(values.tolist())))

torch.distributed.all_reduce = counted
took = measure_device.all_reduce_seconds(world, 4096)
print(len(measured) - measure_device.WARM_UP, measured[-1], took > 0, flush=True)
torch.distributed.barrier()
"""
H200 = DeviceConstants("NVIDIA H200", "2026-11-22", 140 * 2**30, 792.0, 4.28, 55.0, 500 * 2**20)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine whose nvidia-smi tells a name, a driver, and 512 MiB more in use at each question."""
    machine = SimpleNamespace(file=tmp_path / "driver", name=lambda text: (tmp_path / "driver").write_text(text))
    machine.name("NVIDIA H200, 570.1")
    used = f"n=$(cat {tmp_path}/used || echo 0); echo $((n + 512)) | tee {tmp_path}/used"
    script = f'#!/bin/sh\ncase "$*" in *memory.used*) {used} ;; *) cat {machine.file} ;; esac 2>/dev/null\n'
    write_program(tmp_path / "bin/nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return machine


def test_constants_hold_for_a_device_with_its_driver_and_stand_beside_those_of_others(gpu):
    assert stored_constants() is None and not constants_file().parent.exists(), "reading makes no folder"
    store_constants(H200)
    assert stored_constants() == H200
    gpu.name("NVIDIA H200, 580.2")
    assert stored_constants() is None
    store_constants(DeviceConstants("NVIDIA H200", "2026-11-23", 1, 1.0, 1.0, 1.0))
    gpu.name("NVIDIA H200, 570.1")
    assert stored_constants() == H200
    names = json.loads(constants_file().read_text())
    assert set(names) == {
        f"NVIDIA H200, torch {metadata.version('torch')}, driver {number}" for number in ("570.1", "580.2")
    }
    for constants in names.values():
        constants["link_gb_per_s"] = 312.0  # which earlier commits measured
    constants_file().write_text(json.dumps(names))
    assert stored_constants() is None
    constants_file().write_text("{")
    assert stored_constants() is None


def test_speeds_and_what_the_device_lost_meanwhile_are_measured(gpu):
    found = measure_device.measure(CPU, measure_device.used_bytes())
    assert found.context == 512 * 2**20 and found.day == str(date.today())
    assert 1e-4 < found.tflops < 1e4 and 1e-4 < found.tb_per_s < 10 and 0.1 < found.host_gb_per_s < 1e4
    assert measure_device.measure(CPU, 2**50).context == 0, "less is in use than before"


@pytest.mark.parametrize(
    ("context", "nccl", "alone", "beside"),
    [
        (512 * 2**20, 900 * 2**20, 512 * 2**20, 900 * 2**20),
        (2**31, 900 * 2**20, CONTEXT[0], 900 * 2**20),
        (512 * 2**20, 2**31, 512 * 2**20, NCCL[0]),
        (0, 0, CONTEXT[0], NCCL[0]),
    ],
)
def test_what_cuda_never_takes_was_taken_by_other_processes(context: int, nccl: int, alone: int, beside: int):
    """Expected bytes of one rank, and those that NCCL takes beside them."""
    measured = replace(H200, context=context, nccl=nccl)
    assert bytes_of_cuda(measured, 2)[0] == alone + beside
    assert bytes_of_cuda(measured, 1)[0] == alone
    assert str(measured).endswith(f", {alone / 2**30:.2f} GiB of CUDA's own")


def test_the_first_rank_measures_once_and_adds_what_the_ranks_exchange(gpu, monkeypatch, capsys):
    calls = SimpleNamespace(measured=0)

    def measure(device: torch.device, before: int) -> DeviceConstants:
        calls.measured += 1
        return H200

    ranks, exchanged = SimpleNamespace(add=lambda values: exchanged.append(values.nbytes)), list[int]()
    stand_ins = {
        "has_gpu": lambda: True, "pick_device": lambda _: CPU, "start": lambda **_: dist.World(0, 2, CPU),
        "RankGroup": lambda _: ranks, "finish": lambda: None,
    }  # fmt: skip
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for name, value in stand_ins.items():
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(measure_device, "measure", measure)
    assert measure_device.main() == 0
    assert exchanged == [2**26] * (measure_device.WARM_UP + measure_device.REPEATS)
    first = stored_constants()
    assert first and first.nccl == 512 * 2**20 and first.tflops == 792.0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == naming("all-reduce ... 0.0625 GiB ... 2 ranks") and lines[1].endswith("devices.json")
    said = naming("NVIDIA H200 ... 2026-11-22: 792 TFLOP/s, 4.28 TB/s, 55 GB/s ... 0.49 GiB")
    assert lines[1] == said
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two machines: nothing of this machine's links is known
    assert measure_device.main() == 0 and stored_constants() == first and calls.measured == 1
    constants_file().unlink()
    constants_file().mkdir()  # nothing can be written there
    assert measure_device.main() == 3 and f"error: {constants_file()}: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_all_reduce_that_is_timed_adds_up_the_values_of_all_ranks(tmp_path):
    """By gloo, of two ranks whose bytes are ones and twos."""
    assert run_two_ranks(ADDED, tmp_path) == [[f"{measure_device.REPEATS} (4096, {{3}}) True"]] * 2
