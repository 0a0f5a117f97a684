"""Lines in the log, and beats, while work on many rows goes on. Imports no torch."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from pipeline.heartbeat import beat_again

log = logging.getLogger(__name__)

T = TypeVar("T")

INTERVAL_S = 5.0


class Progress:
    """Rows that are done, of `total` where it is known; a line every INTERVAL_S seconds tells number and rate."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._of = what, "" if total is None else f" of {total:,}"
        self._done = 0
        self._started = self._told = time.monotonic()

    def add(self, num_rows: int) -> None:
        """Count more rows as done."""
        self._done += num_rows
        beat_again()
        now = time.monotonic()
        if now - self._told >= INTERVAL_S:
            self._told = now
            rate = self._done / (now - self._started)
            log.info("%s: %s%s rows, %s rows/s", self._what, f"{self._done:,}", self._of, f"{rate:,.0f}")

    def counted(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield `rows`, each of which is done when the next one is asked for."""
        for row in rows:
            yield row
            self.add(1)
