"""Measure the GPU of this machine, and an all-reduce over all ranks: `python -m pipeline.run.measure_device` on each.

`rlhf train --check` starts it under a launcher. The first rank stores its GPU's constants for plans
(`pipeline/device.py`), and the all-reduce shows a slow or wrong network before training. On a CPU nothing is stored.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from statistics import median
from typing import Any

import torch

from pipeline import dist
from pipeline.device import DeviceConstants, constants_file, query_gpu, store_constants, stored_constants
from pipeline.errors import EXIT_DONE, EXIT_ENVIRONMENT, EnvironmentFault, say, show
from pipeline.files import GIB
from pipeline.rendezvous import local_size, read_environment

TIMEOUT_S = 60
ALL_REDUCE_BYTES = {"cuda": GIB, "cpu": GIB // 16}
COPY_BYTES = {"cuda": 4 * GIB, "cpu": GIB // 16}
MATRIX = {"cuda": 8192, "cpu": 256}
WARM_UP, REPEATS = 3, 10


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of a call, the device's work included."""
    wait, times = torch.cuda.synchronize if device.type == "cuda" else lambda: None, list[float]()
    for _ in range(WARM_UP + REPEATS):
        wait()
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
    return median(times[WARM_UP:])


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return the bytes/s of a copy within the device's memory; bytes read and bytes written both count."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def host_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return the bytes/s of a copy to the device from host memory, page-locked for a GPU."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return num_bytes / seconds_of(lambda: target.copy_(source, non_blocking=True), device)


def matrix_throughput(device: torch.device, size: int) -> float:
    """Return the operations/s of a product of two random square matrices. With zeros a GPU would be faster than in use.

    The dtype is bf16 on a GPU, and fp32 on a CPU, because few CPUs have fast units for bf16.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    return 2.0 * size**3 / seconds_of(lambda: torch.mm(left, right, out=product), device)


def used_bytes() -> int:
    """Return the bytes of the GPU that are in use outside torch's allocator; 0: unknown."""
    used = query_gpu("memory.used")
    return int(used[0]) * 2**20 - torch.cuda.memory_reserved() if used and used[0].isdigit() else 0


def measure(device: torch.device, before: int) -> DeviceConstants:
    """Measure the speeds of a device, and the bytes that CUDA uses since `used_bytes` returned `before`."""
    kind, copied = device.type, COPY_BYTES[device.type]
    products, copies = matrix_throughput(device, MATRIX[kind]), copy_bandwidth(device, copied)
    host, context = host_bandwidth(device, copied // 4), max(0, used_bytes() - before)
    gpu = torch.cuda.get_device_properties(device) if kind == "cuda" else None
    name, memory = (gpu.name, gpu.total_memory) if gpu else ("CPU", 0)
    return DeviceConstants(name, str(date.today()), memory, products / 1e12, copies / 1e12, host / 1e9, context)


def all_reduce_seconds(world: dist.World, num_bytes: int) -> float:
    """Return the seconds of an all-reduce of `num_bytes`."""
    values, ranks = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device), dist.RankGroup(world.size)
    return seconds_of(lambda: ranks.add(values), world.device)


def main() -> int:
    """Print what was measured; return the exit code."""
    (rank, size, local_rank), what = read_environment(), "constants of the GPU"
    try:
        keeps = rank == 0 and dist.has_gpu()
        before = used_bytes() if keeps else 0  # no context yet
        device = dist.pick_device(local_rank)
        constants = (stored_constants() or measure(device, before)) if keeps else None
        before, what = used_bytes() if keeps else 0, "all-reduce"
        world = dist.start(timeout_s=TIMEOUT_S)
        num_bytes = ALL_REDUCE_BYTES[device.type]
        seconds = all_reduce_seconds(world, num_bytes) if size > 1 else 0.0
        if rank == 0 and size > 1:
            sent = 2 * (size - 1) / size * num_bytes / seconds / 1e9
            exchanged = f"all-reduce of {num_bytes / GIB:.3g} GiB over {size} ranks"
            show(f"{exchanged}: {seconds * 1e3:.3g} ms, each sends {sent:.3g} GB/s")
            if constants and local_size() == size:
                constants = replace(constants, nccl=max(0, used_bytes() - before))
        what = str(constants_file())
        if constants:
            store_constants(constants)
            show(f"{constants}; stored in {what}")
        elif rank == 0:
            show("no GPU here: no constants are stored")
    except (EnvironmentFault, RuntimeError, OSError) as error:  # RuntimeError of gloo and nccl, OSError of the disk
        say(f"error: {what}: {str(error).splitlines()[0]}")
        return EXIT_ENVIRONMENT
    dist.finish()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
