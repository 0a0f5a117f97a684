"""The dry run of a stage: it prints the plan, and with --explain flags and DeepSpeed's JSON, and starts nothing.

`rlhf train --dry-run`, the supervisor of a launch script and a stage's own `--dry-run` call it. The module imports no
torch until it plans models.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from pipeline.configuration.flag_table import AUTO, flag_table, flat_items
from pipeline.configuration.origins import Kind
from pipeline.configuration.rank_rules import MICRO, STEPS, with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.console import wrapped
from pipeline.errors import EnvironmentFault, InputError, raise_lines, show
from pipeline.launching.target import parse_target
from pipeline.preparation.engine_jsons import engine_jsons
from pipeline.preparation.preflight import NO_OUTPUTS, look_before_start
from pipeline.redact import masked
from pipeline.run.earlier_runs import is_finished

NOTHING_STARTED = "dry run: nothing was started"


def show_notes(stage: Stage, resolved: Resolved, *, ranks: int | None) -> None:
    """Print what a user should know of the settings. Raises InputError for those that contradict each other."""
    engine_jsons(stage, resolved, ranks=ranks)
    show(*(wrapped(f"  note: {line}") for line in with_ranks(resolved, ranks).notes))


def show_flags(stage: Stage, resolved: Resolved, *, ranks: int | None) -> None:
    """Print value and origin of each flag, then the DeepSpeed JSON of each engine, where `--explain` asks for them."""
    resolved = with_ranks(resolved, ranks)
    if resolved.config.run.explain:
        table = flag_table(type(resolved.config))
        free = {name for name, flag in table.items() if flag.auto and not resolved.is_given(name)}
        if MICRO in free and resolved.origins[STEPS].kind in (Kind.DEFAULT, Kind.FOLLOWS):  # it follows
            free.add(STEPS)
        for name, value in flat_items(resolved.config):
            show(f"  {name:<34} {AUTO if name in free else masked(value)!s:<30} {resolved.origins[name]}")
        if free:
            show("  (what follows is without the plan's choice: flags that are auto as on a CPU, ZeRO stages as given)")
        for name, content in engine_jsons(stage, resolved, ranks=ranks).items():
            show(f"  DeepSpeed JSON of the {name}: {json.dumps(content)}")


def look_and_plan(
    stages: Mapping[Stage, Resolved],
    *,
    slots: Sequence[int] | None,
    base_of_output: Mapping[str, str] = NO_OUTPUTS,
    named_by_section: bool = False,
) -> None:
    """Print notes of `look_before_start` and the plan of each stage, also where this machine lacks something.

    With `--show-data` it prints the stages' rows instead.

    Raises:
        InputError, EnvironmentFault: all that would end the run, one per line.
    """
    from pipeline.preparation.data_page import show_data
    from pipeline.preparation.plans import plan_stages

    if shows_data(stages.values()):
        bases = dict(base_of_output)
        for stage, resolved in stages.items():
            show_data(stage, resolved.config, bases)
            start = stage.start_models(resolved.config, bases)[0].source.path
            bases |= {str(folder): start for folder in resolved.config.outputs[:1]}
        return
    configs, faults = {stage: resolved.config for stage, resolved in stages.items()}, list[str]()
    try:
        lines = look_before_start(
            configs, dry_run=True, named_by_section=named_by_section, base_of_output=base_of_output
        )
        show(*(wrapped(f"  note: {line}") for line in lines))
    except EnvironmentFault as fault:
        faults.append(str(fault))
    try:
        plan_stages(stages, slots=slots, base_of_output=base_of_output)
    except InputError as error:
        raise InputError("\n".join([*faults, str(error)])) from None
    except EnvironmentFault as fault:
        faults.append(str(fault))
    raise_lines(faults, EnvironmentFault)


def shows_data(settings: Iterable[Resolved]) -> bool:
    """Return True if the stages of these settings only show their rows."""
    return any(resolved.config.run.show_data for resolved in settings)


def dry_run_stage(stage: Stage, resolved: Resolved, *, slots: Sequence[int] | None) -> None:
    """Print what a stage would run with, and look at its models, data, disk and memory.

    slots: ranks of each machine; None: not known.

    Raises:
        InputError, EnvironmentFault: what would end the run.
    """
    if shows_data([resolved]):
        look_and_plan({stage: resolved}, slots=slots)
        return
    described = resolved.config.run.target
    ranks = parse_target(described).num_gpus if described else None if slots is None else sum(slots)
    if not described:
        is_finished(stage.run_folder(resolved.config.run), with_ranks(resolved, ranks).config, ranks=ranks)
    show_notes(stage, resolved, ranks=ranks)
    try:
        look_and_plan({stage: resolved}, slots=slots)
    finally:
        show_flags(stage, resolved, ranks=ranks)
        show(NOTHING_STARTED)
