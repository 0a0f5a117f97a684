"""Count the host memory that an offloaded optimizer takes beside its states: gradients, buffers, page-locked blocks."""

from pipeline.configuration.ds_config import Json
from pipeline.planning.measurement import ModelSize

FP32 = 4


def beside_optimizer(size: ModelSize, zero: Json, share: int, gradient: int) -> tuple[int, int]:
    """Return the bytes of host memory beside an optimizer of `share` weights there or on NVMe; and more at the start.

    Gradients in fp32, or NVMe's buffers of sub-groups; at ZeRO stage 3 gradients of the backward pass too, of which
    DeepSpeed makes a page-locked copy, below it the new weights on their way back. Page-locked blocks are rounded up,
    below stage 3 the master weights are among them.
    """
    is_locked = zero["offload_optimizer"].get("pin_memory")
    locked, group_size = page_locked if is_locked else int, min(share, zero.get("sub_group_size", 10**9))
    if zero["stage"] < 3:
        return 2 * locked(FP32 * share) - FP32 * share + locked(size.element * share), 0
    whole, rest = divmod(share, group_size)
    groups = whole * locked(FP32 * ((share - rest) // whole)) + locked(FP32 * rest)
    if zero["offload_optimizer"]["device"] == "nvme":
        groups = FP32 * zero["offload_optimizer"].get("buffer_count", 4) * group_size
    return groups + locked(gradient * share), gradient * share if is_locked else 0


def page_locked(num_bytes: int) -> int:
    """Return what torch takes for a page-locked block of so many bytes: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
