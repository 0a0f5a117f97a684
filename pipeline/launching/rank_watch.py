"""State of a job's ranks, polled by its supervisor: their outcomes and beats, their processes on this machine.

Ranks of other machines are seen through the run's folder only. Imports no torch.
"""

import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.heartbeat import Beat, read_beat
from pipeline.processes import Process, in_sessions, read_process, send
from pipeline.run.layout import beat_file
from pipeline.run.outcome import Outcome, ranks_with_outcome, read_outcome

QUIET_PHASES = ("start", "save")  # reading and writing whole models has no steps that could beat
GONE_S = 5.0  # longest wait for the exit code of a process that is gone
WORKING_S = 1.0  # processor time within a timeout that counts as a sign of life in these phases


@dataclass(slots=True)
class RankState:
    """A rank as last seen; times are seconds of the monotonic clock.

    outcome: how it ended, or that it runs.
    alive_s: when its beat was last seen to change.
    beat: its last sign of life.
    process: its process, if it is one of this machine.
    died_s: when its process was seen gone; None while it lives, and if it wrote how it ended.
    exit_code: that of its process once it is gone, if it was started here; below 0: a signal's number.
    """

    outcome: Outcome
    alive_s: float
    beat: Beat = field(default_factory=lambda: Beat("start", 0, 0.0))
    process: Process | None = None
    died_s: float | None = None
    exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        """True if it has not ended, as far as this machine can tell."""
        return self.outcome.code is None and self.died_s is None

    @property
    def runs_locally(self) -> bool:
        return self.is_running and self.outcome.is_local


@dataclass(slots=True)
class RankWatch:
    """The ranks of one job as the last poll saw them.

    run_dir: the run's folder.
    supervisor: the name of the job's supervisor, in the outcomes of its ranks.
    started: the ranks' processes that this process started.
    ranks: the ranks that have written an outcome.
    cpu_s: processor time of the started ranks when `used_processor` was called last.
    signalled: process ids of the ranks that got SIGTERM.
    """

    run_dir: Path
    supervisor: str
    started: Mapping[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    ranks: dict[int, RankState] = field(default_factory=dict)
    cpu_s: float = 0.0
    signalled: set[int] = field(default_factory=set)

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
            if number in self.started:
                with suppress(subprocess.TimeoutExpired):  # its threads may take a moment to end
                    state.exit_code = self.started[number].wait(GONE_S)

    def silent_code(self) -> int | None:
        """Return the exit code, but 0, of a rank that was started here and ended before it wrote anything."""
        codes = (process.poll() for rank, process in self.started.items() if rank not in self.ranks)
        return next((code for code in codes if code), None)

    def stop_ranks(self) -> None:
        """Send SIGTERM to each rank of this machine, once."""
        for state in self.running_locally():
            if state.outcome.pid not in self.signalled:
                self.signalled.add(state.outcome.pid)
                send(state.outcome.pid, signal.SIGTERM)

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
        stopped = [state for state in running if state.process and state.process.is_stopped]
        # The others wait for the one that is furthest behind: while that reads or writes, silence is no hang.
        if not stopped and min(running, key=progress).beat.phase in QUIET_PHASES and self.used_processor():
            for state in running:
                state.alive_s = time.monotonic()
            return None
        return min(stopped or silent, key=progress)

    def used_processor(self) -> bool:
        """Return True if the job's processes on this machine used the processor since the last call, or changed."""
        sessions = {process.pid for process in self.started.values()}
        before, self.cpu_s = self.cpu_s, sum(process.cpu_s for process in in_sessions(sessions))
        return abs(self.cpu_s - before) >= WORKING_S


def progress(state: RankState) -> tuple[int, float]:
    return state.beat.step, state.alive_s
