"""Start and end a small command that is no stage, and leave a process. The module imports no torch."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import parse, stage_arguments
from pipeline.configuration.groups import Group
from pipeline.configuration.resolved import Resolved
from pipeline.console import outlive_console, raise_on_interrupt
from pipeline.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EnvironmentFault,
    InputError,
    RunError,
    dashed,
    print_error,
    say,
)
from pipeline.processes import let_threads_sleep
from pipeline.rendezvous import check_environment


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

    Where the module of `run` is the program (`python -m rlhf.chat`), run it and end with that code.

    Args:
        run: (argv, prog) checks the arguments and does the work; prog is the name of the program in its help.
    """

    def main(argv: list[str] | None = None, *, prog: str = name) -> int:
        return run_command(lambda: run(stage_arguments(argv), prog))

    if run.__module__ == "__main__":
        module = getattr(sys.modules["__main__"].__spec__, "name", "")
        sys.exit(main(prog=f"python -m {module}"))
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
