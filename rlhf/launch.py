"""Supervise one stage: `python -m rlhf.launch DEPLOYMENT [launcher flags] STAGE [stage flags]`.

Launch scripts exec this; DEPLOYMENT is the script's name: single_gpu, single_node or multi_node. The supervisor starts
the ranks, forwards signals, reads their outcome (pipeline/run/outcome.py) and leaves no process running.
"""

import sys
from importlib.util import find_spec

from pipeline.console import outlive_console
from pipeline.errors import EXIT_ENVIRONMENT, InputError, RunError, StoppedRun, print_error, say


def main(argv: list[str]) -> int:
    """Run the stage; returns the exit code."""
    outlive_console()
    if find_spec("deepspeed") is None:
        what = f"deepspeed is not installed for {sys.executable}"
        say(f"error: {what}; activate the environment of the project (README.md, Install)")
        return EXIT_ENVIRONMENT
    from pipeline.processes import Signals, wait_for_go

    signals = Signals()
    # Imported after the handlers are installed: the import of all flags delays them by part of a second.
    from pipeline.launching.hosts import take_cpu_without_gpu
    from pipeline.launching.request import parse_request
    from pipeline.preparation.stage_job import run_job
    from rlhf.stages import SECTIONS, stage_of_step

    try:
        try:
            request = parse_request(argv[0], argv[1:])
            stage = stage_of_step(request.step)
        except InputError as error:
            say(f"error: {error}\n{usage(argv[0])}")
            return error.code
        take_cpu_without_gpu(request)
        return run_job(stage, request, signals, sections=SECTIONS)
    except StoppedRun as stop:
        say(str(stop))
        return stop.code
    except RunError as error:
        # `rlhf train` may start this process while the stage before still runs, and sends the go signal once this stage
        # is to run. Without the signal the stage is not to run: its error is not printed.
        return print_error(error) if wait_for_go() else error.code


def usage(deployment: str) -> str:
    """Return the usage of a launch script."""
    from rlhf.stages import STAGES, word_of

    stages = ", ".join(f"{word_of(stage)} ({stage.title})" for stage in STAGES)
    script = f"bash launch/{deployment}.sh"
    return (
        f"usage: {script} [deepspeed launcher flags] STAGE [stage flags]\n"
        f"  STAGE: {stages}; its flags: {script} STAGE --help"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
