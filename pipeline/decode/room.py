"""Whether what generation needs beside the models fits on the device; the arithmetic is logged before it is tried."""

import logging
from typing import Any

import torch

from pipeline.errors import InputError
from pipeline.files import GIB

log = logging.getLogger(__name__)

# Of the free memory that the cache may take; the rest is for activations and fragmentation.
SHARE_OF_FREE_MEMORY = 0.9


def free_bytes(device: torch.device) -> int:
    """Of a CUDA device: what nobody has, and what this process holds without using it."""
    reserved_unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved_unused


def check_copies_fit(num_bytes: int, device: torch.device) -> None:
    """Log what copies of weights take, at most, of a CUDA device.

    Raises:
        InputError: more than is free.
    """
    if not num_bytes or device.type != "cuda":
        return
    free = free_bytes(device)
    log.info(
        "generation: copied weights take at most %.2f GiB of the %.2f GiB that are free", num_bytes / GIB, free / GIB
    )
    if num_bytes > free:
        raise InputError(
            f"--generation_engine: the actor's weights take {num_bytes / GIB:.2f} GiB during a rollout, "
            f"{free / GIB:.2f} GiB are free; share them among GPUs (--inference_tp_size), or make room "
            "(--offload_optimizer_during_rollout)"
        )


def affordable_slots(model: Any, wanted: int, room: int) -> int:
    """How many rows of `room` tokens find space for their keys and values, maybe none; `wanted` on a CPU.

    Args:
        model: a `generator.DecodeFunction`.
    """
    device, each = model.device, model.bytes_per_token * room
    if device.type != "cuda":
        return wanted
    free = free_bytes(device)
    fitting = min(wanted, int(SHARE_OF_FREE_MEMORY * free // each))
    said = f"{wanted} rows x {room} tokens x {model.bytes_per_token / 2**10:.0f} KiB = {wanted * each / GIB:.2f} GiB"
    log.info("generation: the cache takes %s of the %.2f GiB that are free", said, free / GIB)
    if fitting < wanted:
        log.warning(
            "generation: memory for %d rows at once, not %d; the others wait for a free place. The cache stays during "
            "updates: where they run out of memory, give --release_inference_cache true",
            fitting,
            wanted,
        )
    return fitting


def checked_slots(fitting: int, model: Any, room: int) -> int:
    """`fitting`, on all ranks of a group alike.

    Raises:
        InputError: it is 0.
    """
    if fitting:
        return fitting
    raise InputError(
        f"--max_answer_seq_len: one row of {room} tokens takes {model.bytes_per_token * room / GIB:.2f} GiB of cache, "
        f"{free_bytes(model.device) / GIB:.2f} GiB are free; shorten it, or lower the models' memory "
        "(--actor_zero_stage 3, --inference_tp_size)"
    )
