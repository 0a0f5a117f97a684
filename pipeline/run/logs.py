"""Set up the logs of a rank: its own file, the run's log.txt, the console, and the output of libraries."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline import rendezvous
from pipeline.configuration.stage import Stage
from pipeline.console import PrintableFormatter, fitted, lasting_stream
from pipeline.errors import is_coloured, printable
from pipeline.run.layout import rank_log_file

# Logger of errors for files only: the console prints the first error of all ranks, once (pipeline/run/run.py:report).
file_log = logging.getLogger(f"{__name__}.files_only")
WARNING_COLOUR, PLAIN = "\x1b[33m", "\x1b[0m"


class StderrHandler(logging.StreamHandler[Any]):
    """A handler that writes to the current sys.stderr, which a progress bar replaces."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(ReaderFormatter())

    @property
    def stream(self) -> Any:
        return sys.stderr


class ReaderFormatter(logging.Formatter):
    """A formatter of the message alone, wrapped to the terminal, warnings in colour.

    A record with the attribute `drawn` is shown as that text instead.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return what the reader sees of a record."""
        if drawn := getattr(record, "drawn", None):
            return str(drawn)
        text = fitted(printable(super().format(record)))
        is_marked = record.levelno >= logging.WARNING and is_coloured(sys.stderr)
        return f"{WARNING_COLOUR}{text}{PLAIN}" if is_marked else text


def start_logging(run_dir: Path, rank: int, stage: Stage, *, verbose: bool) -> None:
    """Log to log/rank-<r>.txt; rank 0 also to log.txt and, without timestamps, to stderr.

    verbose: all that libraries log goes to log.txt and stderr too, not only their errors.
    """
    import transformers

    def is_shown(record: logging.LogRecord) -> bool:
        is_ours = record.name.partition(".")[0] in ("pipeline", "rlhf", stage.package)
        return is_ours or verbose or record.levelno >= logging.ERROR

    rank_file = rank_log_file(run_dir, rank)
    rank_file.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(rank_file, encoding="utf-8"), StderrHandler()]
    if rank == 0:
        handlers.append(logging.FileHandler(run_dir / "log.txt", encoding="utf-8"))
        handlers[1].addFilter(lambda record: is_shown(record) and record.name != file_log.name)
        handlers[2].addFilter(is_shown)
    else:
        handlers[1].addFilter(is_wait_here)
    for handler in handlers:
        if not isinstance(handler, StderrHandler):
            handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    transformers.utils.logging.disable_progress_bar()


def is_wait_here(record: logging.LogRecord) -> bool:
    """Return True for a line that a host without rank 0 prints as well: which ranks its own ranks wait for."""
    return record.name == rendezvous.__name__ and record.levelno >= logging.WARNING


@contextmanager
def libraries_print_to(file: Path) -> Iterator[None]:
    """Redirect to `file` all that libraries print and warn of: from Python, C++, and compilers that they run.

    sys.stderr still writes to the console. A stream that a test has put in its place is not redirected.
    """
    reader, descriptors = sys.stderr, [os.dup(number) for number in (1, 2)]
    if is_descriptor(reader, 2):
        sys.stderr = lasting_stream(descriptors[1], reader)
    sys.stdout.flush()
    log_file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    lead(log_file, log_file)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for stream in (sys.stdout, sys.stderr, reader):
            stream.flush()
        sys.stderr = reader
        lead(*descriptors)
        for descriptor in (log_file, *descriptors):
            os.close(descriptor)


def lead(stdout: int, stderr: int) -> None:
    """Redirect standard output and error to these descriptors, for child processes and libraries in C too."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


def is_descriptor(stream: Any, number: int) -> bool:
    """Return True if the stream writes to this descriptor."""
    try:
        return bool(stream.fileno() == number)
    except (OSError, ValueError):
        return False
