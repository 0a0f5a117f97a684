"""What makes a plan fit that does not, or is tight: changes of flags in order, each planned with the ones before.

Two answers: the same training in less memory, and another training. A change that a later one makes needless is left
out.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Self

from pipeline.configuration.ds_config import Json, device_of
from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.flags import COMMAND_LINE, Resolved, flag_words, validated
from pipeline.configuration.global_batch import EVALUATED, SHARED, with_ranks
from pipeline.configuration.groups import STAGE
from pipeline.configuration.run_flags import AutoFit
from pipeline.errors import RunError
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner, fits, lacking

Values = Mapping[str, Any]
ChangeOf = Callable[[Values, Target], dict[str, Any]]
LORA_DIM = 16
LEAST_SHARE = 0.01  # Share of what is missing below which a change is not worth its cost.
OFFLOAD_DURING_ROLLOUT = "offload_optimizer_during_rollout"
NOT_ENOUGH = "no change of flags is enough: take more GPUs, larger ones, shorter rows or a smaller model"
STREAMED = "rollout_weights"


def named(values: Values, flag: str) -> list[str]:
    """Return the flags of this name: one, or in stage 3 one of each trained model."""
    return [name for name in (flag, f"actor_{flag}", f"critic_{flag}") if name in values]


def smaller_micro_batch(values: Values, target: Target) -> dict[str, Any]:
    """Halve the micro-batch, to a divisor of a rank's rows in an optimizer step, whose number stays the same.

    --train_batch_size gives that number where the ranks divide it; else the rows that it was rounded to.
    """
    micro, meant, ranks = values["per_device_train_batch_size"], values["train_batch_size"], target.num_gpus
    rows = micro * values["gradient_accumulation_steps"]
    total: dict[str, Any] = {}
    if meant and meant % ranks == 0:
        rows = meant // ranks
    elif meant:
        total = {"train_batch_size": rows * ranks}  # accumulation follows from it
    sizes = [size for size in range(1, micro) if rows % size == 0 and size <= -(-micro // 2)]
    if not sizes:
        return {}
    return {"per_device_train_batch_size": sizes[-1], "gradient_accumulation_steps": rows // sizes[-1], **total}


def smaller_evaluation_batch(values: Values, target: Target) -> dict[str, Any]:
    return {EVALUATED: values[EVALUATED] // 2} if values[EVALUATED] > 1 else {}


def with_checkpointing(values: Values, target: Target) -> dict[str, Any]:
    return {name: True for name in named(values, "gradient_checkpointing") if not values[name]}


def save_synchronously(values: Values, target: Target) -> dict[str, Any]:
    return {"save_in_background": False} if values["save_in_background"] else {}


def shared_rollout(values: Values, target: Target) -> dict[str, Any]:
    """Let more GPUs of a machine share the actor's weights in a rollout, where they are not streamed."""
    if values.get(STREAMED) in (None, "streamed"):
        return {}
    sizes = [size for size in range(values[SHARED] + 1, target.gpus + 1) if all(n % size == 0 for n in target.slots)]
    return {SHARED: sizes[0]} if sizes else {}


def streamed_rollout(values: Values, target: Target) -> dict[str, Any]:
    return {} if STREAMED not in values else {SHARED: 1, STREAMED: "streamed"}


def partitioned(stage: int) -> ChangeOf:
    """Return the change to a ZeRO stage, where there are ranks to partition over; 3 takes no quantised weights."""

    def change(values: Values, target: Target) -> dict[str, Any]:
        names = [name for name in named(values, STAGE) if target.num_gpus > 1 and values[name] < stage]
        new: dict[str, Any] = {
            name: stage for name in names if stage < 3 or values[f"{name.removesuffix(STAGE)}quantization"] == "none"
        }
        return new | {"optimizer_states": "fp32"} if new and stage == 3 else new

    return change


def states_in_8_bits(values: Values, target: Target) -> dict[str, Any]:
    """Round the moments where bitsandbytes is installed; offload and ZeRO stage 3 have them in fp32."""
    return {"optimizer_states": "8bit"} if find_spec("bitsandbytes") else {}


def offload_states_during_rollout(values: Values, target: Target) -> dict[str, Any]:
    """Keep optimizer states in host memory during rollouts; no change where the stage has none."""
    return {} if values["offload"] or OFFLOAD_DURING_ROLLOUT not in values else {OFFLOAD_DURING_ROLLOUT: True}


def optimizer_offload(values: Values, target: Target) -> dict[str, Any]:
    """Keep optimizer states in host memory always, at ZeRO stage 1 at least."""
    if values["offload"]:
        return {}
    stages = {name: 1 for name in named(values, STAGE) if not values[name]}
    changed = {"offload": True, "optimizer_states": "fp32"} | stages
    return changed | ({OFFLOAD_DURING_ROLLOUT: False} if OFFLOAD_DURING_ROLLOUT in values else {})


def parameter_offload(values: Values, target: Target) -> dict[str, Any]:
    is_partitioned = all(values[name] == 3 for name in named(values, STAGE))
    return {"offload_parameters": True} if is_partitioned and not values["offload_parameters"] else {}


def adapters(place: int, base: str = "none") -> ChangeOf:
    """Return the change to adapters of a stage's first trained model, or of its second.

    base: how the frozen weights are quantised; ZeRO stage 3 does not partition them then.
    """

    def change(values: Values, target: Target) -> dict[str, Any]:
        dims, bases, stages = (named(values, flag)[place : place + 1] for flag in ("lora_dim", "quantization", STAGE))
        new: dict[str, Any] = {name: LORA_DIM for name in dims if not values[name]}
        if base == "none" or any(values[name] != "none" for name in bases):
            return new
        below_3 = {name: min(2, values[name]) for name in stages}
        return dict.fromkeys(bases, base) | below_3 | new | ({"offload_parameters": False} if bases else {})

    return change


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to change flags.

    change: values, target -> other values.
    cost: what it costs, in words.
    times: steps of it that are taken at once.
    """

    change: ChangeOf
    cost: str
    times: int = 1


# The cheapest first. Those that take no memory of the host,
LIGHT = (
    Rung(save_synchronously, "training waits for each checkpoint"),
    Rung(smaller_micro_batch, "smaller products"),
    Rung(smaller_evaluation_batch, "smaller passes of an evaluation"),
    Rung(with_checkpointing, "one more forward pass"),
    Rung(partitioned(1), "the weights are gathered once a step"),
    Rung(partitioned(2), "gradients are reduced in each micro-batch"),
    Rung(shared_rollout, "GPUs exchange hidden states for each token"),
    Rung(streamed_rollout, "GPUs gather all layers for each token"),
)
# those that take it, or time at each pass,
HEAVY = (
    Rung(offload_states_during_rollout, "states cross the bus twice a rollout"),
    Rung(optimizer_offload, "states cross the bus each step"),
    Rung(partitioned(3), "weights are gathered in each pass"),
    Rung(parameter_offload, "weights cross the bus in each pass"),
)
# and those that train something else.
OTHER = (
    Rung(states_in_8_bits, "rounded moments"),
    Rung(adapters(0), "adapters only"),
    Rung(adapters(0, "int8"), "adapters on rounded weights"),
    Rung(adapters(1), "adapters only"),
    Rung(adapters(1, "int8"), "adapters on rounded weights"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """Flags that are changed together.

    rung: the way in which they are changed.
    flags: their names and new values.
    resolved: the settings with them.
    plan: the plan with them.
    gained: bytes freed of a GPU, and of the host.
    """

    rung: Rung
    flags: Mapping[str, Any]
    resolved: Resolved
    plan: MemoryPlan
    gained: tuple[int, int]

    def __str__(self) -> str:
        (on_device, on_host), (expected, _) = self.gained, self.plan.reserved()
        gained = [f"{size(on_device)} ({expected / GIB:.1f} GiB expected)"] if on_device > 0 else []
        gained += [f"{size(on_host)} of the host"] if on_host > 0 else []
        return f"{shlex.join(flag_words(self.flags))}: gives back {' and '.join(gained)}; cost: {self.rung.cost}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Changes in order, none of them needless, and settings and plan with all of them.

    is_enough: the plan fits with them; where it fitted before, it is not tight.
    """

    changes: Sequence[Change]
    resolved: Resolved
    plan: MemoryPlan
    is_enough: bool

    @property
    def flags(self) -> dict[str, Any]:
        """The flags that are other ones than before."""
        return {name: value for change in self.changes for name, value in change.flags.items()}


def size(num_bytes: int) -> str:
    """Return `1.2 GiB`, or `34 MiB` below a tenth of it."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True, slots=True)
class Answers:
    """What makes a plan fit: the same training up to rounding, and another that takes little of the host, if any."""

    same: Answer
    another: Answer | None

    @classmethod
    def of(cls, planner: StagePlanner, resolved: Resolved) -> Self:
        """Find both. Raises InputError, EnvironmentFault: see `StagePlanner.memory`."""
        resolved = replace(resolved, preset="")  # changes that contradict a preset are none
        same = answer(planner, resolved, (*LIGHT, *HEAVY))
        another = answer(planner, resolved, (*LIGHT, *OTHER, *HEAVY))
        changes_training = any(change.rung in OTHER for change in another.changes)
        return cls(same, another if changes_training else None)

    def chosen(self, auto_fit: AutoFit) -> Answer | None:
        """Return the answer that --auto_fit takes; None where it does not suffice."""
        allowed = [self.same] if auto_fit == "true" else [self.same, self.another] if auto_fit == "any" else []
        return next((one for one in allowed if one is not None and one.is_enough), None)

    @property
    def instead(self) -> str:
        """What to do where the same training does not fit, in words."""
        if self.another is None or not self.another.is_enough:
            return NOT_ENOUGH
        return f"--auto_fit any would train something else: {shlex.join(flag_words(self.another.flags))}"


def answer(planner: StagePlanner, resolved: Resolved, rungs: Sequence[Rung]) -> Answer:
    """Return changes that make a plan fit, or one that fits fit with its high estimate, as far as they can.

    After each change the cheapest are tried first again: activations may be the peak once states are small. Of those
    that a later change makes needless the dearest leave the list first; several steps of a change are one.
    """
    start, target = planner.memory(resolved), planner.target
    high = fits(start, target)
    taken = list(climbed(planner, resolved, start, rungs, high=high))
    is_enough = suffices(taken, target, high=high)
    needed = [change.rung for change in taken]
    for rung in sorted(needed, key=rungs.index, reverse=True) if is_enough else ():
        fewer = list(needed)
        fewer.remove(rung)
        again = list(replayed(planner, resolved, start, fewer))
        if len(again) == len(fewer) and suffices(again, target, high=high):
            taken, needed = again, fewer
    taken = list(
        replayed(planner, resolved, start, [replace(rung, times=needed.count(rung)) for rung in dict.fromkeys(needed)])
    )
    end = (taken[-1].resolved, taken[-1].plan) if taken else (resolved, start)
    return Answer(taken, *end, is_enough)


def suffices(taken: Sequence[Change], target: Target, *, high: bool) -> bool:
    """Tell whether nothing is lacking after these changes."""
    return bool(taken) and not any(lacking(taken[-1].plan, target, high=high))


def climbed(
    planner: StagePlanner, resolved: Resolved, before: MemoryPlan, rungs: Sequence[Rung], *, high: bool
) -> Iterator[Change]:
    """Yield the cheapest change that gives back what is lacking, then the next, until nothing is or none does."""
    while any(lacks := lacking(before, planner.target, high=high)):
        tried = (changed(planner, resolved, before, rung) for rung in rungs)
        change = next((one for one in tried if one and any(map(helps, one.gained, lacks))), None)
        if change is None:
            return
        resolved, before = change.resolved, change.plan
        yield change


def replayed(planner: StagePlanner, resolved: Resolved, before: MemoryPlan, rungs: Sequence[Rung]) -> Iterator[Change]:
    """Yield the changes of these rungs, one after the other, up to one that changes nothing."""
    for rung in rungs:
        if (change := changed(planner, resolved, before, rung)) is None:
            return
        resolved, before = change.resolved, change.plan
        yield change


def changed(planner: StagePlanner, resolved: Resolved, before: MemoryPlan, rung: Rung) -> Change | None:
    """Return a change of settings that are planned as `before`; None where it changes nothing, or they contradict."""
    table = flag_table(type(resolved.config))
    values = {name: value for name, value in flat_items(resolved.config) if not resolved.config.absent(table[name])}
    target, new = planner.target, dict[str, Any]()
    for _ in range(rung.times):
        new |= rung.change(values | new, target)
    if not (new := {name: value for name, value in new.items() if values[name] != value}):
        return None
    try:
        origins = resolved.origins | dict.fromkeys(new, COMMAND_LINE)
        config: Any = validated(type(resolved.config), values | new, origins)
        resolved = with_ranks(replace(resolved, config=config, origins=origins), target.num_gpus)
        plan = planner.memory(resolved)
    except RunError:
        return None  # settings that do not go together
    # Accumulation follows from --train_batch_size.
    new.pop("gradient_accumulation_steps" if values["train_batch_size"] else "", None)
    return Change(rung, new, resolved, plan, (before.reserved()[0] - plan.reserved()[0], before.host - plan.host))


def helps(gained: int, lacking: int) -> bool:
    """Tell whether bytes are lacking, and these are more than a negligible part of them."""
    return lacking > 0 and gained >= LEAST_SHARE * lacking


def gained_on_disk(planner: StagePlanner, resolved: Resolved) -> tuple[int, MemoryPlan]:
    """Return the bytes of the host that states on NVMe would give back, and the plan with them there."""
    on_disk = replace(planner, jsons_of=lambda settings: with_nvme(planner.jsons_of(settings))).memory(resolved)
    return planner.memory(resolved).host - on_disk.host, on_disk


def with_nvme(engines: Mapping[str, Json]) -> dict[str, Json]:
    """Return engines whose optimizer states are on NVMe where they were in host memory, under ZeRO stage 3."""
    moved = dict(engines)
    for role, engine in engines.items():
        zero = engine["zero_optimization"]
        if zero["stage"] == 3 and device_of(zero, "offload_optimizer") == "cpu":
            moved[role] = engine | {"zero_optimization": zero | {"offload_optimizer": {"device": "nvme"}}}
    return moved
