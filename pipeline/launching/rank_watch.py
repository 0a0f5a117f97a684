"""What a supervisor knows of the ranks: their outcomes and beats in the run's folder, their processes on this machine.

Imports no torch.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.processes import Process, in_session, read_process
from pipeline.run.heartbeat import Beat, read_beat
from pipeline.run.outcome import Outcome, ranks_with_outcome, read_outcome

QUIET_PHASES = ("start", "save")  # reading and writing whole models has no steps that could beat
WORKING_S = 1.0  # processor time within a timeout that counts as a sign of life in these


@dataclass(slots=True)
class RankState:
    """A rank as last seen. `heard` is when its beat was last seen to change, `died` when it was seen gone.

    Both are of the monotonic clock; `died` is None while it lives, and where it said how it ended.
    """

    outcome: Outcome
    heard: float
    beat: Beat = field(default_factory=lambda: Beat("start", 0, 0.0))
    process: Process | None = None
    died: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as this machine can tell."""
        return self.outcome.code is None and self.died is None

    @property
    def runs_here(self) -> bool:
        return self.is_running and self.outcome.is_here

    @property
    def has_failed(self) -> bool:
        return self.outcome.has_failed or self.died is not None


class RankWatch:
    """Looks at the ranks of one job; those of other machines are seen through the run's folder alone."""

    def __init__(self, run_dir: Path, supervisor: str, session: int) -> None:
        """`session` is the launcher's, to which the ranks belong."""
        self.ranks: dict[int, RankState] = {}
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._session = session
        self._worked_s = 0.0

    def look(self) -> None:
        """Read all again."""
        for number in ranks_with_outcome(self._run_dir):
            said = read_outcome(self._run_dir, number)
            # A run by hand in this folder, which was refused, may have left its own.
            if said and said.supervisor == self._supervisor:
                state = self.ranks.setdefault(number, RankState(said, heard=time.monotonic()))
                state.outcome = said
        for number, state in self.ranks.items():
            self.look_at(number, state)

    def look_at(self, number: int, state: RankState) -> None:
        """One rank's beat and process."""
        beat = read_beat(self._run_dir, number)
        if beat and beat != state.beat:
            state.beat, state.heard = beat, time.monotonic()
        if not state.runs_here:
            return
        if process := read_process(state.outcome.pid):
            state.process = process
            return
        # Gone: it may have said how since its outcome was read.
        said = read_outcome(self._run_dir, number)
        if said and said.supervisor == self._supervisor:
            state.outcome = said
        if state.outcome.code is None:
            state.died = time.monotonic()

    def running_here(self) -> list[RankState]:
        """The ranks of this machine that have not ended; one that said how it ended may still take a moment to go."""
        return [state for state in self.ranks.values() if state.runs_here]

    def has_failed(self) -> bool:
        return any(state.has_failed for state in self.ranks.values())

    def hung(self, timeout_s: float) -> RankState | None:
        """The rank that keeps the others waiting, once one has given no sign of life for `timeout_s` (0: never).

        A rank whose process is stopped, else the one that is furthest behind, else the one heard of the longest ago.
        """
        running = [state for state in self.ranks.values() if state.is_running]
        if not timeout_s or not (silent := [s for s in running if time.monotonic() - s.heard > timeout_s]):
            return None
        held = [state for state in running if state.process and state.process.is_stopped]
        # The others wait for the one that is furthest behind: while it reads or writes, they need not be heard of.
        if not held and min(running, key=progress).beat.phase in QUIET_PHASES and self.has_worked():
            for state in running:
                state.heard = time.monotonic()
            return None
        return min(held or silent, key=progress)

    def has_worked(self) -> bool:
        """Whether the job's processes here used the processor since this was asked last, or have changed."""
        before, self._worked_s = self._worked_s, sum(process.cpu_s for process in in_session(self._session))
        return abs(self._worked_s - before) >= WORKING_S


def progress(state: RankState) -> tuple[int, float]:
    return state.beat.step, state.heard


def numbers_of(states: Iterable[RankState]) -> str:
    return ", ".join(str(number) for number in sorted(state.outcome.rank for state in states))
