"""State of a job's ranks, polled by its supervisor: their outcomes and heartbeats, and their processes on this machine.

Ranks of other machines are visible only through the run's folder. The module imports no torch.
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

QUIET_PHASES = ("start", "save")  # phases that read or write whole models, without heartbeats meanwhile
GONE_S = 5.0  # seconds to wait for the exit code of a process that has ended
WORKING_S = 1.0  # seconds of processor time within a timeout that count as a sign of life in these phases


@dataclass(slots=True)
class RankState:
    """A rank as last polled; times are seconds of the monotonic clock.

    outcome: how the rank ended, or that it runs.
    alive_s: time at which its heartbeat last changed.
    beat: its last heartbeat.
    process: its process, if it runs on this machine.
    died_s: time at which its process was gone without an outcome; None otherwise.
    exit_code: exit code of its process, if it has ended and was started here; below 0: a signal's number.
    """

    outcome: Outcome
    alive_s: float
    beat: Beat = field(default_factory=lambda: Beat("start", 0, 0.0))
    process: Process | None = None
    died_s: float | None = None
    exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        """True if the rank has not ended, as far as this machine can tell."""
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
    cpu_s: processor time of the started ranks at the last call of `used_processor`, in seconds.
    signalled: process ids of the ranks that got SIGTERM.
    """

    run_dir: Path
    supervisor: str
    started: Mapping[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    ranks: dict[int, RankState] = field(default_factory=dict)
    cpu_s: float = 0.0
    signalled: set[int] = field(default_factory=set)

    def poll(self) -> None:
        """Read the outcome, heartbeat and process of each rank."""
        for number in ranks_with_outcome(self.run_dir):
            if outcome := self.outcome_of(number):
                self.ranks.setdefault(number, RankState(outcome, alive_s=time.monotonic())).outcome = outcome
        for number, state in self.ranks.items():
            self.poll_rank(number, state)

    def outcome_of(self, number: int) -> Outcome | None:
        """Return the outcome of a rank of this job; None if it is of another one, such as a refused run by hand."""
        outcome = read_outcome(self.run_dir, number)
        return outcome if outcome and outcome.supervisor == self.supervisor else None

    def poll_rank(self, number: int, state: RankState) -> None:
        """Read one rank's heartbeat and process."""
        beat = read_beat(beat_file(self.run_dir, number))
        if beat and beat != state.beat:
            state.beat, state.alive_s = beat, time.monotonic()
        if not state.runs_locally:
            return
        if process := read_process(state.outcome.pid):
            if process.rss_bytes or state.process is None:  # a process that is ending has no memory any more
                state.process = process
            return
        # The process is gone. It may have written its end since its outcome was read.
        state.outcome = self.outcome_of(number) or state.outcome
        if state.outcome.code is None:
            state.died_s = time.monotonic()
            if number in self.started:
                with suppress(subprocess.TimeoutExpired):  # its threads may take a moment to end
                    state.exit_code = self.started[number].wait(GONE_S)

    def silent_code(self) -> int | None:
        """Return the exit code of a rank that was started here and failed before it wrote an outcome; else None."""
        codes = (process.poll() for rank, process in self.started.items() if rank not in self.ranks)
        return next((code for code in codes if code), None)

    def stop_ranks(self) -> None:
        """Send SIGTERM to each rank of this machine, once."""
        for state in self.running_locally():
            if state.outcome.pid not in self.signalled:
                self.signalled.add(state.outcome.pid)
                send(state.outcome.pid, signal.SIGTERM)

    def running_locally(self) -> list[RankState]:
        """Return the ranks of this machine without an outcome. The process of one with an outcome may still exist."""
        return [state for state in self.ranks.values() if state.runs_locally]

    def has_failed(self) -> bool:
        return any(state.outcome.has_failed or state.died_s is not None for state in self.ranks.values())

    def hung(self, timeout_s: float) -> RankState | None:
        """Return the rank that the others wait for, if some rank gave no sign of life for `timeout_s` (0: never).

        It is a rank whose process is stopped; else the one at the earliest step, and of several the longest silent.
        """
        running = [state for state in self.ranks.values() if state.is_running]
        if not timeout_s or not (silent := [s for s in running if time.monotonic() - s.alive_s > timeout_s]):
            return None
        stopped = [state for state in running if state.process and state.process.is_stopped]
        # The others wait for the one that is furthest behind. While that one reads or writes, silence is no hang.
        if not stopped and min(running, key=progress).beat.phase in QUIET_PHASES and self.used_processor():
            for state in running:
                state.alive_s = time.monotonic()
            return None
        return min(stopped or silent, key=progress)

    def used_processor(self) -> bool:
        """Return True if the job's processes here used WORKING_S of processor time since the last call, or changed."""
        sessions = {process.pid for process in self.started.values()}
        before, self.cpu_s = self.cpu_s, sum(process.cpu_s for process in in_sessions(sessions))
        return abs(self.cpu_s - before) >= WORKING_S


def progress(state: RankState) -> tuple[int, float]:
    return state.beat.step, state.alive_s
