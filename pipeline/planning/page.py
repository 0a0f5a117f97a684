"""The page of a stage's plan: sizes, batch arithmetic, memory by model and phase, and a verdict, for people."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Self

from pipeline.configuration.ds_config import Json
from pipeline.configuration.resolved import Resolved
from pipeline.errors import counted
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.disk import nvme_files, outputs, with_checkpoint, without_room
from pipeline.planning.duration import RECREATE_CACHE_S, phase_seconds, states_seconds, waiting_seconds
from pipeline.planning.memory import PROCESS_WITH_GPU, UNUSED_REST, MemoryPlan, plan_memory
from pipeline.planning.needs import StageNeeds

NeedsOf = Callable[..., StageNeeds]
JsonsOf = Callable[[Resolved], Mapping[str, Json]]
# Rows of the tables, title -> attribute.
LASTING = {"weights": "weights", "optimizer": "optimizer", "buffers": "lasting_gradients", "moving average": "average"}
PARTS = {
    "states": "states",
    "gradients": "gradient_bytes",
    "optimizer step": "step",
    "gathered weights": "gathered",
    "KV cache, copies": "rollout",
    "activations": "activations",
    "low": "total",
}


@dataclass(frozen=True, slots=True)
class StagePlanner:
    """A stage on a target, which can be planned for any settings: the user's, and those of each remedy.

    needs_of: the stage's `needs`.
    jsons_of: settings -> the DeepSpeed JSON of each engine.
    base_of_output: folder of an earlier stage's output -> the model that it starts from.
    target: the GPUs that are planned for.
    cached: needs computed so far, by the identity of the settings. The settings are stored too, so that no other
        object can get their identity.
    """

    needs_of: NeedsOf
    jsons_of: JsonsOf
    base_of_output: Mapping[str, str]
    target: Target
    cached: dict[int, tuple[Resolved, StageNeeds]] = field(default_factory=dict, repr=False)

    def needs(self, resolved: Resolved) -> StageNeeds:
        """Return what the stage needs under these settings. Raises InputError, EnvironmentFault."""
        if id(resolved) not in self.cached:
            ranks = self.target.num_gpus
            needs = self.needs_of(resolved.config, self.base_of_output, self.dtype(resolved), ranks)
            self.cached[id(resolved)] = resolved, needs
        return self.cached[id(resolved)][1]

    def memory(self, resolved: Resolved) -> MemoryPlan:
        """Count the stage's memory under these settings, with logits stored for the backward pass if there is room.

        There is room if the high estimate fits and the KV cache stays, as it would without them.

        Raises InputError, EnvironmentFault.
        """
        if self.target.is_cpu or not self.target.memory:
            return self.counted(resolved, stores_logits=False)
        stored = self.counted(resolved, stores_logits=True)
        has_room = not any(lacking(stored, self.target, high=True))
        if has_room and (stored.keeps_buffers or not stored.slots):
            return stored
        plan = self.counted(resolved, stores_logits=False)
        return stored if has_room and stored.keeps_buffers == plan.keeps_buffers else plan

    def counted(self, resolved: Resolved, *, stores_logits: bool) -> MemoryPlan:
        """Count the stage's memory with or without stored logits. Raises InputError, EnvironmentFault."""
        config, needs, engines = resolved.config, self.needs(resolved), self.jsons_of(resolved)
        dtype = self.dtype(resolved)
        plan = plan_memory(needs, engines, self.target, config, dtype=dtype, stores_logits=stores_logits)
        return with_checkpoint(plan, needs.models, engines, config.run, config.optimizer.optimizer_states)

    def seconds(self, resolved: Resolved, plan: MemoryPlan) -> Mapping[str, float]:
        """Return the seconds of each phase, without exchange between GPUs; {} where they are not known."""
        needs, target = self.needs(resolved), self.target
        if plan.rollout and plan.rollout.is_streamed:  # the exchange takes most of them
            return {}
        gather = resolved.config.deepspeed.zero3_gather
        engines, dtype = self.jsons_of(resolved), self.dtype(resolved)
        computed = dict(phase_seconds(needs, engines, plan, dtype, target))
        if computed and needs.idle_states_leave:
            computed["generate"] += states_seconds(needs, plan, target)
        if computed and plan.slots and not plan.keeps_buffers:
            computed["generate"] += RECREATE_CACHE_S
        waited = waiting_seconds(needs, engines, plan, dtype, target, gather=gather)
        return {name: value + waited[name] for name, value in computed.items()}

    def files(self, resolved: Resolved, plan: MemoryPlan) -> Mapping[Path, int]:
        """Return the bytes on a machine of each folder of NVMe that the stage offloads to."""
        return nvme_files(plan.sizes, self.jsons_of(resolved), ranks=plan.ranks, per_host=plan.per_host)

    def disk_faults(self, resolved: Resolved, plan: MemoryPlan) -> list[str]:
        """Return a line for each folder of NVMe on this machine that has too little space."""
        return [] if self.target.described else list(without_room(self.files(resolved, plan)))

    def dtype(self, resolved: Resolved) -> str:
        """Return `--dtype` with auto resolved for the target."""
        dtype: str = resolved.config.deepspeed.dtype
        return self.target.dtype if dtype == "auto" else dtype


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of a stage with its settings.

    planner: the stage on its target.
    resolved: the settings.
    needs: models and passes under these settings.
    memory: memory that they take, by phase.
    num_steps: optimizer steps of the run; 0 where the number is not known.
    seconds: seconds of each phase (`StagePlanner.seconds`); {} if they are not known or the plan does not fit.
    """

    planner: StagePlanner
    resolved: Resolved
    needs: StageNeeds
    memory: MemoryPlan
    num_steps: int
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, planner: StagePlanner, resolved: Resolved, num_rows: float) -> Self:
        """Plan a stage; num_rows: rows or prompts of the run, 0 if not known. Raises InputError, EnvironmentFault."""
        needs, memory, run = planner.needs(resolved), planner.memory(resolved), resolved.config.run
        num_steps = needs.num_steps(ceil(num_rows)) if num_rows or run.max_steps else 0
        seconds = planner.seconds(resolved, memory) if fits(memory, planner.target) else {}
        return cls(planner, resolved, needs, memory, num_steps, seconds)

    @property
    def hardware(self) -> str:
        """The target in words, and the dtype of the models there."""
        source = " (described)" if self.planner.target.described else ""
        return f"{self.planner.target}{source}, {self.planner.dtype(self.resolved)}"


def stage_page(stage: StagePlan) -> list[str]:
    """Return the lines of a stage's plan: what its memory, its time and its disk consist of."""
    planner, resolved, needs, plan = stage.planner, stage.resolved, stage.needs, stage.memory
    lines, run = [*model_lines(plan), *(f"  batch    {line}" for line in needs.batch)], resolved.config.run
    if stage.num_steps:
        about = "at most" if needs.steps_at_most else "about"
        why = "--max-steps" if run.max_steps else f"{about}; --num-train-epochs {run.num_train_epochs:g}"
        rollouts = f" in {counted(-(-stage.num_steps // needs.steps_each), 'rollout')}" if needs.rollout else ""
        lines.append(f"  steps    {counted(stage.num_steps, 'optimizer step')}{rollouts} ({why})")
    faults = planner.disk_faults(resolved, plan)
    lines += [*phase_lines(plan), *verdict_lines(needs, plan, planner.target, faults=faults)]
    if planner.target.memory and not planner.target.is_cpu:
        lines.append(f"  device   {planner.target.source}")
    if fits(plan, planner.target):
        is_measured = planner.target.measured is not None
        text = time_text(needs, plan, stage.seconds, num_steps=stage.num_steps, is_measured=is_measured)
        lines.append(f"  time     {text or why_no_time(planner.target, planner.dtype(resolved), plan)}")
    return [*lines, f"  disk     {disk_text(planner, resolved, plan)}"]


def row(name: str, values: Iterable[str]) -> str:
    return f"  {name:<17}" + "".join(f"{value:>14}" for value in values)


def gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def seconds_text(value: float) -> str:
    """Return a time with two digits, `1.3 s` or `130 s`: the estimate is not more exact than that."""
    return f"{float(f'{value:.2g}'):g} s"


def run_text(seconds: float) -> str:
    """Return the time of a run with two digits, in the unit in which it is read: `40 s`, `12 min`, `1.5 h`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{float(f'{seconds / size:.2g}'):g} {unit}"
    return seconds_text(seconds)


def part_lines(parts: Mapping[str, str], holders: Collection[Any]) -> list[str]:
    """Return a row of GiB for each of `parts` (title -> attribute) that any holder has; "-" stands for 0."""
    sizes = {title: [getattr(one, name) for one in holders] for title, name in parts.items()}
    return [row(title, [gib(n) if n else "-" for n in line]) for title, line in sizes.items() if any(line)]


def model_lines(plan: MemoryPlan) -> list[str]:
    """Return the table of models: numbers of weights in millions, and what each model holds on a GPU in GiB.

    Weights, optimizer states, buffers and averages of all models add up to the states of a phase. The gradients of all
    models add up to those at the peak of training.
    """
    sizes, gradients = plan.sizes.values(), plan.phases["train"].gradients
    counts = {"weights": [size.weights for size in sizes], "trained": [size.trained for size in sizes]}
    counts["no embedding"] = [size.weights - size.embeddings for size in sizes]
    lines = [row("millions", plan.sizes)]
    lines += [row(name, [f"{n / 1e6:,.1f}" for n in line]) for name, line in counts.items()]
    lines += [row("GiB", plan.sizes), *part_lines(LASTING, plan.states.values())]
    return [*lines, row("gradients", [gib(gradients.get(role, 0)) for role in plan.sizes])]


def phase_lines(plan: MemoryPlan) -> list[str]:
    """Return the table of phases: the peak of each in GiB of a GPU. The row `low` is the sum of its parts."""
    lines = [row("GiB", plan.phases), *part_lines(PARTS, plan.phases.values())]
    figures = zip(*(plan.reserved(name) for name in plan.phases), strict=True)
    lines += [row(name, map(gib, line)) for name, line in zip(("expected", "high"), figures, strict=True)]
    context = " to ".join(f"{value / GIB:.1f}" for value in plan.besides)
    rest = " to ".join(f"{share:.0%}" for share in UNUSED_REST)
    libraries = "CUDA's and NCCL's" if plan.ranks > 1 else "CUDA's"
    what = f"{libraries} own memory, and {rest} of unused space in the allocator's blocks"
    if plan.on_cpu:
        what = "Python, its libraries and freed blocks of the heap (measured on CPUs)"
    lines.append(f"  besides  expected and high include {context} GiB of {what}")
    if graphs := [f"{gib(peak.graph)} in {name}" for name, peak in plan.phases.items() if peak.graph]:
        lines.append(f"  graph    {', '.join(graphs)}: pool of a decode step's CUDA graph, estimated from its tensors")
    return lines


def verdict_lines(needs: StageNeeds, plan: MemoryPlan, target: Target, *, faults: Sequence[str] = ()) -> list[str]:
    """Return lines on the KV cache, on the host's memory, and on whether the stage fits and by how much.

    faults: lines about disks for offload that have too little space.
    """
    lines = []
    if plan.slots:
        cache = "is freed before the update, and allocated again with its graph for each rollout"
        if plan.on_cpu:
            cache = "is allocated for each rollout"
        elif plan.keeps_buffers:
            cache = "stays in memory during the update"
        elif plan.phases["train"].rollout:
            cache = "stays in memory during the first update only; it is then allocated again for each rollout"
        if (seconds := states_seconds(needs, plan, target)) and fits(plan, target):
            cache += f"; moving optimizer states to the host and back takes {seconds_text(seconds)} (estimate)"
        lines.append(f"  rollout  {counted(plan.slots, 'response')} at a time; the KV cache {cache}")
    lines.append(f"  host     {host_text(plan, target)}")
    return [*lines, f"  verdict  {'; '.join([verdict(plan, target), *faults])}"]


def host_text(plan: MemoryPlan, target: Target) -> str:
    """Return the host memory of a machine's processes, expected to high, and its parts."""
    machine = "the largest machine" if target.is_uneven else "each machine"
    total = f"{' to '.join(map(gib, plan.on_host))} GiB of {machine}"
    if target.host_memory:
        total += f"'s {gib(target.host_memory)}"
    processes = counted(plan.per_host, "process")
    copied = f"{gib(plan.checkpoint)} for a checkpoint, " if plan.checkpoint else ""
    # On a CPU a process holds what it offloads, too: it is in the states of its phases.
    states_on_cpu = plan.per_host * sum(states.host for states in plan.states.values())
    num_bytes = states_on_cpu if plan.on_cpu else plan.host - plan.checkpoint
    offloaded = f"{gib(num_bytes)} offloaded, " if num_bytes else ""
    if plan.on_cpu:
        return f"{total}: {copied}{offloaded}{processes}"
    each = f"{' to '.join(map(gib, PROCESS_WITH_GPU))} each"
    unknown = "" if target.host_memory else "; whether that fits is unknown: give host_memory_gib in a target file"
    return f"{total}: {offloaded}{copied}{processes} with {each}{unknown}"


def time_text(
    needs: StageNeeds, plan: MemoryPlan, seconds: Mapping[str, float], *, num_steps: int, is_measured: bool
) -> str:
    """Return the time of the phases, and of the run if its steps are known; "" if the times are not known.

    The figures are rough, for rows of full length.

    Args:
        is_measured: the target's speeds were measured, including that of copies between GPU and host.
    """
    if not seconds:
        return ""
    phases = ", ".join(f"{name} {seconds_text(value)}" for name, value in seconds.items())
    all_steps = sum(seconds.values()) / needs.steps_each * num_steps
    run = f", {counted(num_steps, 'step')} {run_text(all_steps)}" if num_steps else ""
    whole = f" = {seconds_text(sum(seconds.values()))} a rollout" if needs.rollout else ""
    text = f"{phases}{whole}{run}: estimated from the device's speeds, by the shares that an H200 reached"
    if plan.host > plan.checkpoint and not (needs.idle_states_leave and is_measured):
        text += "; the time of offload is not included"
    return text + ("; the exchange between GPUs is not included" if plan.ranks > 1 else "")


def why_no_time(target: Target, dtype: str, plan: MemoryPlan) -> str:
    """Return why a plan has no time."""
    if plan.rollout and plan.rollout.is_streamed:
        return "not known: at each token of a rollout GPUs exchange all weights, and plans leave the exchange out"
    if target.is_cpu:
        return "not planned for a CPU"
    if dtype == "fp32":
        return "not planned in fp32: data sheets and measurements give TFLOP/s in 16 bits only"
    if missing := " and ".join(name for name in ("tb_per_s", "tflops") if not getattr(target, name)):
        given = "give them in a target file, or its name if it has a data sheet" if target.described else "see device"
        return f"not known without {missing} of the device; {given}"
    return "not planned: the number of operations of these models is not known"


def disk_text(planner: StagePlanner, resolved: Resolved, plan: MemoryPlan) -> str:
    """Return the disk space of a machine for the stage's models, checkpoints and offload to NVMe."""
    config, models = resolved.config, planner.needs(resolved).models
    taken = outputs(models, planner.dtype(resolved), config.run, saves_adapters=config.deepspeed.save_adapter_only)
    number, size = taken.num_checkpoints, gib(taken.checkpoint)
    each = f", {number} x {size} GiB of checkpoints at most" if number else ", no checkpoint"
    files = "".join(f", {gib(size)} GiB in {folder} (NVMe)" for folder, size in planner.files(resolved, plan).items())
    return f"{gib(sum(taken.models))} GiB of models{each}{files}"


def verdict(plan: MemoryPlan, target: Target) -> str:
    """Return `fits`, `tight` or `does not fit`, with the figures of the worst phase."""
    expected, high = plan.reserved()
    if not target.memory:
        return "unknown: the GPU's memory is not known"
    peak = f"{gib(expected)} to {gib(high)} of {gib(target.memory)} GiB{target.limit} in phase {plan.worst}"
    if not fits(plan, target):
        over = f"the host lacks {gib(plan.on_host[0] - target.host_memory)} GiB" if expected <= target.memory else peak
        return f"does not fit: {over}"
    if high > target.memory:
        return f"tight: {peak}"
    if 0 < target.host_memory < plan.on_host[1]:
        return f"tight: {' to '.join(map(gib, plan.on_host))} of {gib(target.host_memory)} GiB of the host"
    return f"fits: {peak}, {gib(target.memory - high)} GiB to spare"


def fits(plan: MemoryPlan, target: Target) -> bool:
    """Tell whether the expected peak fits in the device's memory, and the processes and offload in the host's."""
    return not any(lacking(plan, target))


def lacking(plan: MemoryPlan, target: Target, *, high: bool = False) -> tuple[int, int]:
    """Return the bytes that a GPU and a host lack, by the expected estimate or by the high one."""
    if not target.memory:
        return 0, 0
    on_host = plan.on_host[high] - target.host_memory if target.host_memory else 0
    return max(0, plan.reserved()[high] - target.memory), max(0, on_host)
