"""The memory of a GPU that this process may use, and the rules for a KV cache in it.

The rules are pure functions of bytes. A run and its plan call the same ones.
"""

import torch

from pipeline.errors import EnvironmentFault
from pipeline.files import GIB

# Share of the free device memory that the KV cache may take; the rest is for activations and fragmentation. Chosen by
# hand.
CACHE_MEMORY_FRACTION = 0.9
# Free memory that an update needs for the KV cache to stay. For the first update: a share of the device. For later
# ones: a multiple of the largest update's memory, which includes unused space in blocks. Chosen by hand.
FREE_SHARE_FOR_UPDATE, UPDATE_MARGIN = 1 / 3, 1.09
# Slots that must fit beside whole weights; if fewer fit, the weights are streamed. Chosen by hand.
MIN_SLOTS_WITH_WHOLE_WEIGHTS = 8

# Bytes of its GPU that this process may take (--gpu-memory-gib), and bytes that torch's allocator may take.
_limit: tuple[int, int] | None = None


def limit_memory(gib: float, device: torch.device, *, outside: int) -> None:
    """Limit this process to `gib` GiB of a CUDA device, for `memory_of` and for torch's allocator.

    An allocation beyond the limit raises torch's out-of-memory error.

    Args:
        outside: bytes of the CUDA context and NCCL, which no allocator counts.

    Raises:
        EnvironmentFault: the device has less than `gib`, or `outside` leaves nothing of it.
    """
    global _limit
    limit, total = int(gib * GIB), torch.cuda.mem_get_info(device)[1]
    if limit > total:
        raise EnvironmentFault(
            f"--gpu-memory-gib {gib:g}: this GPU has {total / GIB:.2f} GiB; give less, or 0 for all of it"
        )
    if limit <= outside:
        raise EnvironmentFault(
            f"--gpu-memory-gib {gib:g}: CUDA itself takes {outside / GIB:.1f} GiB of a GPU; give more"
        )
    # As in the plan, the limit includes CUDA's memory outside the allocator. It cannot be told apart from memory of
    # other processes, so the plan's expected value is used.
    torch.cuda.set_per_process_memory_fraction((limit - outside) / total, device)
    _limit = limit, limit - outside


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of a CUDA device for this process, and all bytes that it may take.

    Memory that torch's allocator holds but does not use counts as free. Returns (1, 1) on a CPU, so that callers need
    no special case.
    """
    if device.type != "cuda":
        return 1, 1
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if _limit is not None:
        free, total = min(free, _limit[1] - reserved), min(total, _limit[0])
    return free + reserved - torch.cuda.memory_allocated(device), total


def leave_slots(copies: int, slot: int, free: int) -> bool:
    """Return True if copies of all weights leave memory for a few slots of the KV cache; else the weights are streamed.

    A run passes measured bytes; its plan passes expected ones.

    Args:
        copies, slot: bytes of the copies, and of a slot.
        free: bytes of the device before the copies.
    """
    return copies + MIN_SLOTS_WITH_WHOLE_WEIGHTS * slot <= CACHE_MEMORY_FRACTION * free


def keeps_cache(free: int, device: int, *, taken: int) -> bool:
    """Return True if an update fits in memory beside the KV cache; else the cache is freed before the update.

    A run passes measured bytes; its plan passes expected ones.

    Args:
        free: free bytes at the end of a rollout.
        device: all bytes of the device.
        taken: bytes that the largest update so far needed above those at the end of its rollout; 0: there was none.
    """
    return free >= (UPDATE_MARGIN * taken if taken else FREE_SHARE_FOR_UPDATE * device)


def tokens_that_fit(free: int, bytes_per_token: int) -> int:
    """Return the number of tokens of a KV cache, over all its slots, on a device with `free` bytes."""
    return int(CACHE_MEMORY_FRACTION * free // bytes_per_token)
