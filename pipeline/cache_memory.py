"""Memory of a GPU: what this process may take of it, and the rules of a KV cache in it.

The rules are pure functions of bytes: a run and its plan ask the same ones.
"""

import torch

from pipeline.errors import EnvironmentFault
from pipeline.files import GIB

# Share of the free device memory that the KV cache may take; the rest is for activations and fragmentation. Chosen by
# hand.
CACHE_MEMORY_FRACTION = 0.9
# Least free memory of an update that the KV cache is kept through: a share of the device for the first one, a multiple
# of what the largest one took for later ones, with the unused rest of the allocator's blocks. Chosen by hand.
FREE_SHARE_FOR_UPDATE, UPDATE_MARGIN = 1 / 3, 1.09
# Slots that must fit beside whole weights; where fewer fit, the weights are streamed. Chosen by hand.
MIN_SLOTS_WITH_WHOLE_WEIGHTS = 8

# Bytes of its GPU that this process may take (--gpu-memory-gib), and those of them that torch's allocator may.
_limit: tuple[int, int] | None = None


def limit_memory(gib: float, device: torch.device, *, outside: int) -> None:
    """Let this process take so many GiB of a CUDA device: `memory_of` and torch's allocator keep to it from now on.

    An allocation beyond it is torch's out-of-memory error.

    Args:
        outside: bytes that the CUDA context and NCCL take, which are in no allocator.

    Raises:
        EnvironmentFault: the device has less, or those bytes leave nothing of it.
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
    # The limit is of all that the process takes, as in the plan. What CUDA holds besides the allocator cannot be told
    # from what other processes hold, so it is taken to be what the plan expects.
    torch.cuda.set_per_process_memory_fraction((limit - outside) / total, device)
    _limit = limit, limit - outside


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a CUDA device that are free for this process, and all that it may take.

    Free is also what torch's allocator has reserved but does not use. Of a CPU as if it had one, and that free.
    """
    if device.type != "cuda":
        return 1, 1
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if _limit is not None:
        free, total = min(free, _limit[1] - reserved), min(total, _limit[0])
    return free + reserved - torch.cuda.memory_allocated(device), total


def leave_slots(copies: int, slot: int, free: int) -> bool:
    """Tell whether copies of all weights leave memory for a few slots of the KV cache; else the weights are streamed.

    A run asks with the bytes that it measures, its plan with those that it expects.

    Args:
        copies, slot: bytes of the copies, and of a slot.
        free: bytes of the device before the copies.
    """
    return copies + MIN_SLOTS_WITH_WHOLE_WEIGHTS * slot <= CACHE_MEMORY_FRACTION * free


def keeps_cache(free: int, device: int, *, taken: int) -> bool:
    """Tell whether an update has memory beside the KV cache, which is then kept through it; else it is given back.

    A run asks with the bytes that it measures, its plan with those that it expects.

    Args:
        free: bytes that are free at the end of a rollout, of the `device` bytes that there are.
        taken: bytes that the largest update so far took above those of the end of its rollout; 0: there was none.
    """
    return free >= (UPDATE_MARGIN * taken if taken else FREE_SHARE_FOR_UPDATE * device)


def tokens_that_fit(free: int, bytes_per_token: int) -> int:
    """Return how many tokens a KV cache has, all its slots together, on a device with so many free bytes."""
    return int(CACHE_MEMORY_FRACTION * free // bytes_per_token)
