"""The first lines of a dry run: a line for each stage, and the remedies for a stage that lacks memory."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from pipeline.errors import counted
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.disk import outputs
from pipeline.planning.fastest import choice_text
from pipeline.planning.page import StagePlan, fits, run_text, seconds_text, verdict, why_no_time
from pipeline.planning.remedies import NOT_ENOUGH, Remedies, Remedy, freed_by_nvme, size

FIRST = 3  # changes of a remedy that are shown without --explain
ON_DISK = '"offload_optimizer": {"device": "nvme", "nvme_path": FOLDER} in a --deepspeed-config'


def columns(*cells: str) -> str:
    """Return a line of the table: stage, verdict, memory, time of a step and of the run, disk."""
    return "  {:<9}{:<13}{:>21}{:>10}{:>10}{:>13}".format(*cells)


def table(plans: Mapping[str, StagePlan]) -> Iterator[str]:
    """Yield a table for each hardware that stages are planned for, with a line for each stage. plans: by section."""
    for hardware, group in groupby(plans, key=lambda section: plans[section].hardware):
        sections = list(group)
        target, dtype = (first := plans[sections[0]]).planner.target, first.planner.dtype(first.resolved)
        yield f"plan of {', '.join(sections)}, on {hardware}"
        process = "process" if target.is_cpu else "GPU"
        yield columns("stage", "memory", f"GiB of a {process}", "a step", "the run", "GiB of disk")
        for section in sections:
            yield stage_line(section, plans[section])
        for section in sections:
            if words := choice_text(plans[section].resolved):
                yield f"  chosen for {section}: {words}"
        if any(plans[section].seconds for section in sections):
            exchange = ", without the exchange between GPUs" if target.num_gpus > 1 else ""
            yield f"  times are rough, for rows of full length{exchange} (device: {target.source})"
        elif fitting := [plans[section].memory for section in sections if fits(plans[section].memory, target)]:
            yield f"  times: {why_no_time(target, dtype, fitting[-1])}"


def stage_line(section: str, plan: StagePlan) -> str:
    """Return the line of a stage, without times if they are not known or the stage does not fit."""
    target, memory, config = plan.planner.target, plan.memory, plan.resolved.config
    of = f" of {target.memory / GIB:.1f}" if target.memory else ""
    step = sum(plan.seconds.values()) / plan.needs.steps_each
    times = (seconds_text(step) if step else "", run_text(step * plan.num_steps) if step * plan.num_steps else "")
    adapters = config.deepspeed.save_adapter_only
    written = outputs(plan.needs.models, plan.planner.dtype(plan.resolved), config.run, saves_adapters=adapters)
    on_nvme = sum(plan.planner.files(plan.resolved, memory).values())
    disk = sum(written.models) + written.num_checkpoints * written.checkpoint + on_nvme
    return columns(
        section, verdict(memory, target).partition(":")[0], span(memory.reserved()) + of, *times, f"{disk / GIB:.1f}"
    )


def proposals(section: str, plan: StagePlan, remedies: Remedies, *, show_all: bool) -> Iterator[str]:
    """Yield the verdict on a stage and its remedies: their first changes, or all with `show_all`."""
    target, same, another = plan.planner.target, remedies.same, remedies.another
    does_fit = fits(plan.memory, target)
    yield f"{section} {'is ' if does_fit else ''}{verdict(plan.memory, target)}"
    if same.is_enough:
        yield from remedy_lines("the same training", same, target, show_all=show_all)
    elif not does_fit:
        freed, on_disk = freed_by_nvme(plan.planner, same.resolved)
        if freed and fits(on_disk, target):
            yield from remedy_lines("the same training", replace(same, plan=on_disk), target, show_all=show_all)
            yield f"    with {ON_DISK}: frees {size(freed)} of the host; cost: states cross the disk each step"
        elif another is None or not another.is_enough:
            yield f"  {NOT_ENOUGH}"
        else:
            yield f"  no change of flags makes the same training fit: it takes {memory_text(same, target)}"
    if another is not None and another.is_enough:
        yield from remedy_lines("another training", another, target, show_all=show_all)


def remedy_lines(name: str, remedy: Remedy, target: Target, *, show_all: bool) -> Iterator[str]:
    """Yield a remedy: its first changes, or all with `show_all`, and the memory that the stage then takes."""
    yield f"  {name} fits with these changes, each planned with those before it:"
    shown = remedy.changes if show_all else remedy.changes[:FIRST]
    yield from (f"    {change}" for change in shown)
    if more := len(remedy.changes) - len(shown):
        yield f"    and {counted(more, 'change')} more (--explain)"
    yield f"    then it takes {memory_text(remedy, target)}"


def memory_text(remedy: Remedy, target: Target) -> str:
    """Return the memory of a GPU and of the host with a remedy, and the host's total."""
    device, host = span(remedy.plan.reserved()), span(remedy.plan.on_host)
    if target.is_cpu:
        return f"{device} GiB of a process"
    total = f"of its {target.host_memory / GIB:.1f}" if target.host_memory else "whose memory is not known"
    return f"{device} GiB of a GPU, and {host} of the host, {total}"


def span(figures: tuple[int, int]) -> str:
    """Return bytes, expected and high, in GiB."""
    return " to ".join(f"{n / GIB:.1f}" for n in figures)
