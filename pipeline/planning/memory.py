"""Count the memory of a GPU and of the host by model and phase, in bytes of one rank.

The states of each model come from `states.py`, activations from `measurement.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pipeline.cache_memory import keeps_cache
from pipeline.configuration.ds_config import Json
from pipeline.configuration.stage import StageConfig
from pipeline.device import bytes_of_cuda
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.measurement import ModelSize, model_size, peak_bytes
from pipeline.planning.needs import ModelUse, Pass, Rollout, StageNeeds
from pipeline.planning.states import States, states_of, with_average

# Memory of a process besides its tensors, expected and high, all measured (benchmarks/reports/memory.md and host.md).
# Unused part of the allocator's blocks, as a share of the tensors. The largest measured is 8.5 % (7B with LoRA, on a
# nearly full device).
UNUSED_REST = (0.04, 0.09)
# Host memory of a process on a CPU: Python, torch, DeepSpeed, transformers, tokenizer and data.
PROCESS = (GIB * 6 // 10, GIB)
# Host memory of a process that computes on a GPU, including what CUDA and loading weights take there.
PROCESS_WITH_GPU = (2 * GIB, GIB * 9 // 2)
# Freed blocks below 32 MiB of a process on a CPU, which the C library's heap does not return to the system.
HEAP_REST = (GIB // 2, GIB * 9 // 10)
# Block in bytes that torch's allocator takes for tensors of 1 to 10 MiB, also in the pool of a CUDA graph.
POOL_BLOCK = 20 * 2**20


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The peak of a phase on one GPU: bytes of tensors by kind.

    states: weights, optimizer states and everything else that is always there.
    gradients: gradients with buckets, by role.
    step: temporary copies of an optimizer step, if the peak is there.
    gathered: weights that ZeRO stage 3 gathers.
    rollout: buffers of generation: KV cache and copied weights.
    activations: activations with logits.
    graph: the pool of the decode step's CUDA graph. No tensor is in it, so only `MemoryPlan.reserved` counts it.
    fitted_cache: bytes of a KV cache that fills the free memory (part of `rollout`). No share of unused blocks is added
        to it, since the cache would be smaller by that.
    """

    states: int
    gradients: Mapping[str, int]
    step: int = 0
    gathered: int = 0
    rollout: int = 0
    activations: int = 0
    graph: int = 0
    fitted_cache: int = 0

    @property
    def total(self) -> int:
        return self.states + self.gradient_bytes + self.step + self.gathered + self.rollout + self.activations

    @property
    def gradient_bytes(self) -> int:
        return sum(self.gradients.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a stage on a target.

    sizes: numbers of weights, by role.
    states: bytes of each model, by role.
    phases: peaks, by phase.
    rollout: the buffers of generation that the run would choose; None for a stage that samples nothing.
    slots: rows of the KV cache that fit; 0 for a stage that samples nothing.
    keeps_buffers: the buffers of generation stay in memory through updates, except possibly the first.
    host: bytes of each machine's memory for offloaded tensors; `checkpoint` comes on top.
    ranks: processes of the run.
    besides: bytes of CUDA and NCCL on a GPU, or of Python and its libraries on a CPU; expected and high.
    on_cpu: the run computes on a CPU; then its phases include offloaded tensors.
    per_host: processes of a machine.
    checkpoint: bytes of a machine's memory for the copy of a checkpoint while it is written (disk.py).
    stores_logits: as in `ModelUse`, of all models.
    """

    sizes: Mapping[str, ModelSize]
    states: Mapping[str, States]
    phases: Mapping[str, PhaseMemory]
    rollout: Rollout | None
    slots: int
    keeps_buffers: bool
    host: int
    ranks: int
    besides: tuple[int, int]
    on_cpu: bool = False
    per_host: int = 1
    checkpoint: int = 0
    stores_logits: bool = False

    @property
    def worst(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: self.reserved(name)[0])

    def reserved(self, phase: str = "") -> tuple[int, int]:
        """Return the device memory of a process in a phase (by default the largest of all): expected and high."""
        peaks = [self.phases[phase]] if phase else self.phases.values()
        rest = (0, 0) if self.on_cpu else UNUSED_REST
        expected, high = (max(reserved(peak, rest[i]) for peak in peaks) + self.besides[i] for i in (0, 1))
        return expected, high

    @property
    def on_host(self) -> tuple[int, int]:
        """Return the host memory of a machine's processes, expected and high, including offloaded tensors."""
        process = self.reserved() if self.on_cpu else PROCESS_WITH_GPU
        return self.host + self.per_host * process[0], self.host + self.per_host * process[1]


def reserved(peak: PhaseMemory, rest: float) -> int:
    """Return the bytes of the device at a peak; rest: the allocator's unused memory, as a share of the tensors."""
    return int((peak.total - peak.fitted_cache) * (1 + rest)) + peak.fitted_cache + peak.graph


def bytes_of_libraries(target: Target, ranks: int) -> tuple[int, int]:
    """Return the bytes of CUDA and, with several ranks, NCCL on a GPU, or of a process on a CPU: expected and high."""
    if target.is_cpu:
        return PROCESS[0] + HEAP_REST[0], PROCESS[1] + HEAP_REST[1]
    return bytes_of_cuda(target.measured, ranks)


def plan_memory(
    needs: StageNeeds,
    engines: Mapping[str, Json],
    target: Target,
    config: StageConfig,
    *,
    dtype: str,
    stores_logits: bool,
) -> MemoryPlan:
    """Count the memory of a stage.

    Args:
        config: its flags; --optimizer-states and --zero3-gather are read.
        stores_logits: as in `ModelUse`, of all models.

    Raises:
        InputError, EnvironmentFault: a model whose config cannot be read.
    """
    ranks, per_host = target.num_gpus, target.gpus
    on_device = 0 if target.is_cpu else target.memory
    uses = {use.role: replace(use, on_cpu=target.is_cpu, stores_logits=stores_logits) for use in needs.models}
    sizes = {role: model_size(use, dtype) for role, use in uses.items()}
    moments, gather = config.optimizer.optimizer_states, config.deepspeed.zero3_gather
    states = {
        role: states_of(sizes[role], engines[role], moments if use.trained else None, target, gather=gather)
        for role, use in uses.items()
    }
    for role in [role for role, use in uses.items() if use.averaged]:
        states[role] = with_average(states[role], sizes[role], engines[role], ranks=ranks)
    resident = sum(one.resident for one in states.values())
    leaving = sum(one.optimizer for one in states.values()) if needs.idle_states_leave else 0
    after = list(accumulate(one.host for one in states.values()))  # engines start one after another
    host = max(after[-1] + leaving, *(now + one.starting for now, one in zip(after, states.values(), strict=True)))
    if target.is_cpu:
        resident, host = resident + host, 0
    phases: dict[str, PhaseMemory] = {}
    for name, passes in needs.phases.items():
        lasting = resident if name == "train" else resident - leaving
        phases[name] = phase_memory(passes, uses, states, dtype=dtype, resident=lasting)
    besides = bytes_of_libraries(target, ranks)
    rollout, slots, keeps = needs.rollout, 0, False
    if rollout:
        free = on_device - resident + leaving - besides[0]
        rollout = rollout.as_decided(free) if on_device else rollout
        slots, buffers = rollout_buffers(rollout, uses["actor"], states["actor"], dtype, target, free=free)
        first, keeps = updates_with_cache(rollout, phases, buffers, target, free=free)
        for name in phases if first or keeps else ["generate"]:
            phases[name] = replace(phases[name], **buffers)  # type: ignore[arg-type]  # fields of type int
        # A backend that copies weights gathers nothing; one without copies gathers all weights at once.
        whole = sizes["actor"].num_bytes if states["actor"].gathered and not rollout.copied_bytes else 0
        phases["generate"] = replace(phases["generate"], gathered=whole)
    host *= per_host
    return MemoryPlan(
        sizes,
        states,
        phases,
        rollout,
        slots,
        keeps,
        host,
        ranks,
        besides,
        target.is_cpu,
        per_host,
        stores_logits=stores_logits,
    )


def rollout_buffers(
    rollout: Rollout, actor: ModelUse, states: States, dtype: str, target: Target, *, free: int
) -> tuple[int, dict[str, int]]:
    """Return the rows of the KV cache, and the bytes of generation's buffers by the fields of `PhaseMemory`."""
    if target.is_cpu:  # the eager backend's cache has a row for each sampled row; it copies weights only to gather them
        copied = rollout.copied_bytes if states.gathered else 0
        rollout = replace(rollout, copied_bytes=copied, slots=min(rollout.slots, rollout.num_responses))
        return rollout.slots, {"rollout": rollout.num_bytes(rollout.slots)}
    slots = rollout.slots_that_fit(free) if target.memory else rollout.slots
    step = peak_bytes(actor, dtype, Pass("actor", slots, 1)) + slots * rollout.logits_bytes
    pool = -(-step // POOL_BLOCK) * POOL_BLOCK if target.memory else 0
    num_bytes = rollout.num_bytes(slots)
    fitted = num_bytes - rollout.copied_bytes if slots < rollout.slots else 0
    return slots, {"rollout": num_bytes, "graph": pool, "fitted_cache": fitted}


def updates_with_cache(
    rollout: Rollout, phases: Mapping[str, PhaseMemory], buffers: Mapping[str, int], target: Target, *, free: int
) -> tuple[bool, bool]:
    """Tell whether the buffers of generation stay in memory in the first update, and whether in later ones.

    A run decides by the same `keeps_cache`. If the first update runs out of memory, the run frees the buffers and
    repeats it, and frees them before all later updates.

    Args:
        free: bytes of the device without those of CUDA and of the states that stay.
    """
    if rollout.always_released or target.is_cpu or not target.memory:
        return (not rollout.always_released and not target.is_cpu,) * 2
    free -= buffers["rollout"]
    taken = max(phase.total for name, phase in phases.items() if name != "generate") - phases["train"].states
    return keeps_cache(free, target.memory, taken=0) and taken <= free, keeps_cache(free, target.memory, taken=taken)


def phase_memory(
    passes: Sequence[Pass],
    uses: Mapping[str, ModelUse],
    states: Mapping[str, States],
    *,
    dtype: str,
    resident: int,
) -> PhaseMemory:
    """Return the peak of a phase: one of its passes, or an optimizer step of a model that it trains.

    In a phase without passes the peak is the resident memory.
    """
    used = dict.fromkeys(work.role for work in passes)
    trained = [role for role in used if any(work.trains for work in passes if work.role == role)]
    gathered = sum(states[role].gathered if trained else states[role].passing for role in used)
    moments: list[PhaseMemory] = []
    for work in passes:
        others = [role for role in trained if role != work.role and has_gradients(role, work, trained)]
        gradients = {role: states[role].gradients for role in others}
        if work.trains:
            earlier = states[work.role].gradients if work.accumulates else 0
            gradients[work.role] = states[work.role].buckets + earlier
        measured = replace(work, accumulates=work.accumulates or states[work.role].streams)
        activations = peak_bytes(uses[work.role], dtype, measured)
        moments.append(PhaseMemory(resident, gradients, gathered=gathered, activations=activations))
    for number, role in enumerate(trained):  # models step in turn, and each releases its gathered weights
        waiting = {role: states[role].gradients for role in trained[number:]}
        gathered = sum(states[role].gathered for role in trained[number + 1 :])
        moments.append(PhaseMemory(resident, waiting, states[role].step, gathered))
    return max(moments, key=lambda moment: moment.total, default=PhaseMemory(resident, {}))


def has_gradients(role: str, work: Pass, trained: Sequence[str]) -> bool:
    """Tell whether gradients of `role` exist in a pass: gradients accumulate, or the model's own passes came first."""
    return work.accumulates or (work.role in trained and trained.index(role) < trained.index(work.role))
