"""The first lines of a dry run: a line for each stage, and for one that lacks memory what would make it fit."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

from pipeline.errors import counted
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.disk import outputs
from pipeline.planning.fastest import choice_in_words
from pipeline.planning.ladder import NOT_ENOUGH, Answer, Answers, gained_on_disk, size
from pipeline.planning.page import StagePlan, fits, run_text, seconds_text, verdict, why_no_time

FIRST = 3  # changes of an answer that are shown without --explain
ON_DISK = '"offload_optimizer": {"device": "nvme", "nvme_path": FOLDER} in a --deepspeed-config'


def columns(*cells: str) -> str:
    """Return a line of the table: stage, verdict, memory, time of a step and of the run, disk."""
    return "  {:<9}{:<13}{:>21}{:>10}{:>10}{:>13}".format(*cells)


def table(plans: Mapping[str, StagePlan]) -> Iterator[str]:
    """Yield a line for each stage, by section, below the hardware that it is planned for."""
    for hardware, group in groupby(plans, key=lambda section: plans[section].hardware):
        sections = list(group)
        target, dtype = (first := plans[sections[0]]).planner.target, first.planner.dtype(first.resolved)
        yield f"plan of {', '.join(sections)}, on {hardware}"
        process = "process" if target.is_cpu else "GPU"
        yield columns("stage", "memory", f"GiB of a {process}", "a step", "the run", "GiB of disk")
        for section in sections:
            yield stage_line(section, plans[section])
        for section in sections:
            if words := choice_in_words(plans[section].resolved):
                yield f"  {section}, chosen for it: {words}"
        if any(plans[section].seconds for section in sections):
            yield f"  times are rough, of rows of full length (device: {target.source})"
        elif any(fits(plans[section].memory, target) for section in sections):
            yield f"  times: {why_no_time(target, dtype)}"


def stage_line(section: str, plan: StagePlan) -> str:
    """Return the line of a stage: without times where they are not known, or where it does not fit."""
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


def proposals(section: str, plan: StagePlan, answers: Answers, *, all_of_them: bool) -> Iterator[str]:
    """Yield what a stage lacks, and the answers to it: their first changes, or `all_of_them`."""
    target, same, another = plan.planner.target, answers.same, answers.another
    does_fit = fits(plan.memory, target)
    yield f"{section} {'is ' if does_fit else ''}{verdict(plan.memory, target)}"
    if same.is_enough:
        yield from answer_lines("the same training", same, target, all_of_them=all_of_them)
    elif not does_fit:
        gained, on_disk = gained_on_disk(plan.planner, same.resolved)
        if gained and fits(on_disk, target):
            yield from answer_lines("the same training", replace(same, plan=on_disk), target, all_of_them=all_of_them)
            yield f"    with {ON_DISK}: gives back {size(gained)} of the host; cost: states cross the disk each step"
        elif another is None or not another.is_enough:
            yield f"  {NOT_ENOUGH}"
        else:
            yield f"  the same training does not fit by any changes of flags: {what_it_takes(same, target)}"
    if another is not None and another.is_enough:
        yield from answer_lines("another training", another, target, all_of_them=all_of_them)


def answer_lines(name: str, answer: Answer, target: Target, *, all_of_them: bool) -> Iterator[str]:
    """Yield an answer: its first changes, or `all_of_them`, and what it takes."""
    yield f"  {name} fits with these changes, each planned with those before it:"
    shown = answer.changes if all_of_them else answer.changes[:FIRST]
    yield from (f"    {change}" for change in shown)
    if more := len(answer.changes) - len(shown):
        yield f"    and {counted(more, 'change')} more (--explain)"
    yield f"    then it takes {what_it_takes(answer, target)}"


def what_it_takes(answer: Answer, target: Target) -> str:
    """Return what an answer takes of a GPU and of the host, and whether the host has it."""
    device, host = span(answer.plan.reserved()), span(answer.plan.on_host)
    if target.is_cpu:
        return f"{device} GiB of a process"
    known = f"of its {target.host_memory / GIB:.1f}" if target.host_memory else "whose memory is not known"
    return f"{device} GiB of a GPU, and {host} of the host, {known}"


def span(figures: tuple[int, int]) -> str:
    """Return bytes, expected and high, in GiB."""
    return " to ".join(f"{n / GIB:.1f}" for n in figures)
