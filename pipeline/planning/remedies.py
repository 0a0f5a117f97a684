"""Search for flag changes that make a plan fit in memory.

Each change is planned together with those before it. There are two remedies: the same training in less memory, and
another training. A change that a later one makes redundant is dropped.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pipeline.configuration.ds_config import Json, device_of
from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.flags import flag_words
from pipeline.configuration.origins import COMMAND_LINE
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.errors import RunError
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.changes import BY_BUS, HEAVY, LIGHT, ON_HOST, OTHER, QUANTISED, MemoryOption
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner, fits, lacking

LEAST_SHARE = 0.01  # of the missing bytes; a change that frees less is not worth its cost (chosen by hand)
NOT_ENOUGH = "no change of flags is enough: use more GPUs, larger ones, shorter rows or a smaller model"
DEEPEST = 20  # times that a change is applied at most


@dataclass(frozen=True, slots=True)
class Change:
    """Flags that one memory option changes.

    option: the memory option.
    flags: their names and new values.
    resolved: the settings with them.
    plan: the plan with them.
    freed: bytes freed on a GPU, and on the host.
    """

    option: MemoryOption
    flags: Mapping[str, Any]
    resolved: Resolved
    plan: MemoryPlan
    freed: tuple[int, int]

    def __str__(self) -> str:
        (on_device, on_host), (expected, _) = self.freed, self.plan.reserved()
        freed = [f"{size(on_device)} (peak then {expected / GIB:.1f} GiB)"] if on_device > 0 else []
        freed += [f"{size(on_host)} of the host"] if on_host > 0 else []
        freed = freed or ["nothing by itself"]
        return f"{shlex.join(flag_words(self.flags))}: frees {' and '.join(freed)}; cost: {self.option.cost}"


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes of flags, in order, that make a plan fit.

    changes: the changes, none of them redundant.
    resolved: the settings with all of them.
    plan: the plan with all of them.
    is_enough: the plan fits. If it fitted before, then by its high estimate too.
    """

    changes: Sequence[Change]
    resolved: Resolved
    plan: MemoryPlan
    is_enough: bool

    @property
    def flags(self) -> dict[str, Any]:
        """The changed flags and their new values."""
        return {name: value for change in self.changes for name, value in change.flags.items()}


def size(num_bytes: int) -> str:
    """Return `1.2 GiB`, or `34 MiB` below a tenth of it."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True, slots=True)
class Remedies:
    """The two remedies of a plan.

    same: the same training up to rounding.
    another: changes that may alter training and can spare host memory; None if none that alters it is needed.
    """

    same: Remedy
    another: Remedy | None

    @classmethod
    def of(cls, planner: StagePlanner, resolved: Resolved) -> Self:
        """Find both. Raises InputError, EnvironmentFault: see `StagePlanner.memory`."""
        resolved = replace(resolved, preset="")  # a preset's values would override the changes
        same = remedy(planner, resolved, (*LIGHT, *HEAVY))
        another = remedy(planner, resolved, (*LIGHT, *OTHER, *HEAVY))
        changes_training = any(change.option.change is option.change for change in another.changes for option in OTHER)
        return cls(same, another if changes_training else None)

    @property
    def instead(self) -> str:
        """Describe the other training that fits, for a message that the same training does not."""
        if self.another is None or not self.another.is_enough:
            return NOT_ENOUGH
        return f"other flags would train something else: {shlex.join(flag_words(self.another.flags))}"


def remedy(planner: StagePlanner, resolved: Resolved, options: Sequence[MemoryOption]) -> Remedy:
    """Return the changes that make a plan fit; a plan that fits is made to fit by its high estimate.

    After each change the search begins with the cheapest option again, since the peak may have moved: once optimizer
    states are small, activations are the peak. Of redundant changes the costliest is dropped first. An option that is
    applied several times becomes one change.
    """
    start, target = planner.memory(resolved), planner.target
    high = fits(start, target)
    taken = list(one_by_one(planner, resolved, start, options, high=high))
    if not suffices(taken, target, high=high):
        taken = all_at_once(planner, resolved, start, options, high=high) or taken
    is_enough = suffices(taken, target, high=high)
    needed, order = [change.option for change in taken], [option.change for option in options]
    for option in sorted(needed, key=lambda one: order.index(one.change), reverse=True) if is_enough else ():
        for times in range(option.times):
            fewer = list(needed)
            fewer[needed.index(option) : needed.index(option) + 1] = [replace(option, times=times)] * (times > 0)
            again = list(in_order(planner, resolved, start, fewer))
            if len(again) == len(fewer) and suffices(again, target, high=high):
                taken, needed = again, fewer
                break
    steps = {one.change: sum(option.times for option in needed if option.change is one.change) for one in needed}
    merged = {one.change: replace(one, times=steps[one.change]) for one in needed}
    taken = list(in_order(planner, resolved, start, list(merged.values())))
    end = (taken[-1].resolved, taken[-1].plan) if taken else (resolved, start)
    return Remedy(taken, *end, is_enough)


def all_at_once(
    planner: StagePlanner, resolved: Resolved, before: MemoryPlan, options: Sequence[MemoryOption], *, high: bool
) -> list[Change]:
    """Return the changes of all options, each applied as often as it changes something; [] if the plan does not fit.

    This finds a remedy if no single change seems to help: a KV cache takes all memory that a change frees. Some options
    exclude others, or take host memory; they are left out in turn.
    """
    for left_out in ((), QUANTISED, ON_HOST, BY_BUS):
        deep = [replace(option, times=DEEPEST) for option in options if option not in left_out]
        taken = list(in_order(planner, resolved, before, deep))
        if suffices(taken, planner.target, high=high):
            return taken
    return []


def suffices(taken: Sequence[Change], target: Target, *, high: bool) -> bool:
    """Tell whether nothing is lacking after these changes."""
    return bool(taken) and not any(lacking(taken[-1].plan, target, high=high))


def one_by_one(
    planner: StagePlanner, resolved: Resolved, before: MemoryPlan, options: Sequence[MemoryOption], *, high: bool
) -> Iterator[Change]:
    """Yield the cheapest change that frees lacking memory, then the next, until nothing is lacking or none helps."""
    while any(lacks := lacking(before, planner.target, high=high)):
        tried = (changed(planner, resolved, before, option) for option in options)
        change = next((one for one in tried if one and any(map(helps, one.freed, lacks))), None)
        if change is None:
            return
        resolved, before = change.resolved, change.plan
        yield change


def in_order(
    planner: StagePlanner, resolved: Resolved, before: MemoryPlan, options: Sequence[MemoryOption]
) -> Iterator[Change]:
    """Yield the changes of these options, one after the other, without those that change nothing."""
    for option in options:
        if change := changed(planner, resolved, before, option):
            resolved, before = change.resolved, change.plan
            yield change


def changed(planner: StagePlanner, resolved: Resolved, before: MemoryPlan, option: MemoryOption) -> Change | None:
    """Return the change that an option makes to settings whose plan is `before`.

    None if it changes nothing, or if the new settings contradict each other.
    """
    table = flag_table(type(resolved.config))
    values = {name: value for name, value in flat_items(resolved.config) if not resolved.config.absent(table[name])}
    target, new = planner.target, dict[str, Any]()
    for _ in range(option.times):
        new |= option.change(values | new, target)
    if not (new := {name: value for name, value in new.items() if values[name] != value}):
        return None
    try:
        origins = dict.fromkeys(new, COMMAND_LINE)
        resolved = with_ranks(resolved.changed(new, origins), target.num_gpus)
        plan = planner.memory(resolved)
    except RunError:
        return None  # the settings contradict each other
    # Accumulation follows from --train-batch-size.
    new.pop("gradient_accumulation_steps" if values["train_batch_size"] else "", None)
    return Change(option, new, resolved, plan, (before.reserved()[0] - plan.reserved()[0], before.host - plan.host))


def helps(freed: int, lacking: int) -> bool:
    """Tell whether bytes are lacking, and the freed ones are more than a negligible share of them."""
    return lacking > 0 and freed >= LEAST_SHARE * lacking


def freed_by_nvme(planner: StagePlanner, resolved: Resolved) -> tuple[int, MemoryPlan]:
    """Return the bytes of host memory that states on NVMe would free, and the plan with the states there."""
    on_disk = replace(planner, jsons_of=lambda settings: with_nvme(planner.jsons_of(settings))).memory(resolved)
    return planner.memory(resolved).host - on_disk.host, on_disk


def with_nvme(engines: Mapping[str, Json]) -> dict[str, Json]:
    """Return the engines' JSONs with optimizer states on NVMe in place of host memory, under ZeRO stage 3."""
    moved = dict(engines)
    for role, engine in engines.items():
        zero = engine["zero_optimization"]
        if zero["stage"] == 3 and device_of(zero, "offload_optimizer") == "cpu":
            moved[role] = engine | {"zero_optimization": zero | {"offload_optimizer": {"device": "nvme"}}}
    return moved
