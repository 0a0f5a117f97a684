"""Functions that the ranks of a stage call when they start: dry run, flags that are `auto`, and report.

The module imports torch only when something is planned, and the parts of a run only when it starts, so that `--help`
answers at once.
"""

from pathlib import Path

from pipeline.configuration.rank_rules import Choice
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.console import wrapped
from pipeline.errors import show
from pipeline.rendezvous import own_slots
from pipeline.run.reporter import Reporter


def choose_for_run(stage: Stage, resolved: Resolved) -> Choice:
    """Return the values of flags for the ranks of this run, on machines like this one.

    Raises InputError, EnvironmentFault: see `choose_at_start`.
    """
    from pipeline.launching.target import this_machine

    target = this_machine(*own_slots())
    if target.is_cpu and resolved.config.run.auto == "plan":
        return Choice()
    from pipeline.preparation.plans import choose_at_start, stage_planner

    return choose_at_start(stage, *stage_planner(stage, resolved, target, {}))


def dry_run_own_stage(stage: Stage, resolved: Resolved) -> None:
    """Make the dry run of the stage of which this process is a rank. Raises InputError, EnvironmentFault."""
    from pipeline.preparation.dry_run import dry_run_stage

    slots = own_slots()
    if len(slots) > 1 and not resolved.config.run.target:
        machines = " + ".join(map(str, slots))
        ranks = f"{sum(slots)} ranks, {slots[0]} of them here"
        show(wrapped(f"  note: {ranks}: planned on machines like this one, of {machines} ranks"))
    dry_run_stage(stage, resolved, slots=slots)


def report_own_run(run_dir: Path, resolved: Resolved) -> None:
    """Write the report of the run of this process, which has ended."""
    Reporter(run_dir, is_on=resolved.config.run.report).finish()
