"""The entry of a stage: its flags, and on its ranks the dry run, the loop with flags that are `auto`, and the report.

Flags are read in milliseconds: only a DeepSpeed JSON takes an import of deepspeed, of seconds. The module imports torch
only when something is planned, and the parts of a run only when it starts, so that `--help` answers at once.
"""

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from pipeline.configuration.flags import parse, stage_arguments
from pipeline.configuration.rank_rules import Choice, with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import Stage
from pipeline.console import outlive_console, wrapped
from pipeline.errors import EXIT_DONE, EXIT_STOPPED, EnvironmentFault, InputError, RunError, print_error, show
from pipeline.hub import check_push
from pipeline.processes import WAITS, let_threads_sleep, wait_for_go
from pipeline.rendezvous import check_environment, check_launched, num_ranks, own_slots
from pipeline.run.entry import leave, run_command
from pipeline.run.outcome import own_rank, supervisor_name, write_outcome
from pipeline.run.reporter import Reporter
from pipeline.run.stop_request import StopRequest, quit_now

EARLY = "stopped before the first step, with nothing to save; the same command starts again"


def program_of(stage: Stage, module: str) -> Callable[..., int]:
    """Return the `main` of a stage: (argv) runs its command line and returns the exit code.

    Where `module` is the program (`python -m step1_sft.main`), run it and end the process with that code.
    """
    main = partial(enter, stage)
    if module == "__main__":
        leave(main())
    return main


def enter(stage: Stage, argv: list[str] | None = None) -> int:
    """Parse the flags of a stage and run its loop, or make its dry run; returns the exit code.

    docs/contribute/design.md, section 3, has the codes. Rank 0 writes the report if no supervisor does.
    """
    outlive_console()
    let_threads_sleep()
    if WAITS in os.environ:
        stage.loop()  # a rank that was started early imports its loop while it waits
        if not wait_for_go():
            return EXIT_STOPPED
    try:
        check_environment()
    except RunError as error:
        return print_error(error)  # each process prints it: the environment does not tell which is the first
    try:
        check_srun()
        resolved = read_flags(stage, stage_arguments(argv))
        if not resolved.config.run.starts_nothing:  # a dry run plans for other ranks
            check_launched()
            resolved = with_ranks(resolved, num_ranks())
        check_supervised(resolved.config.run)
        if own_rank() == 0 and not resolved.config.run.starts_nothing:
            check_push(resolved.config.run.push_to_hub)
    except RunError as error:
        return print_error(error) if is_first_process() else error.code
    if resolved.config.run.starts_nothing:
        return run_command(lambda: dry_run_own_stage(stage, resolved)) if own_rank() == 0 else EXIT_DONE
    run_dir = stage.run_folder(resolved.config.run)
    # Before torch, whose import takes seconds: from now on signals count, and the supervisor sees this rank.
    stop = StopRequest(lambda: leave_early(run_dir))
    if supervisor_name() is not None:
        write_outcome(run_dir, own_rank(), None, "running")
    from pipeline.run.run import run_stage

    code = run_stage(stage, resolved, choose=choose_for_run, stop=stop)
    if own_rank() == 0 and supervisor_name() is None:
        Reporter(run_dir, is_on=resolved.config.run.report).finish()
    return code


def check_supervised(run: RunConfig) -> None:
    """Raise InputError for --auto measure without a supervisor, which tries settings before ranks start."""
    if run.auto == "measure" and supervisor_name() is None and not run.starts_nothing:
        raise InputError(
            "--auto measure: flags are chosen before ranks start: give it to `rlhf train --step N`, or to a launch "
            "script: bash launch/single_gpu.sh N"
        )


def is_first_process() -> bool:
    """Return True on rank 0, for a single rank, and in the first of several srun tasks that do not form ranks."""
    return 0 in (own_rank(), num_ranks() - 1) and os.environ.get("SLURM_PROCID", "0") == "0"


def check_srun() -> None:
    """Raise EnvironmentFault if srun started several tasks that do not know of each other."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if int(tasks) > 1 and num_ranks() == 1 and supervisor_name() is None:
        raise EnvironmentFault(
            f"SLURM_NTASKS is {tasks}, but this task is a run of one rank, as each of the others would be: start one "
            "task per machine and the ranks by torchrun (srun --ntasks-per-node 1 torchrun --nproc_per_node GPUS ...; "
            "docs/guides/slurm.md); for a single rank unset SLURM_NTASKS"
        )


def read_flags(stage: Stage, argv: list[str], *, sections: Collection[str] = ()) -> Resolved:
    """Parse the flags of a stage and check its folders, without writing anything.

    Args:
        sections: sections that a YAML file may have; empty: any.

    Raises:
        InputError: wrong flags, files or folders.
    """
    given = parse(stage.config, argv, section=stage.section, sections=sections, prog=stage.program)
    from pipeline.run.output_checks import check_outputs
    from pipeline.run.resolve import with_command_rules

    check_outputs({stage: given.config})
    return with_command_rules({stage: given})[stage]


def leave_early(run_dir: Path) -> None:
    """End a rank that got a stop request before it has read its data and models."""
    if supervisor_name() is not None:
        write_outcome(run_dir, own_rank(), EXIT_STOPPED, EARLY)
        quit_now("", EXIT_STOPPED)
    quit_now(EARLY if own_rank() == 0 else "", EXIT_STOPPED)


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
