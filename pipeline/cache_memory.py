"""The rules of a KV cache's memory, as pure functions of bytes: a run and its plan ask the same ones."""

# Share of the free device memory that the KV cache may take; the rest is for activations and fragmentation. Chosen by
# hand.
CACHE_MEMORY_FRACTION = 0.9
# Least free memory of an update that the KV cache is kept through: a share of the device for the first one, a multiple
# of what the largest one took for later ones, with the unused rest of the allocator's blocks. Chosen by hand.
FREE_SHARE_FOR_UPDATE, UPDATE_MARGIN = 1 / 3, 1.09
# Slots that must fit beside whole weights; where fewer fit, the weights are streamed. Chosen by hand.
MIN_SLOTS_WITH_WHOLE_WEIGHTS = 8


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
