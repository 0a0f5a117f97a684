"""Count the memory of a GPU and of the host by model and phase: weights, gradients, optimizer states, buffers.

What DeepSpeed holds follows from the JSON of each engine, by the rules of its optimizers (docs/memory.md); activations
come from `measurement.py`. Bytes throughout, of one rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeline.configuration.ds_config import Json
from pipeline.configuration.groups import OptimizerStates
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.models.partitions import GATHERED_SHARE_OF_DEVICE
from pipeline.planning.measurement import ModelSize, model_size, peak_bytes
from pipeline.planning.needs import ModelUse, Pass, StageNeeds
from pipeline.planning.offloaded import FP32, beside_optimizer, page_locked

MOMENTS, MOMENTS_8BIT = 8, 2 + 8 / 256  # AdamW's two: in fp32, and in 8 bits with a scale for 256
# Expected and high, of what is beside the tensors of a process: the CUDA context with its kernels, NCCL's buffers where
# there are several ranks (of an H200; a measured figure replaces the first, and the second keeps its distance), and the
# allocator's unused rest of its blocks, as a share of the tensors. The largest rest that was measured is 8.5 % (7B with
# LoRA, on a device with little memory to spare). Of a process's host memory: Python, torch, DeepSpeed, transformers,
# tokenizer and data; beside a GPU what CUDA and the loading of weights take, too; on a CPU freed blocks below 32 MiB,
# which the C library's heap keeps. All were measured (docs/memory.md).
CONTEXT = (GIB * 6 // 10, GIB * 12 // 10)
NCCL = (GIB // 2, GIB)
UNUSED_REST = (0.04, 0.09)
PROCESS = (GIB * 6 // 10, GIB)
PROCESS_BESIDE_GPU = (2 * GIB, GIB * 9 // 2)
HEAP_REST = (GIB // 2, GIB * 9 // 10)
POOL_BLOCK = 20 * 2**20  # that torch's allocator takes for tensors of 1 to 10 MiB, also in the pool of a CUDA graph


@dataclass(frozen=True, slots=True)
class States:
    """The bytes that a model holds on a rank.

    weights, optimizer: always. gathered: weights that ZeRO stage 3 makes whole while the model trains; passing: in a
    pass without gradients. gradients: from the first backward pass to the step; kept: those that ZeRO stage 3 holds
    always. buckets: of a backward pass. step: temporary bytes of the optimizer step, gradients in fp32 above all. host:
    in host memory; starting: there besides, while the engine is made. streams: gradients leave each parameter during
    the backward pass (ZeRO stages 2 and 3), so that they never are whole. average: the moving average.
    """

    weights: int
    optimizer: int = 0
    gathered: int = 0
    passing: int = 0
    gradients: int = 0
    kept: int = 0
    buckets: int = 0
    step: int = 0
    host: int = 0
    starting: int = 0
    streams: bool = False
    average: int = 0

    @property
    def resident(self) -> int:
        return self.weights + self.optimizer + self.kept + self.average


def device_of(zero: Json, key: str) -> str:
    """Return where ZeRO's block puts optimizer states or weights: none (the device), cpu or nvme."""
    return str((zero.get(key) or {}).get("device", "none"))


def states_of(
    size: ModelSize,
    engine: Json,
    moments: OptimizerStates | None,
    *,
    ranks: int,
    device_bytes: int,
    gather: str,
    on_cpu: bool = False,
) -> States:
    """Count what DeepSpeed holds of a model under the JSON `engine`.

    Args:
        moments: --optimizer_states; None for a model that is not trained.
        gather: --zero3_gather.
    """
    zero, stage = engine["zero_optimization"], engine["zero_optimization"]["stage"]
    weights, host, gathered, passing = size.num_bytes, 0, 0, 0
    if stage == 3:
        offloaded = device_of(zero, "offload_param") != "none"
        share = -(-size.num_bytes // ranks)
        weights, host = (0, share) if offloaded else (share, 0)
        if device_of(zero, "offload_param") == "nvme":  # page-locked buffers, and weights that stay in memory
            swap = {"buffer_count": 5, "buffer_size": 10**8, "max_in_cpu": 10**9} | zero["offload_param"]
            host = swap["buffer_count"] * swap["buffer_size"] * size.element
            host += min(share, swap["max_in_cpu"] * size.element)
        elif offloaded and moments and zero["offload_param"].get("pin_memory"):  # also those of loading, which stay
            host = page_locked(share) + share
        layer = min(size.weights, size.layer + size.embeddings)
        live = min(size.weights, max(zero.get("stage3_max_live_parameters", 10**9), layer))
        if device_of(zero, "offload_param") == "nvme" and zero.get("stage3_max_reuse_distance") == 0:
            live = layer  # nothing is prefetched from a disk
        if offloaded or (ranks > 1 and not gathers_once(size, gather, device_bytes)):
            gathered, passing = live * size.element, layer * size.element
        elif ranks > 1:  # the partition of a single rank is the whole, and is used where it lies
            gathered = passing = size.num_bytes
    held = States(weights, gathered=gathered, passing=passing, host=host)
    return training_states(size, engine, held, moments, ranks=ranks, on_cpu=on_cpu) if moments else held


def gathers_once(size: ModelSize, gather: str, device_bytes: int) -> bool:
    """Tell whether ZeRO stage 3 gathers weights once a phase, not layer by layer; `gather` is --zero3_gather."""
    return gather == "once" or (gather == "auto" and size.num_bytes <= GATHERED_SHARE_OF_DEVICE * device_bytes)


def gradient_bytes(size: ModelSize, engine: Json) -> int:
    """Return the bytes of a weight's gradient under the JSON `engine`."""
    return FP32 if (engine.get("data_types") or {}).get("grad_accum_dtype") == "fp32" else size.element


def state_bytes(size: ModelSize, engine: Json, kind: OptimizerStates) -> tuple[int, float]:
    """Return the bytes of a weight's master copy, and of AdamW's two moments of it, under the JSON `engine`."""
    if (engine.get("bf16") or {}).get("bf16_optimizer_states"):
        return size.element, MOMENTS // 2
    return FP32, MOMENTS_8BIT if kind == "8bit" else MOMENTS


def training_states(
    size: ModelSize, engine: Json, held: States, kind: OptimizerStates, *, ranks: int, on_cpu: bool
) -> States:
    """Add gradients, optimizer states and buffers of a trained model to its weights, which are counted already."""
    zero, stage, host, starting = engine["zero_optimization"], engine["zero_optimization"]["stage"], held.host, 0
    gradient, (master, moments) = gradient_bytes(size, engine), state_bytes(size, engine, kind)
    share = -(-size.trained // ranks)  # elements of a partition
    if stage == 0:
        masters = step = FP32 * size.trained if size.element < FP32 else 0
        optimizer = masters + int(moments * size.trained)
        return replace(held, optimizer=optimizer, gradients=gradient * size.trained, step=step)
    elements = zero.get("reduce_bucket_size", 500_000_000)
    bucket = gradient * (min(elements, size.trained) if on_cpu else elements)  # a CPU has no page that nobody wrote to
    optimizer, offloaded = int((master + moments) * share), device_of(zero, "offload_optimizer")
    if offloaded != "none":
        beside, starting = beside_optimizer(size, zero, share, gradient)
        optimizer, host = 0, host + beside + (optimizer if offloaded == "cpu" else 0)  # what NVMe holds is no memory
    if stage == 3:
        step = master * min(share, zero.get("sub_group_size", 10**9)) if offloaded == "none" else 0
        kept = bucket + (gradient * share if offloaded == "none" else 0)
        buckets = bucket if ranks > 1 or on_cpu else 0  # the partitions that are reduced
        held = replace(held, optimizer=optimizer, kept=kept, buckets=buckets, step=step, host=host)
        return replace(held, starting=starting, streams=True)
    buffers = (2 if zero.get("overlap_comm") else 1) if zero.get("contiguous_gradients", True) else 0
    gradients = gradient * (size.trained if stage == 1 else share)
    # The step flattens the gradients of a partition and copies them in fp32, a group of parameters at a time.
    step = (gradient + master) * share
    if offloaded != "none":
        gradients, step = (gradients if stage == 1 else 0), gradient * size.largest
    held = replace(held, optimizer=optimizer, gradients=gradients, buckets=buffers * bucket, step=step, host=host)
    return replace(held, streams=stage == 2)


def with_average(held: States, size: ModelSize, engine: Json, *, ranks: int) -> States:
    """Add the moving average, in fp32 beside the weights: at ZeRO stage 3 a rank has its share of both."""
    zero = engine["zero_optimization"]
    num_bytes = FP32 * (-(-size.trained // ranks) if zero["stage"] == 3 else size.trained)
    if device_of(zero, "offload_param") == "none":
        return replace(held, average=num_bytes)
    return replace(held, host=held.host + num_bytes)


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The peak of a phase on one GPU, in bytes of tensors, by what holds them.

    states: weights, optimizer and what else lasts. gradients: with buckets and temporary copies. gathered: by ZeRO
    stage 3. rollout: KV cache and copied weights. activations: with logits. graph: the pool of the decode step's CUDA
    graph, which is reserved and in no tensor: it counts in expected and high alone.
    """

    states: int
    gradients: int = 0
    gathered: int = 0
    rollout: int = 0
    activations: int = 0
    graph: int = 0

    @property
    def total(self) -> int:
        return self.states + self.gradients + self.gathered + self.rollout + self.activations


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a stage on a target: states by role, peaks by phase, and what each machine holds for them (host).

    host: what is offloaded, and checkpoint: the copy of a checkpoint that is being written (disk.py). slots: rows of
    the KV cache that fit; 0 for a stage that samples nothing. keeps_rollout: the buffers of generation are kept during
    an update. besides: bytes that CUDA and NCCL take of a GPU, or a process of a CPU.
    on_cpu: the phases hold what is offloaded, too. per_host: processes of a machine.
    """

    sizes: Mapping[str, ModelSize]
    states: Mapping[str, States]
    phases: Mapping[str, PhaseMemory]
    slots: int
    keeps_rollout: bool
    host: int
    ranks: int
    besides: tuple[int, int]
    on_cpu: bool = False
    per_host: int = 1
    checkpoint: int = 0

    @property
    def worst(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    def reserved(self, phase: str = "") -> tuple[int, int]:
        """Return what a process takes of the device in a phase, by default the worst: expected and high."""
        peak = self.phases[phase or self.worst]
        if self.on_cpu:
            return peak.total + self.besides[0], peak.total + self.besides[1]
        return reserved(peak, self.besides)

    @property
    def on_host(self) -> tuple[int, int]:
        """What the processes of a machine take of its memory, expected and high, with what is offloaded."""
        own = self.reserved() if self.on_cpu else PROCESS_BESIDE_GPU
        return self.host + self.per_host * own[0], self.host + self.per_host * own[1]


def reserved(peak: PhaseMemory, besides: tuple[int, int]) -> tuple[int, int]:
    """Return what a process takes of a GPU at a peak, expected and high."""
    expected, high = (int(peak.total * (1 + UNUSED_REST[i])) + peak.graph + besides[i] for i in (0, 1))
    return expected, high


def bytes_of_libraries(target: Target, ranks: int) -> tuple[int, int]:
    """Return what CUDA and, with several ranks, NCCL take of a GPU, or a process of a CPU; expected and high."""
    if target.is_cpu:
        return PROCESS[0] + HEAP_REST[0], PROCESS[1] + HEAP_REST[1]
    measured = (target.measured.context, target.measured.nccl) if target.measured else (0, 0)
    parts = list(zip(measured, (CONTEXT, NCCL), strict=True))[: 1 if ranks == 1 else 2]
    expected = sum(own or known[0] for own, known in parts)
    return expected, expected + sum(known[1] - known[0] for _, known in parts)


def plan_memory(
    needs: StageNeeds, engines: Mapping[str, Json], target: Target, *, moments: OptimizerStates, dtype: str, gather: str
) -> MemoryPlan:
    """Count the memory of a stage.

    Args:
        moments: --optimizer_states. gather: --zero3_gather.

    Raises:
        InputError, EnvironmentFault: a model whose config cannot be read.
    """
    ranks, per_host = target.num_gpus, target.gpus
    on_device = 0 if target.is_cpu else target.memory  # what a run looks at; it never looks at a host's
    uses = {use.role: replace(use, on_cpu=target.is_cpu) for use in needs.models}
    sizes = {role: model_size(use, dtype) for role, use in uses.items()}
    states = {
        role: states_of(
            sizes[role],
            engines[role],
            moments if use.trained else None,
            ranks=ranks,
            device_bytes=on_device,
            gather=gather,
            on_cpu=target.is_cpu,
        )
        for role, use in uses.items()
    }
    for role in [role for role, use in uses.items() if use.averaged]:
        states[role] = with_average(states[role], sizes[role], engines[role], ranks=ranks)
    resident = sum(held.resident for held in states.values())
    leaving = sum(held.optimizer for held in states.values()) if needs.idle_states_leave else 0
    made = list(accumulate(held.host for held in states.values()))  # one engine after another
    host = max(made[-1] + leaving, *(now + held.starting for now, held in zip(made, states.values(), strict=True)))
    if target.is_cpu:
        resident, host = resident + host, 0
    besides = bytes_of_libraries(target, ranks)
    rollout = needs.rollout
    if rollout and target.is_cpu:  # the eager backend's cache has the rows that are sampled, and only gathers weights
        copied = rollout.copied_bytes if states["actor"].gathered else 0
        rollout = replace(rollout, copied_bytes=copied, slots=min(rollout.slots, rollout.num_responses))
    slots, keeps, buffers = 0, False, dict[str, int]()
    if rollout:
        free = on_device - resident + leaving - besides[0]
        slots = rollout.slots if not on_device else rollout.slots_that_fit(free)
        step = peak_bytes(uses["actor"], dtype, Pass("actor", slots, 1)) + slots * rollout.logits_bytes
        pool = -(-step // POOL_BLOCK) * POOL_BLOCK if on_device else 0
        buffers = {"rollout": rollout.num_bytes(slots), "graph": pool}
    phases: dict[str, PhaseMemory] = {}
    for name, passes in needs.phases.items():
        held = resident if name == "train" else resident - leaving
        phases[name] = phase_memory(passes, uses, states, dtype=dtype, resident=held)
    if rollout:
        others = max((phase for name, phase in phases.items() if name != "generate"), key=lambda phase: phase.total)
        is_short = 0 < on_device < reserved(replace(others, **buffers), besides)[1]
        keeps = not (rollout.always_released or is_short or target.is_cpu)
    for name in phases if keeps else ["generate"] if buffers else []:
        phases[name] = replace(phases[name], **buffers)
    if rollout and rollout.copied_bytes:  # nothing is gathered besides the copies
        phases["generate"] = replace(phases["generate"], gathered=0)
    return MemoryPlan(sizes, states, phases, slots, keeps, host * per_host, ranks, besides, target.is_cpu, per_host)


def phase_memory(
    passes: Sequence[Pass],
    uses: Mapping[str, ModelUse],
    states: Mapping[str, States],
    *,
    dtype: str,
    resident: int,
) -> PhaseMemory:
    """Return the highest moment of a phase: one of its passes, or an optimizer step of the models that it trains."""
    used = dict.fromkeys(work.role for work in passes)
    trained = [role for role in used if any(work.trains for work in passes if work.role == role)]
    gathered = sum(states[role].gathered if trained else states[role].passing for role in used)
    moments: list[PhaseMemory] = []
    for work in passes:
        others = [role for role in trained if role != work.role and is_before(role, work, trained)]
        gradients = sum(states[role].gradients for role in others)
        if work.trains:
            gradients += states[work.role].buckets + (states[work.role].gradients if work.accumulates else 0)
        accumulates = work.accumulates or states[work.role].streams
        measured = replace(work, accumulates=accumulates, times=1, without_adapters=False)
        activations = peak_bytes(uses[work.role], dtype, measured)
        moments.append(PhaseMemory(resident, gradients, gathered, activations=activations))
    for number, role in enumerate(trained):  # one steps after the other, and releases what was gathered of it
        waiting = sum(states[role].gradients for role in trained[number:])
        gathered = sum(states[role].gathered for role in trained[number + 1 :])
        moments.append(PhaseMemory(resident, waiting + states[role].step, gathered))
    return max(moments, key=lambda moment: moment.total)


def is_before(role: str, work: Pass, trained: Sequence[str]) -> bool:
    """Tell whether gradients of `role` exist in a pass: where steps accumulate, or its own passes came first."""
    return work.accumulates or (work.role in trained and trained.index(role) < trained.index(work.role))
