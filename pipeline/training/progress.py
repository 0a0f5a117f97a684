"""The progress of a run: logged lines, and on a terminal a progress bar below them."""

import logging
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.console import terminal_width
from pipeline.errors import is_coloured
from pipeline.processes import PIPELINE
from pipeline.run.evaluations import without_rounding

log = logging.getLogger(__name__)

# Rates and the remaining time are computed over the last RATE_STEPS steps, or over RATE_PERIOD_S seconds if longer.
RATE_STEPS, RATE_PERIOD_S = 20, 30.0
# Seconds between two logged lines: a share of the time since the start, between two limits (chosen by hand).
LEAST_PAUSE_S, PAUSE_SHARE, MOST_PAUSE_S = 30.0, 0.05, 300.0
BAR = 10  # characters of the bar


class Progress:
    """The progress of a run: logged lines, and on a terminal a bar below them.

    A line is logged each `every` steps. If that is 0, the first and the last step get a line; between them lines are
    LEAST_PAUSE_S to MOST_PAUSE_S seconds apart.
    """

    def __init__(
        self, label: str, *, total_steps: int, start_step: int, every: int, console: Console | None = None
    ) -> None:
        """Begin after `start_step`; `rlhf train` passes the stage's position in the pipeline by PIPELINE."""
        self._console = console or Terminal(
            stderr=True,
            width=terminal_width(),
            force_terminal=sys.stderr.isatty(),
            no_color=not is_coloured(sys.stderr),
        )
        self._is_followed = console is None  # follow changes of the terminal's width
        self._label, self._total, self._first, self._every = label, total_steps, start_step + 1, every
        position, _, later = os.environ.get(PIPELINE, "").partition(" ")
        self._position, self._later_s = position, float(later or 0)
        self._now = self._console.get_time
        self._began = self._logged = self._now()
        self._ended: deque[tuple[float, int]] = deque()  # when the last steps ended
        # auto_refresh would add a thread beside the one that launches kernels.
        self._bar = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)
        if self._console.is_terminal:
            self._show(start_step, [])
            self._bar.start()

    def update(self, step: int, numbers: Mapping[str, float], *, peak: str = "", split: str = "") -> None:
        """Show `step` of the total, the named numbers, the rate of the last steps and the remaining time.

        Args:
            peak: peak memory, as text.
            split: shares of a step's phases, as text.
        """
        now = self._now()
        is_due = self._is_due(step, now)
        self._ended.append((now, step))
        while len(self._ended) > RATE_STEPS + 1 and self._ended[1][0] <= now - RATE_PERIOD_S:
            self._ended.popleft()
        then, first = self._ended[0]
        speed = (step - first) / (now - then) if now > then else 0.0
        shown = [f"{name} {readable(value)}" for name, value in numbers.items()]
        rate = f"{speed:.3g} steps/s" if speed else ""
        seconds = (self._total - step) / speed if speed else 0.0
        left = f"{duration(seconds)} left" if speed else ""
        pipeline = f"pipeline {duration(seconds + self._later_s)} left" if speed and self._later_s else ""
        parts = [*shown, rate, f"peak {peak}" if peak else "", split, left, pipeline]
        if self._console.is_terminal:
            self._show(step, [*shown[:1], left, *shown[1:2], rate, pipeline, *parts])
        if is_due:
            self._logged = now
            log.info("%s", "  ".join([f"[{self._label}] {step}/{self._total}", *filter(None, parts)]))

    def _show(self, step: int, by_weight: Sequence[str]) -> None:
        """Show as many parts as fit beside the bar, in their order."""
        if self._is_followed:
            self._console.width = terminal_width()
        done = BAR * step // max(self._total, 1)
        bar, count = f"[{f'{self._position} {self._label}'.strip()}] ", f" {step}/{self._total}"
        room, chosen = self._console.width - len(bar) - BAR - len(count), list[str]()
        for part in dict.fromkeys(filter(None, by_weight)):
            if len(part) + 2 <= room:
                chosen.append(part)
                room -= len(part) + 2
        line = Text.assemble(
            (bar, "bold"), ("#" * done, "green"), "-" * (BAR - done), count, *(f"  {x}" for x in chosen)
        )
        line.truncate(self._console.width)
        self._bar.update(line, refresh=self._bar.is_started)

    def _is_due(self, step: int, now: float) -> bool:
        """Return True if the step that has just ended gets a line, so that no pause is longer than MOST_PAUSE_S."""
        if self._every:
            return step % self._every == 0 or step == self._total
        waited, last = now - self._logged, self._ended[-1][0] if self._ended else now
        pause = min(max(LEAST_PAUSE_S, PAUSE_SHARE * (now - self._began)), MOST_PAUSE_S)
        is_late = waited >= LEAST_PAUSE_S and waited + (now - last) > MOST_PAUSE_S  # behind the next step
        return step in (self._first, self._total) or waited >= pause or is_late

    def end(self) -> None:
        """Remove the bar."""
        self._bar.stop()


class Terminal(Console):
    """A console that never hides the cursor, which a killed run could not show again."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def readable(value: float) -> str:
    """Return a number with four significant digits; all digits below a million; 0 for rounding errors."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1_000_000 else f"{without_rounding(value):.4g}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"
