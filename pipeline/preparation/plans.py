"""The plans of stages before they start: the planner of each, its page, and what would make it fit. Imports torch."""

from collections.abc import Mapping, Sequence
from functools import partial

from pipeline.configuration.flags import Resolved
from pipeline.configuration.global_batch import with_ranks
from pipeline.configuration.resume_rules import memory_flags
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.errors import EnvironmentFault, InputError, RunError
from pipeline.launching.target import GIB, Target, parse_target, this_machine, with_constants
from pipeline.planning.ladder import changes, ladder
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner, fits, stage_page, verdict
from pipeline.preparation.engine_jsons import engine_jsons
from pipeline.preparation.preflight import NO_OUTPUTS, sample_sources
from pipeline.run.evaluations import memory_peaks, run_flags


def stage_planner(
    stage: Stage, given: Resolved, target: Target, base_of_output: Mapping[str, str]
) -> tuple[StagePlanner, Resolved]:
    """Return the `StagePlanner` of a stage on a target, with its measured constants, and the settings on so many ranks.

    Args:
        base_of_output: folder of an earlier stage's output -> the model that it starts from.

    Raises:
        InputError: settings that do not go with the number of ranks.
    """
    jsons_of = partial(engine_jsons, stage, ranks=target.num_gpus)
    planner = StagePlanner(stage.needs, jsons_of, dict(base_of_output), with_constants(target))
    return planner, with_ranks(given, target.num_gpus)


def plan_stages(
    stages: Mapping[Stage, Resolved], *, slots: Sequence[int] | None, base_of_output: Mapping[str, str] = NO_OUTPUTS
) -> None:
    """Print the plan of each stage, by its section: sizes, batches, memory, and a ladder of changes if it does not fit.

    Args:
        slots: ranks of each machine; ignored where `--target` describes others. None: not known.
        base_of_output: see `look_before_start`.

    Raises:
        InputError, EnvironmentFault: a line for each stage that does not fit, or has models that cannot be planned.
    """
    bases, errors, unplanned = dict(base_of_output), list[str](), dict[str, list[str]]()  # unplanned: by reason
    error_class: type[RunError] = EnvironmentFault
    for stage, given in stages.items():
        described = given.config.run.target
        target = parse_target(described) if described else None if slots is None else this_machine(*slots)
        if target is None:
            reason = "the number of ranks is not known here; describe the GPUs by --target"
            print(f"plan of {stage.section}: none: {reason}")
            continue
        planner, resolved = stage_planner(stage, given, target, bases)
        start = stage.start_models(resolved.config, bases)[0].path
        start = bases.get(start, start)
        bases |= {str(folder): start for folder in stage.outputs(resolved.config)[:1]}
        try:
            errors += print_plan(stage, planner, resolved, start)
        except RunError as error:
            print(f"plan of {stage.section}: none: {str(error).partition(';')[0]}")
            unplanned.setdefault(str(error), []).append(stage.section)
            error_class = InputError if isinstance(error, InputError) else error_class
    errors += [f"{', '.join(sections)}: not planned: {reason}" for reason, sections in unplanned.items()]
    if errors:
        raise error_class("\n".join(errors))


def print_plan(stage: Stage, planner: StagePlanner, resolved: Resolved, start: str) -> list[str]:
    """Print the plan of one stage, with what would make it fit; return what it lacks, a line each.

    Args:
        start: path of the model whose tokenizer reads the data.

    Raises:
        RunError: a model that cannot be planned.
    """
    target, lacks = planner.target, list[str]()
    samples = list(sample_sources(stage, resolved.config, start))
    rows = [sample.rows for sample in samples]
    lines, memory = stage_page(planner, resolved, 0 if None in rows else sum(filter(None, rows)))
    data = [f"  data     {sample.line}" for sample in samples if sample.line]
    measured = measured_lines(stage, resolved.config, memory)
    print(f"plan of {stage.section}, {lines[0]}", *lines[1:], *data, *measured, sep="\n")
    if not fits(memory, target):
        last = list(changes(planner, resolved))[-1:]
        changes_it = resolved.config.run.auto_fit and bool(last) and fits(last[0].plan, target)
        how = "--auto_fit makes it fit" if changes_it else "to make it fit"
        print(f"  {how}, each with those before it:", *ladder(planner, resolved), sep="\n    ")
        if not changes_it:
            here = target.is_cpu and not target.described
            elsewhere = "; for GPUs that are not here give --target, as 8xH100-80GB" if here else ""
            lacks.append(f"{stage.section}: {verdict(memory, target)} ({target}){elsewhere}")
    return lacks + [f"{stage.section}: {fault}" for fault in planner.disk_faults(resolved, memory)]


def measured_lines(stage: Stage, config: StageConfig, memory: MemoryPlan) -> list[str]:
    """Return planned peaks and those of the last run in the stage's folder: of each phase, and on the host."""
    folder = stage.run_folder(config.run)
    planned = {phase: (peak.total, "low") for phase, peak in memory.phases.items()}
    planned["host_memory"] = (memory.on_host[0] // memory.per_host, "expected")
    peaks = ", ".join(
        f"{phase} planned {planned[phase][0] / GIB:.1f} ({planned[phase][1]}), last measured {value:.1f}"
        for phase, value in memory_peaks(folder).items()
    )
    if not peaks:
        return []
    saved, current = run_flags(folder), memory_flags(config)
    others = [f"--{name} {saved[name]}" for name, value in current.items() if saved.get(name, value) != value]
    return [f"  measured {peaks} GiB in {folder}{', then with ' if others else ''}{' '.join(others)}"]
