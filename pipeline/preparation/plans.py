"""The plans of stages before they start: the planner of each, its page, and what would make it fit.

The module imports torch.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pipeline.configuration.flag_checks import warmup_note
from pipeline.configuration.origins import COMMAND_LINE, Kind, Origin
from pipeline.configuration.rank_rules import Choice, with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import memory_flags, values_by_rule
from pipeline.configuration.stage import Stage
from pipeline.console import wrapped
from pipeline.errors import EnvironmentFault, InputError, RunError, raise_lines, show
from pipeline.files import GIB, read_object
from pipeline.launching.target import Target, is_model, parse_target, this_machine, with_constants, with_limit
from pipeline.planning.fastest import Candidate, choice_text, fastest
from pipeline.planning.page import StagePlan, StagePlanner, fits, lacking, stage_page, verdict
from pipeline.planning.remedies import NOT_ENOUGH, Remedies
from pipeline.planning.summary import proposals, table
from pipeline.preparation.engine_jsons import engine_jsons
from pipeline.preparation.preflight import NO_OUTPUTS, sample_sources
from pipeline.run.earlier_runs import chosen_before
from pipeline.run.evaluations import memory_peaks, run_flags, unfinished_answers
from pipeline.run.layout import environment_file

log = logging.getLogger(__name__)

MEASURED = "PYTHON_RUN_MEASURED"  # environment variable of the ranks: the flags of --auto measure, as a JSON object


def stage_planner(
    stage: Stage, given: Resolved, target: Target, base_of_output: Mapping[str, str]
) -> tuple[StagePlanner, Resolved]:
    """Return the `StagePlanner` of a stage on a target, and the settings on so many ranks.

    The target gets the constants that were measured, and the limit of `--gpu-memory-gib`.

    Args:
        base_of_output: folder of an earlier stage's output -> the model that it starts from.

    Raises:
        InputError: settings that do not go with the number of ranks.
        EnvironmentFault: a limit above the memory of the target.
    """
    jsons_of = partial(engine_jsons, stage, ranks=target.num_gpus)
    target = with_limit(with_constants(target), given.config.run.gpu_memory_gib)
    planner = StagePlanner(stage.needs, jsons_of, dict(base_of_output), target)
    return planner, with_ranks(given, target.num_gpus)


def choose(stage: Stage, planner: StagePlanner, resolved: Resolved) -> Choice:
    """Return the values of flags that are `auto`; none on a CPU, or where a GPU's memory is not known.

    A resumed run has those that it began with, where its GPUs and their number are the same, unless flags that are
    given now contradict them, or leave them too little memory.

    Raises InputError, EnvironmentFault: see `StagePlanner.memory`.
    """
    target = planner.target
    before = {} if target.described else chosen_before(stage, resolved)
    # A choice of a version that wrote it as a preset names no hardware.
    if same := {name: value for name, (value, of) in before.items() if not of.source or target.is_same(of.source)}:
        with suppress(InputError):
            began = Candidate.of(planner, resolved, same)
            if fits(began.plan, target) or resolved.config.run.auto == "measure":  # which has seen that it fits
                return choice_of(began, target, f"{choice_text(began.resolved)} (as the run began)")
    if (best := fastest(planner, resolved)) is None:
        return Choice()
    hardware = ", ".join(sorted({origin.source for _, origin in before.values()}))
    why = "began with other flags" if same else f"began on {hardware}"
    return choice_of(best, target, f"{best.line}{f'; anew, as the run {why}' if before else ''}")


def choose_at_start(stage: Stage, planner: StagePlanner, resolved: Resolved) -> Choice:
    """Return the values of flags for the ranks that start: as `choose`, or as --auto measure or fit says.

    Raises:
        InputError: see `StagePlanner.memory`. EnvironmentFault: no change of flags makes the plan of --auto fit fit.
    """
    if measured := json.loads(os.environ.get(MEASURED, "{}")):
        candidate = Candidate.of(planner, resolved, measured)
        return choice_of(candidate, planner.target, f"{candidate.line}, measured")
    choice = choose(stage, planner, resolved)
    settings = choice.of(resolved, planner.target.num_gpus)
    if resolved.config.run.auto != "fit" or fits(planner.memory(settings), planner.target):
        return choice
    candidate, target = Candidate.of(planner, resolved, fitting_flags(planner, resolved, settings)), planner.target
    if not fits(candidate.plan, target):
        raise EnvironmentFault(f"--auto fit: {verdict(candidate.plan, target)} ({target}); {NOT_ENOUGH}")
    return choice_of(candidate, target, candidate.line)


def fitting_flags(planner: StagePlanner, resolved: Resolved, chosen: Resolved) -> dict[str, Any]:
    """Return the changes of flags that make a plan fit, and what the plan chooses beside them; log each change.

    Args:
        chosen: the settings with the choice of the plan, which do not fit.

    Raises:
        EnvironmentFault: no change is enough.
    """
    target, answers = planner.target, Remedies.of(planner, chosen)
    if not answers.same.is_enough:
        raise EnvironmentFault(f"--auto fit: {verdict(answers.same.plan, target)} ({target}); {answers.instead}")
    for change in answers.same.changes:
        log.info("auto fit: %s", change)
    rest = fastest(planner, Choice(answers.same.flags, COMMAND_LINE).of(resolved, target.num_gpus))
    return {**answers.same.flags, **(rest.flags if rest else {})}


def choice_of(candidate: Candidate, target: Target, line: str) -> Choice:
    """Return the choice of a candidate; line: it and what it gives, for people."""
    return Choice(candidate.flags, Origin(Kind.PLAN, str(target)), line, expected(candidate, target))


def expected(candidate: Candidate, target: Target) -> dict[str, Any]:
    """Return the expectations of a plan, for the run and its folder: GiB of a GPU in each phase, and seconds a step.

    A phase has `allocated`, the memory of tensors, and `reserved`, all memory of the device: expected and high. {} on a
    CPU.
    """
    if target.is_cpu:
        return {}
    plan = candidate.plan
    memory = {
        name: {"allocated": peak.total / GIB, "reserved": [n / GIB for n in plan.reserved(name)]}
        for name, peak in plan.phases.items()
    }
    shared = {"target": str(target), "step_s": candidate.seconds, "stores_logits": plan.stores_logits}
    return shared | {"memory_gib": memory}


def plan_stages(
    stages: Mapping[Stage, Resolved], *, slots: Sequence[int] | None, base_of_output: Mapping[str, str] = NO_OUTPUTS
) -> None:
    """Print the plans of stages: a table, what would make those fit that lack memory, and the rows of each source.

    With `--explain` it prints all parts of each plan.

    Args:
        slots: ranks of each machine; ignored where `--target` describes others. None: not known.
        base_of_output: see `look_before_start`.

    Raises:
        InputError, EnvironmentFault: a line for each stage that does not fit, or has models that cannot be planned.
    """
    bases, plans, data = dict(base_of_output), dict[str, StagePlan](), dict[str, list[str]]()
    unplanned = dict[str, list[str]]()  # sections by reason
    error_class: type[RunError] = EnvironmentFault
    of_section = {stage.section: stage for stage in stages}
    for stage, given in stages.items():
        described = given.config.run.target
        target = parse_target(described) if described else None if slots is None else this_machine(*slots)
        if target is None:
            reason = "the number of ranks is not known here; describe the GPUs by --target"
            show(wrapped(f"{stage.section}: not planned: {reason}"))
            continue
        planner, resolved = stage_planner(stage, given, target, bases)
        start = stage.start_models(resolved.config, bases)[0].source.path
        bases |= {str(folder): start for folder in resolved.config.outputs[:1]}
        try:
            samples = list(sample_sources(stage, resolved.config, start))
            rows = [sample.rows for sample in samples]
            resolved = choose(stage, planner, resolved).of(resolved, target.num_gpus)
            plans[stage.section] = StagePlan.of(planner, resolved, 0 if None in rows else sum(filter(None, rows)))
            data[stage.section] = [f"  data of {stage.section}: {one.line}" for one in samples if one.line]
        except RunError as error:
            unplanned.setdefault(str(error), []).append(stage.section)
            error_class = InputError if isinstance(error, InputError) else error_class
    show(*map(wrapped, table(plans)))
    errors = [line for section, plan in plans.items() for line in print_proposals(section, plan)]
    for section, plan in plans.items():
        show(*map(wrapped, data[section]))
        if rollout := plan.needs.rollout:
            limit_note = unfinished_answers(of_section[section].run_folder(plan.resolved.config.run))
            show(wrapped(f"  {section}: answers of at most {rollout.num_new_tokens} tokens; {limit_note}"))
        if note := warmup_note(plan.resolved.config.optimizer, plan.num_steps):
            show(wrapped(f"  note: {section}: {note}"))
        if plan.resolved.config.run.explain:
            last_run = measured_lines(of_section[section], plan)
            show(*map(wrapped, [f"parts of the plan of {section}", *stage_page(plan), *last_run]))
    errors += [f"{', '.join(sections)}: not planned: {reason}" for reason, sections in unplanned.items()]
    raise_lines(errors, error_class)


def print_proposals(section: str, plan: StagePlan) -> list[str]:
    """Print what a stage lacks, and what would make it fit; return a line for each thing that ends its start.

    Raises:
        RunError: a model that cannot be planned.
    """
    target, run = plan.planner.target, plan.resolved.config.run
    faults = [f"{section}: {fault}" for fault in plan.planner.disk_faults(plan.resolved, plan.memory)]
    if not any(lacking(plan.memory, target, high=True)):
        return faults
    answers = Remedies.of(plan.planner, plan.resolved)
    show(*map(wrapped, proposals(section, plan, answers, show_all=run.explain)))
    if fits(plan.memory, target):
        return faults
    if run.auto == "fit" and answers.same.is_enough:
        show("  --auto fit makes it fit")
        return faults
    here = target.is_cpu and not target.described
    elsewhere = "; for GPUs that are not here give --target, as 8xH100-80GB" if here else ""
    instead = f"; {answers.instead}" if run.auto == "fit" else ""
    return [f"{section}: {verdict(plan.memory, target)} ({target}){elsewhere}{instead}", *faults]


def measured_lines(stage: Stage, plan: StagePlan) -> list[str]:
    """Return a line of the GiB that the last run in the stage's folder measured, in each phase and in host memory.

    There is none unless that run had the same models on the same kind of device. A phase's figure compares with the
    plan's low figure.
    """
    config, target = plan.resolved.config, plan.planner.target
    folder = stage.run_folder(config.run)
    saved, device = run_flags(folder), str(read_object(environment_file(folder)).get("device", ""))
    is_same = device == "cpu" if target.is_cpu else target.name == device or is_model(target.name, device)
    models = values_by_rule(config, "model")
    peaks = ", ".join(f"{name.partition('_')[0]} {value:.1f}" for name, value in memory_peaks(folder).items())
    if not peaks or not is_same or any(saved.get(name) != path for name, path in models.items()):
        return []
    current = memory_flags(config)
    others = ", other flags" if any(saved.get(name, value) != value for name, value in current.items()) else ""
    return [f"  last run {peaks} GiB{others}"]
