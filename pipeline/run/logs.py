"""The logs of a rank: its own file, the run's log.txt, what its reader sees, and where libraries print meanwhile."""

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

# Logs to files only: the console prints the first cause of all ranks, once (pipeline/run/run.py:report).
file_log = logging.getLogger(f"{__name__}.files_only")
WARNING_COLOUR, PLAIN = "\x1b[33m", "\x1b[0m"


class StderrHandler(logging.StreamHandler[Any]):
    """A handler that writes to whatever sys.stderr is at that time: a progress bar replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(ReaderFormatter())

    @property
    def stream(self) -> Any:
        return sys.stderr


class FileFormatter(PrintableFormatter):
    """Lines with time, level and module."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")


class ReaderFormatter(logging.Formatter):
    """The message alone, as wide as a terminal, warnings in colour; `drawn` of a record is shown in its place."""

    def format(self, record: logging.LogRecord) -> str:
        """Return what the reader sees of a record."""
        if drawn := getattr(record, "drawn", None):
            return str(drawn)
        text = fitted(printable(super().format(record)))
        is_marked = record.levelno >= logging.WARNING and is_coloured(sys.stderr)
        return f"{WARNING_COLOUR}{text}{PLAIN}" if is_marked else text


def start_logging(run_dir: Path, rank: int, stage: Stage, *, verbose: bool) -> None:
    """Log to log/rank-<r>.txt; rank 0 also to log.txt and, without timestamps, to stderr.

    verbose: what libraries log reaches the latter two, too, not only their errors.
    """
    import transformers

    def is_wanted(record: logging.LogRecord) -> bool:
        is_ours = record.name.partition(".")[0] in ("pipeline", "rlhf", stage.package)
        return is_ours or verbose or record.levelno >= logging.ERROR

    rank_file = rank_log_file(run_dir, rank)
    rank_file.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(rank_file, encoding="utf-8"), StderrHandler()]
    if rank == 0:
        handlers.append(logging.FileHandler(run_dir / "log.txt", encoding="utf-8"))
        handlers[1].addFilter(lambda record: is_wanted(record) and record.name != file_log.name)
        handlers[2].addFilter(is_wanted)
    else:
        handlers[1].addFilter(is_wait_here)
    for handler in handlers:
        if not isinstance(handler, StderrHandler):
            handler.setFormatter(FileFormatter())
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    transformers.utils.logging.disable_progress_bar()


def is_wait_here(record: logging.LogRecord) -> bool:
    """Return True for a line that the user of a host without rank 0 should see: for which ranks its ranks wait."""
    return record.name == rendezvous.__name__ and record.levelno >= logging.WARNING


@contextmanager
def libraries_print_to(file: Path) -> Iterator[None]:
    """While this lasts, what libraries print and warn of goes to `file`: from Python, C++, and compilers that they run.

    sys.stderr stays the reader's. A stream that a test has put in its place stays as it is.
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
    """Make standard output and error, as children and libraries in C know them, those descriptors."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


def is_descriptor(stream: Any, number: int) -> bool:
    """Tell whether a stream writes to this descriptor."""
    try:
        return bool(stream.fileno() == number)
    except (OSError, ValueError):
        return False
