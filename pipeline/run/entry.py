"""The way into a stage from the command line: flags first (in milliseconds), then torch, then the stage's loop."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.configuration.flags import parse
from pipeline.errors import EXIT_DONE, EXIT_STOPPED, InputError, RunError
from pipeline.run.layout import run_folder
from pipeline.run.outcome import exit_code, own_rank, supervisor_name, write_outcome
from pipeline.run.stop_request import StopRequest, quit_now

EARLY = "stopped before the first step, with nothing to save; the same command starts again"

_run_dir: Path | None = None  # of the stage that was entered last


def enter(config_class: Any, stage: str, loop: str, argv: list[str] | None) -> int:
    """Parse the flags of `stage` (sft, reward, ppo) and run `loop`, the name of a module with `train(run, config)`.

    Returns the exit code of design.md, section 3.
    """
    global _run_dir
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        resolved = parse(config_class, words, section=stage, prog=f"python -m {loop.rpartition('.')[0]}.main")
    except InputError as error:
        if own_rank() == 0:
            print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.code
    _run_dir = run_dir = run_folder(resolved.config.run, stage)
    # Before torch, which takes seconds to import: signals count from here on, and a supervisor knows of this rank.
    stop = StopRequest(lambda: leave_early(run_dir))
    if supervisor_name() is not None:
        write_outcome(run_dir, own_rank(), None, "running")
    from pipeline.run.run import run_stage

    return run_stage(resolved, stage=stage, train=lambda: importlib.import_module(loop).train, stop=stop)


def leave_early(run_dir: Path) -> None:
    """End a rank that was asked to stop while it reads data and models."""
    if supervisor_name() is not None:
        write_outcome(run_dir, own_rank(), EXIT_STOPPED, EARLY)
        quit_now("", exit_code(EXIT_STOPPED, run_dir))
    quit_now(EARLY if own_rank() == 0 else "", EXIT_STOPPED)


def leave(code: int) -> None:
    """End the process with `code`. Interpreter teardown is skipped: with process groups it aborts now and then."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if _run_dir is None else exit_code(code, _run_dir))


EXIT_INTERRUPTED = 130  # the shell's convention for SIGINT


def run_command(work: Callable[[], None]) -> int:
    """Do `work` and return the exit code. A fault of ours keeps its traceback."""
    try:
        work()
        sys.stdout.flush()
    except RunError as error:
        print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has read enough. The interpreter must not flush into the closed pipe at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE
