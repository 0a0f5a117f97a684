"""Count the bytes of a model's weights, gradients, optimizer states and buffers on a rank.

They follow from the engine's JSON, by the rules of DeepSpeed's optimizers (benchmarks/reports/states.md).
"""

from dataclasses import dataclass, replace

from pipeline.configuration.ds_config import Json, device_of
from pipeline.configuration.groups import OptimizerStates
from pipeline.launching.target import Target
from pipeline.models.partitions import GATHERED_SHARE_OF_DEVICE
from pipeline.planning.measurement import ModelSize

# Bytes of a number in fp32, and of AdamW's two moments: in fp32, and in 8 bits with a scale for each 256 weights.
FP32, MOMENTS, MOMENTS_8BIT = 4, 8, 2 + 8 / 256


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of a model on a rank. Fields without another place are on the device.

    weights: weights, always there.
    optimizer: optimizer states, always there.
    gathered: weights that ZeRO stage 3 gathers while the model trains.
    passing: weights that ZeRO stage 3 gathers in a pass without gradients.
    gradients: gradients from the first backward pass to the optimizer step.
    lasting_gradients: gradients and a bucket that ZeRO stage 3 always holds.
    buckets: buckets of a backward pass.
    step: temporary bytes of the optimizer step, mainly gradients in fp32.
    host: bytes in host memory.
    starting: further bytes in host memory while the engine is created.
    streams: each gradient is reduced in the backward pass (ZeRO stages 2 and 3), so that they are never all there.
    average: the moving average.
    """

    weights: int
    optimizer: int = 0
    gathered: int = 0
    passing: int = 0
    gradients: int = 0
    lasting_gradients: int = 0
    buckets: int = 0
    step: int = 0
    host: int = 0
    starting: int = 0
    streams: bool = False
    average: int = 0

    @property
    def resident(self) -> int:
        return self.weights + self.optimizer + self.lasting_gradients + self.average


def states_of(size: ModelSize, engine: Json, moments: OptimizerStates | None, target: Target, *, gather: str) -> States:
    """Count the bytes of a model under the DeepSpeed JSON `engine` on a rank of the target.

    Args:
        moments: --optimizer-states; None for a model that is not trained.
        gather: --zero3-gather.
    """
    zero, stage = engine["zero_optimization"], engine["zero_optimization"]["stage"]
    ranks = target.num_gpus
    device_bytes = 0 if target.is_cpu else target.memory  # --zero3-gather auto compares with GPU memory only
    weights, host, gathered, passing = size.num_bytes, 0, 0, 0
    if stage == 3:
        offloaded = device_of(zero, "offload_param") != "none"
        share = -(-size.num_bytes // ranks)
        weights, host = (0, share) if offloaded else (share, 0)
        if device_of(zero, "offload_param") == "nvme":  # page-locked buffers, and weights that stay in memory
            swap = {"buffer_count": 5, "buffer_size": 10**8, "max_in_cpu": 10**9} | zero["offload_param"]
            host = swap["buffer_count"] * swap["buffer_size"] * size.element
            host += min(share, swap["max_in_cpu"] * size.element)
        elif offloaded and moments and zero["offload_param"].get("pin_memory"):  # the copy from loading stays too
            host = page_locked(share) + share
        layer = min(size.weights, size.layer + size.embeddings)
        live = min(size.weights, max(zero.get("stage3_max_live_parameters", 10**9), layer))
        if device_of(zero, "offload_param") == "nvme" and zero.get("stage3_max_reuse_distance") == 0:
            live = layer  # nothing is prefetched from a disk
        if offloaded or (ranks > 1 and not gathers_once(size, gather, device_bytes)):
            gathered, passing = live * size.element, layer * size.element
        elif ranks > 1:  # a single rank's partition is the whole model, and needs no gathering
            gathered = passing = size.num_bytes
    frozen = States(weights, gathered=gathered, passing=passing, host=host)
    return training_states(size, engine, frozen, moments, ranks=ranks, on_cpu=target.is_cpu) if moments else frozen


def gathers_once(size: ModelSize, gather: str, device_bytes: int) -> bool:
    """Tell whether ZeRO stage 3 gathers weights once a phase, not layer by layer; `gather` is --zero3-gather."""
    return gather == "once" or (gather == "auto" and size.num_bytes <= GATHERED_SHARE_OF_DEVICE * device_bytes)


def gradient_bytes(size: ModelSize, engine: Json) -> int:
    """Return the bytes of a weight's gradient under the JSON `engine`."""
    return FP32 if (engine.get("data_types") or {}).get("grad_accum_dtype") == "fp32" else size.element


def state_bytes(size: ModelSize, engine: Json, states: OptimizerStates) -> tuple[int, float]:
    """Return the bytes of a weight's master copy, and of AdamW's two moments of it, under the JSON `engine`."""
    if (engine.get("bf16") or {}).get("bf16_optimizer_states"):
        return size.element, MOMENTS // 2
    return FP32, MOMENTS_8BIT if states == "8bit" else MOMENTS


def training_states(
    size: ModelSize, engine: Json, frozen: States, moments: OptimizerStates, *, ranks: int, on_cpu: bool
) -> States:
    """Add gradients, optimizer states and buffers of a trained model to `frozen`, the bytes of its weights."""
    zero, stage, host, starting = engine["zero_optimization"], engine["zero_optimization"]["stage"], frozen.host, 0
    gradient, (master, both_moments) = gradient_bytes(size, engine), state_bytes(size, engine, moments)
    share = -(-size.trained // ranks)  # elements of a partition
    if stage == 0:
        masters = step = FP32 * size.trained if size.element < FP32 else 0
        optimizer = masters + int(both_moments * size.trained)
        return replace(frozen, optimizer=optimizer, gradients=gradient * size.trained, step=step)
    elements = int(zero["reduce_bucket_size"])  # a JSON may say 2e8
    bucket = gradient * (min(elements, size.trained) if on_cpu else elements)  # a CPU allocates only pages written to
    optimizer, offloaded = int((master + both_moments) * share), device_of(zero, "offload_optimizer")
    if offloaded != "none":
        buffers, starting = buffers_of_offload(size, zero, share, gradient)
        optimizer, host = 0, host + buffers + (optimizer if offloaded == "cpu" else 0)  # states on NVMe take no memory
    if stage == 3:
        # The step flattens the gradients of a sub-group and copies them in fp32.
        step = (gradient + master) * min(share, zero.get("sub_group_size", 10**9)) if offloaded == "none" else 0
        lasting = bucket + (gradient * share if offloaded == "none" else 0)
        buckets = bucket if ranks > 1 or on_cpu else 0  # more, for gradient partitions while ranks reduce them
        states = replace(frozen, optimizer=optimizer, lasting_gradients=lasting, buckets=buckets, step=step, host=host)
        return replace(states, starting=starting, streams=True)
    num_buckets = (2 if zero.get("overlap_comm") else 1) if zero.get("contiguous_gradients", True) else 0
    gradients = gradient * (size.trained if stage == 1 else share)
    # The step flattens a parameter group's gradients and copies them in fp32; one group has nearly all weights.
    step = (gradient + master) * share
    if offloaded != "none":
        gradients, step = (gradients if stage == 1 else 0), gradient * size.largest
    buckets = num_buckets * bucket
    states = replace(frozen, optimizer=optimizer, gradients=gradients, buckets=buckets, step=step, host=host)
    return replace(states, streams=stage == 2)


def with_average(states: States, size: ModelSize, engine: Json, *, ranks: int) -> States:
    """Add the moving average: fp32, on the device of the weights. At ZeRO stage 3 each rank has its share."""
    zero = engine["zero_optimization"]
    num_bytes = FP32 * (-(-size.trained // ranks) if zero["stage"] == 3 else size.trained)
    if device_of(zero, "offload_param") == "none":
        return replace(states, average=num_bytes)
    return replace(states, host=states.host + num_bytes)


def buffers_of_offload(size: ModelSize, zero: Json, share: int, gradient: int) -> tuple[int, int]:
    """Return the bytes of an offloaded optimizer's buffers in host memory, and further bytes while it is created.

    - All stages: fp32 gradients of `share` weights, or NVMe's buffers of sub-groups.
    - ZeRO stage 3: also gradients of the backward pass, of which DeepSpeed makes a page-locked copy.
    - ZeRO stages 1 and 2: also the new weights on their way back to the device; master weights are page-locked.

    Page-locked blocks are rounded up.
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
    """Return the size of torch's page-locked block for so many bytes: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
