"""Entry points: start and end a stage, or a small command that is no stage.

A stage first reads its flags, in milliseconds: only a DeepSpeed JSON takes an import of deepspeed, of seconds. Then it
imports torch and runs its loop. This module imports no torch.
"""

import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import parse, stage_arguments
from pipeline.configuration.groups import Group
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import Stage
from pipeline.console import outlive_console, raise_on_interrupt
from pipeline.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EnvironmentFault,
    InputError,
    RunError,
    dashed,
    print_error,
    say,
)
from pipeline.hub import check_push
from pipeline.processes import WAITS, let_threads_sleep, wait_for_go
from pipeline.rendezvous import check_environment, check_launched, num_ranks
from pipeline.run.outcome import own_rank, supervisor_name, write_outcome
from pipeline.run.stop_request import StopRequest, quit_now

if TYPE_CHECKING:
    from pipeline.run.resolve import Choose

EARLY = "stopped before the first step, with nothing to save; the same command starts again"


def enter(
    stage: Stage,
    argv: list[str] | None,
    *,
    dry_run: Callable[[Stage, Resolved], None],
    choose: "Choose",
    write_report: Callable[[Path, Resolved], None],
) -> int:
    """Parse the flags of a stage and run its loop; returns the exit code of docs/contribute/design.md, section 3.

    Args:
        dry_run: (stage, flags) runs on rank 0 instead of the loop in a dry run.
        choose: (stage, flags) returns on rank 0 the values of flags that are `auto`.
        write_report: (folder of the run, flags) runs last on rank 0, if no supervisor writes the report.
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
        return run_command(lambda: dry_run(stage, resolved)) if own_rank() == 0 else EXIT_DONE
    run_dir = stage.run_folder(resolved.config.run)
    # Before torch, whose import takes seconds: from now on signals count, and the supervisor sees this rank.
    stop = StopRequest(lambda: leave_early(run_dir))
    if supervisor_name() is not None:
        write_outcome(run_dir, own_rank(), None, "running")
    from pipeline.run.run import run_stage

    code = run_stage(stage, resolved, choose=choose, stop=stop)
    if own_rank() == 0 and supervisor_name() is None:
        write_report(run_dir, resolved)
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


def leave(code: int) -> None:
    """End the process of a stage with `code`. Interpreter teardown is skipped: process groups sometimes abort in it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command_flags(
    config_class: type[Group], argv: list[str], *, section: str, prog: str, not_empty: Sequence[str] = ()
) -> Resolved:
    """Return the checked flags of a small command, and print notes on them to stderr.

    A flag of one letter may have one dash.

    Args:
        not_empty: text flags that must not be given as an empty text.
    """
    short = {f"-{name}": f"--{name}" for name in flag_table(config_class) if len(name) == 1}
    resolved = parse(config_class, [short.get(text, text) for text in argv], section=section, prog=prog)
    for name in not_empty:
        if not resolved.origins[name].is_default and not getattr(resolved.config, name).strip():
            raise InputError(f"{dashed(name)}: got an empty text; give one, or leave the flag out")
    say(*(f"note: {line}" for line in resolved.notes))
    return resolved


def command(run: Callable[[list[str], str], None], name: str) -> Callable[..., int]:
    """Return the `main` of a small command: (argv, prog=name) runs its command line and returns the exit code.

    Args:
        run: (argv, prog) checks the arguments and does the work; prog is the name of the program in its help.
    """

    def main(argv: list[str] | None = None, *, prog: str = name) -> int:
        return run_command(lambda: run(stage_arguments(argv), prog))

    return main


def run_command(work: Callable[[], None]) -> int:
    """Run the `work` of a small command and return its exit code. Unexpected errors print their traceback."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # about changes that a user cannot act on
    try:
        outlive_console(needs_output=True)
        let_threads_sleep()
        check_environment()
        raise_on_interrupt()
        work()
        sys.stdout.flush()
    except RunError as error:
        return print_error(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        from pipeline.out_of_memory import is_out_of_memory, memory_line

        if not is_out_of_memory(error):
            raise
        advice = "lower --batch-size or --max-new-tokens where the command has them, or give --dtype bf16"
        return print_error(EnvironmentFault(f"{memory_line(error)}; {advice}"))
    return EXIT_DONE
