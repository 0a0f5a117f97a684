"""State of a job's ranks, polled by its supervisor: their outcomes and beats, their processes on this machine.

Ranks of other machines are seen through the run's folder only. Imports no torch.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.heartbeat import Beat, read_beat
from pipeline.processes import Process, in_session, read_process
from pipeline.run.layout import beat_file
from pipeline.run.outcome import Outcome, ranks_with_outcome, read_outcome

QUIET_PHASES = ("start", "save")  # reading and writing whole models has no steps that could beat
WORKING_S = 1.0  # processor time within a timeout that counts as a sign of life in these phases


@dataclass(slots=True)
class RankState:
    """A rank as last seen. `alive_s` is when its beat was last seen to change, `died_s` when it was seen gone.

    Both are seconds of the monotonic clock; `died_s` is None while it lives, and if it wrote how it ended.
    """

    outcome: Outcome
    alive_s: float
    beat: Beat = field(default_factory=lambda: Beat("start", 0, 0.0))
    process: Process | None = None
    died_s: float | None = None

    @property
    def is_running(self) -> bool:
        """True if it has not ended, as far as this machine can tell."""
        return self.outcome.code is None and self.died_s is None

    @property
    def runs_locally(self) -> bool:
        return self.is_running and self.outcome.is_local


@dataclass(slots=True)
class RankWatch:
    """The ranks of one job, those that `supervisor` started, as the last poll saw them.

    `session` is the launcher's, to which the ranks of this machine belong.
    """

    run_dir: Path
    supervisor: str
    session: int
    ranks: dict[int, RankState] = field(default_factory=dict)
    cpu_s: float = 0.0  # of the session's processes, when `used_processor` was called last

    def poll(self) -> None:
        """Read the outcome, beat and process of each rank."""
        for number in ranks_with_outcome(self.run_dir):
            if outcome := self.own_outcome(number):
                self.ranks.setdefault(number, RankState(outcome, alive_s=time.monotonic())).outcome = outcome
        for number, state in self.ranks.items():
            self.poll_rank(number, state)

    def own_outcome(self, number: int) -> Outcome | None:
        """Return the outcome of a rank of this job; a run by hand in this folder, which was refused, may leave one."""
        outcome = read_outcome(self.run_dir, number)
        return outcome if outcome and outcome.supervisor == self.supervisor else None

    def poll_rank(self, number: int, state: RankState) -> None:
        """Read one rank's beat and process."""
        beat = read_beat(beat_file(self.run_dir, number))
        if beat and beat != state.beat:
            state.beat, state.alive_s = beat, time.monotonic()
        if not state.runs_locally:
            return
        if process := read_process(state.outcome.pid):
            if process.rss_bytes or state.process is None:  # one that is ending holds no memory any more
                state.process = process
            return
        # Gone: it may have written its end since its outcome was read.
        state.outcome = self.own_outcome(number) or state.outcome
        if state.outcome.code is None:
            state.died_s = time.monotonic()

    def running_locally(self) -> list[RankState]:
        """Return the ranks of this machine that have not ended; one with an outcome may still take a moment to go."""
        return [state for state in self.ranks.values() if state.runs_locally]

    def has_failed(self) -> bool:
        return any(state.outcome.has_failed or state.died_s is not None for state in self.ranks.values())

    def hung(self, timeout_s: float) -> RankState | None:
        """Return the rank that keeps the others waiting, once one has given no sign of life for `timeout_s` (0: never).

        It is a rank whose process is stopped, else the one at the earliest step, else the one silent for longest.
        """
        running = [state for state in self.ranks.values() if state.is_running]
        if not timeout_s or not (silent := [s for s in running if time.monotonic() - s.alive_s > timeout_s]):
            return None
        held = [state for state in running if state.process and state.process.is_stopped]
        # The others wait for the one that is furthest behind: while that reads or writes, silence is no hang.
        if not held and min(running, key=progress).beat.phase in QUIET_PHASES and self.used_processor():
            for state in running:
                state.alive_s = time.monotonic()
            return None
        return min(held or silent, key=progress)

    def used_processor(self) -> bool:
        """Return True if the job's processes on this machine used the processor since the last call, or changed."""
        before, self.cpu_s = self.cpu_s, sum(process.cpu_s for process in in_session(self.session))
        return abs(self.cpu_s - before) >= WORKING_S


def progress(state: RankState) -> tuple[int, float]:
    return state.beat.step, state.alive_s
