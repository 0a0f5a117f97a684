"""Remember SIGTERM and SIGINT until the loop checks for a stop request, between two steps.

Torch is imported only by a loop's check, so that signals count before torch is imported.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from pipeline import heartbeat
from pipeline.processes import REPEAT_S, is_alive, send

if TYPE_CHECKING:
    from pipeline.dist import World


class StopRequest:
    """A stop request by SIGTERM or SIGINT that the loop checks. A second signal after 2 s ends the process.

    Before the loop begins there is nothing to save, and the first signal ends the process. The loop begins with the
    first call of `is_set`, or with the first heartbeat (pipeline/heartbeat.py) of a phase other than "start".
    """

    def __init__(self, leave_early: Callable[[], None] | None = None) -> None:
        """Install the handlers. `leave_early` ends the process before the loop begins; None: signals wait for it."""
        self._first: float | None = None
        self._in_loop = leave_early is None
        self._leave_early = leave_early
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is not None and now - self._first > REPEAT_S:
            os._exit(128 + number)
        self._first = self._first or now
        if self._leave_early and not self._in_loop and heartbeat.current_phase() == "start":
            self._leave_early()

    def is_set(self) -> bool:
        """Return True if this rank was asked to stop."""
        self._in_loop = True
        return self._first is not None

    def is_set_on_any_rank(self, world: "World") -> bool:
        """Return True if any rank was asked to stop. A collective."""
        from pipeline import dist

        return dist.max_over_ranks(float(self.is_set()), world.device) > 0


def quit_now(message: str, code: int) -> None:
    """End the process from a signal handler, where a normal print and exit are not safe."""
    if message:
        # Not descriptor 2, which may write to a log file (logs.py).
        os.write(sys.stderr.fileno() if sys.stderr else 2, f"{message}\n".encode())
    os._exit(code)


def stop_without(supervisor: int) -> None:
    """Send this process a stop request once its supervisor has died, because nobody else would end it."""

    def watch() -> None:
        while is_alive(supervisor):
            time.sleep(1.0)
        send(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="supervisor watch", daemon=True).start()
