"""Measure the bandwidth of an all-reduce over all ranks: `python -m pipeline.run.bandwidth` on each, under a launcher.

`rlhf train --check` starts it on all hosts of a run, so that a slow or wrong network is seen before training.
"""

import sys
import time

import torch

from pipeline import dist
from pipeline.errors import EXIT_DONE, EXIT_ENVIRONMENT, EnvironmentFault
from pipeline.files import GIB

TIMEOUT_S = 60
NUM_BYTES = {"cuda": GIB, "cpu": GIB // 16}
REPEATS = 5


def all_reduce_seconds(world: dist.World, num_bytes: int) -> float:
    """Return the seconds of an all-reduce of so many bytes, the mean of REPEATS after one that is not counted."""
    values, ranks = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device), dist.RankGroup(world.size)
    start = 0.0
    for _ in range(1 + REPEATS):
        ranks.add(values)
        values[0].item()  # waits for the device
        start = start or time.perf_counter()
    return (time.perf_counter() - start) / REPEATS


def main() -> int:
    """Print the time, and what each rank sends in a second; return the exit code."""
    try:
        world = dist.start(timeout_s=TIMEOUT_S)
        num_bytes = NUM_BYTES[world.device.type]
        seconds = all_reduce_seconds(world, num_bytes)
    except (EnvironmentFault, RuntimeError) as error:  # gloo's and nccl's own
        print(f"error: all-reduce: {str(error).splitlines()[0]}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    if world.is_main:
        sent = 2 * (world.size - 1) / world.size * num_bytes / seconds
        print(
            f"all-reduce of {num_bytes / GIB:.3g} GiB over {world.size} ranks: {seconds * 1e3:.3g} ms, each sends "
            f"{sent / 1e9:.3g} GB/s",
            flush=True,
        )
    dist.finish()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
