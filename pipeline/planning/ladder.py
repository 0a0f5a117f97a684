"""Search for flag changes that make a plan fit in memory, in order, each planned with the ones before.

Two answers: the same training in less memory, and another training. A change that a later one makes needless is left
out.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pipeline.configuration.ds_config import Json, device_of
from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.flags import COMMAND_LINE, Resolved, flag_words, validated
from pipeline.configuration.global_batch import with_ranks
from pipeline.configuration.run_flags import AutoFit
from pipeline.errors import RunError
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.changes import BY_BUS, HEAVY, LIGHT, ON_HOST, OTHER, QUANTISED, Rung
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner, fits, lacking

LEAST_SHARE = 0.01  # Share of what is missing below which a change is not worth its cost.
NOT_ENOUGH = "no change of flags is enough: take more GPUs, larger ones, shorter rows or a smaller model"
DEEPEST = 20  # steps of a change that is made as far as it goes


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
        gained = gained or ["nothing by itself"]
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
    """Remedies of a plan: the same training up to rounding, and another that takes little of the host, if any."""

    same: Answer
    another: Answer | None

    @classmethod
    def of(cls, planner: StagePlanner, resolved: Resolved) -> Self:
        """Find both. Raises InputError, EnvironmentFault: see `StagePlanner.memory`."""
        resolved = replace(resolved, preset="")  # changes that contradict a preset are none
        same = answer(planner, resolved, (*LIGHT, *HEAVY))
        another = answer(planner, resolved, (*LIGHT, *OTHER, *HEAVY))
        changes_training = any(change.rung.change is rung.change for change in another.changes for rung in OTHER)
        return cls(same, another if changes_training else None)

    def chosen(self, auto_fit: AutoFit) -> Answer | None:
        """Return the answer that --auto-fit takes; None where it does not suffice."""
        allowed = [self.same] if auto_fit == "true" else [self.same, self.another] if auto_fit == "any" else []
        return next((one for one in allowed if one is not None and one.is_enough), None)

    @property
    def instead(self) -> str:
        """Describe the remedy if the same training does not fit."""
        if self.another is None or not self.another.is_enough:
            return NOT_ENOUGH
        return f"--auto-fit any would train something else: {shlex.join(flag_words(self.another.flags))}"


def answer(planner: StagePlanner, resolved: Resolved, rungs: Sequence[Rung]) -> Answer:
    """Return changes that make a plan fit, or one that fits fit with its high estimate, as far as they can.

    After each change the cheapest are tried first again: activations may be the peak once states are small. Of those
    that a later change makes needless the dearest leave the list first; several steps of a change are one.
    """
    start, target = planner.memory(resolved), planner.target
    high = fits(start, target)
    taken = list(climbed(planner, resolved, start, rungs, high=high))
    if not suffices(taken, target, high=high):
        taken = together(planner, resolved, start, rungs, high=high) or taken
    is_enough = suffices(taken, target, high=high)
    needed, order = [change.rung for change in taken], [rung.change for rung in rungs]
    for rung in sorted(needed, key=lambda one: order.index(one.change), reverse=True) if is_enough else ():
        for times in range(rung.times):
            fewer = list(needed)
            fewer[needed.index(rung) : needed.index(rung) + 1] = [replace(rung, times=times)] * (times > 0)
            again = list(replayed(planner, resolved, start, fewer))
            if len(again) == len(fewer) and suffices(again, target, high=high):
                taken, needed = again, fewer
                break
    steps = {one.change: sum(rung.times for rung in needed if rung.change is one.change) for one in needed}
    merged = {one.change: replace(one, times=steps[one.change]) for one in needed}
    taken = list(replayed(planner, resolved, start, list(merged.values())))
    end = (taken[-1].resolved, taken[-1].plan) if taken else (resolved, start)
    return Answer(taken, *end, is_enough)


def together(
    planner: StagePlanner, resolved: Resolved, before: MemoryPlan, rungs: Sequence[Rung], *, high: bool
) -> list[Change]:
    """Return all changes, as far as they go, where they make a plan fit that no single one brings nearer; else none.

    A KV cache fills what is left, so that nothing seems to give back memory. What rules out another change, or takes
    memory of the host, is left out in turn.
    """
    for left_out in ((), QUANTISED, ON_HOST, BY_BUS):
        deep = [replace(rung, times=DEEPEST) for rung in rungs if rung not in left_out]
        taken = list(replayed(planner, resolved, before, deep))
        if suffices(taken, planner.target, high=high):
            return taken
    return []


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
    """Yield the changes of these rungs, one after the other, without those that change nothing."""
    for rung in rungs:
        if change := changed(planner, resolved, before, rung):
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
    # Accumulation follows from --train-batch-size.
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
