"""The end of a small command (chat.py, prompt_eval.py): expected errors become one line and an exit code."""

import os
import sys
from collections.abc import Callable

from pipeline.errors import EXIT_DONE, RunError

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
