"""Heartbeat of a rank: phase and step in a small file, by which the supervisor detects a rank that hangs.

Loops call `beat`, waiting code calls `beat_again`, and work on many rows goes through `RowProgress`, which also logs.
Outside a stage (in tests, in `rlhf chat`) no beat is written. The module imports no torch.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

Phase = Literal["start", "generate", "score", "train", "evaluate", "save"]
INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 5.0

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Beat:
    """The phase and step of a rank when it last beat; `time` is in seconds since 1970."""

    phase: str
    step: int
    time: float


@dataclass(slots=True)
class Heart:
    """The file that this process writes its beats to, and the last beat."""

    file: Path
    phase: Phase
    step: int
    written: float = 0.0


_heart: Heart | None = None


def start(file: Path) -> None:
    """Let `beat` write to `file`; the first phase is "start": reading data and models."""
    global _heart
    _heart = Heart(file, "start", 0)
    with suppress(OSError):
        _heart.file.parent.mkdir(parents=True, exist_ok=True)
    write(_heart)


def end() -> None:
    """Write the exact step of the last beat; from now on `beat` does nothing."""
    global _heart
    if _heart:
        write(_heart)
    _heart = None


def beat(phase: Phase, step: int) -> None:
    """Record that this rank is alive, in `phase` of `step`; written when the phase changes, else at most twice a
    second."""
    if _heart is None:
        return
    changed = phase != _heart.phase
    _heart.phase, _heart.step = phase, step
    if changed or time.monotonic() - _heart.written >= INTERVAL_S:
        write(_heart)


def beat_again() -> None:
    """Beat with the phase and step of the last beat, for code that does not know them."""
    if _heart:
        beat(_heart.phase, _heart.step)


def result_of(future: Future[T], between: Callable[[], None] = lambda: None) -> T:
    """Return the result of work in another thread or process, or raise its error; beats until it is done.

    between: called with each beat; may raise.
    """
    while not future.done():
        wait([future], timeout=INTERVAL_S)
        beat_again()
        between()
    return future.result()


def current_phase() -> Phase:
    return _heart.phase if _heart else "start"


def write(heart: Heart) -> None:
    """Write a beat. On a full disk the beat is lost and the run continues."""
    heart.written = time.monotonic()
    with suppress(OSError):
        replace_json(heart.file, asdict(Beat(heart.phase, heart.step, time.time())))


def read_beat(file: Path) -> Beat | None:
    """Return the last beat in `file`; None if none can be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(file.read_text(encoding="utf-8"))
        return Beat(content["phase"], content["step"], content["time"])
    return None


def replace_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as `replace_text` does."""
    replace_text(file, json.dumps(content) + "\n")


def replace_text(file: Path, text: str) -> None:
    """Write a text beside `file` and rename it, without a flush to disk: a reader gets the old or the new content."""
    temporary = file.with_name(f".{file.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


class RowProgress:
    """Count of finished rows, of `total` if it is known; every PROGRESS_INTERVAL_S it logs their number and rate.

    If it has logged at all, it logs again after the last row.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total, self._of = what, total, "" if total is None else f" of {total:,}"
        self._done = 0
        self._started = self._logged = time.monotonic()

    def add(self, num_rows: int) -> None:
        """Count more rows as done."""
        self._done += num_rows
        beat_again()
        now = time.monotonic()
        is_end = self._done == self._total and self._logged > self._started
        if is_end or now - self._logged >= PROGRESS_INTERVAL_S:
            self._logged = now
            rate = self._done / (now - self._started)
            log.info("%s: %s%s rows, %s rows/s", self._what, f"{self._done:,}", self._of, f"{rate:,.0f}")

    def counted(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield `rows`, each of which counts as done when the next one is requested."""
        for row in rows:
            yield row
            self.add(1)
