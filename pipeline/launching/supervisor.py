"""Supervisor of one stage's launcher: `python -m pipeline.launching.supervisor MODULE N WORD... COMMAND...`.

MODULE is a stage's, the N words are its flags, the rest is the launcher's command. DeepSpeed's launcher turns signals
into exit code 1, forwards none, ends ranks that still save and does not notice a rank that hangs; so this process
signals the ranks itself, reads how they ended (pipeline/run/outcome.py) and leaves no process behind.
"""

import sys

from pipeline.console import outlive_console
from pipeline.errors import RunError, StoppedRun, print_error
from pipeline.processes import Signals


def main(argv: list[str]) -> int:
    """Run the job; returns its exit code."""
    outlive_console()
    signals = Signals()
    # Imported once the handlers are installed: reading all flags takes a good part of a second.
    from pipeline.launching.job import run_job

    try:
        module, count, rest = argv[0], int(argv[1]), argv[2:]
        return run_job(module, rest[:count], rest[count:], signals)
    except StoppedRun as stop:
        print(stop, file=sys.stderr)
        return stop.code
    except RunError as error:
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
