"""One supervised job: start its ranks here or by an agent on each host, watch them, stop them, and report the outcome.

rank_watch.py reads the state of the ranks. verdict.py derives the exit code.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from pipeline import errors
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.errors import say
from pipeline.launching.hosts import address_of, starts_by_host
from pipeline.launching.machine import free_port, wait_for_free_port
from pipeline.launching.rank_watch import RankWatch
from pipeline.launching.ranks import POLL_S, Started, kill_ranks, start_ranks
from pipeline.launching.remote_host import passed_on
from pipeline.launching.remote_ranks import RemoteRanks, port_of
from pipeline.launching.request import LaunchRequest
from pipeline.launching.verdict import JobStatus, Verdict, hang_verdict, verdict_on
from pipeline.processes import WAITS, Signals, free_memory, give_go, num_oom_kills
from pipeline.run.outcome import SUPERVISOR

RANKS_PER_POLL = 64  # each further 64 ranks lengthen the pause between polls, which read a file of each rank
SETTLE_S = 2.0  # seconds after a rank's failure, in which the others write their outcomes
AGENTS_SETTLE_S = 10.0  # the same for ranks of other hosts, whose outcomes an agent sends
ENDING_S = 15.0  # seconds that a rank may outlive one that has stopped: all stop together, after the save


def start_here(
    request: LaunchRequest, module: str, environment: Mapping[str, str], output: IO[bytes] | None = None
) -> dict[int, "subprocess.Popen[bytes]"]:
    """Start the ranks of this host. With several hosts (--launcher none), each host is started by hand."""
    port, index = request.master_port or free_port(), 0
    if not request.is_on_one_machine:
        port, index = port_of(request), request.node_rank
        environment = {**environment, **passed_on(environment)}
    starts = starts_by_host(request, module, port)
    start = replace(list(starts.values())[index], address=address_of(request, list(starts)))
    return start_ranks(start, environment, output)


def start_early(stage: Stage, request: LaunchRequest) -> Started:
    """Start the ranks of one machine early: they import their modules, then wait for the go signal of a `Job`."""
    return start_here(request, f"{stage.package}.main", rank_variables({WAITS: "1"}))


def rank_variables(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks that this process supervises, with `more` variables."""
    # torch's C++ warnings report connections to a rank that has ended, each with a page of addresses.
    name = f"{os.getpid()}@{socket.gethostname()}"
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **more, SUPERVISOR: name}


class Job:
    """The ranks of one start of a stage, and their state."""

    def __init__(
        self,
        run_dir: Path,
        stage: Stage,
        request: LaunchRequest,
        resolved: Resolved,
        *,
        signals: Signals,
        variables: Mapping[str, str],
        output: IO[bytes] | None = None,
        is_again: bool,
        early: Started | None = None,
    ) -> None:
        """Start the ranks, or give those of `start_early` the go signal.

        Args:
            is_again: the job was started before, and its ranks may still hold the port.
            early: ranks of `start_early`; None: start them now.

        Raises:
            EnvironmentFault: the port is taken, or a host does not answer.
        """
        module, environment = f"{stage.package}.main", rank_variables(variables)
        self._oom_kills = num_oom_kills()
        self._signals, self._timeout_s = signals, resolved.config.run.rank_timeout_s
        self._remote: RemoteRanks | None = None
        self._started: Started = {}
        if request.has_agents:
            self._remote = RemoteRanks(request, module, run_dir, environment, signals=signals, output=output)
            self._remote.start()
        else:
            if request.is_on_one_machine and request.master_port:
                wait_for_free_port(request.master_port, ENDING_S if is_again else 0.0)
            self._started = early or start_here(request, module, environment, output)
            for process in self._started.values():
                give_go(process)
        self._watch = RankWatch(run_dir, environment[SUPERVISOR], self._started)
        self._has_said_stop = False
        self._memory = ""
        self._first_end_s: float | None = None

    @property
    def got_stop_signal(self) -> bool:
        """True once this process got a signal that ends the job."""
        return self._signals.first is not None

    def supervise(self, on_poll: Callable[[], None] = lambda: None) -> Verdict:
        """Watch the ranks until the job has ended or must be ended; processes may still run then.

        Args:
            on_poll: a function that is called at each poll, and returns at once.
        """
        while True:
            self.poll()
            on_poll()
            if not self._watch.has_failed():
                self._memory = free_memory()  # once a rank has failed, the memory that it lacked is free again
            if verdict := self.ending():
                return verdict
            time.sleep(max(POLL_S, POLL_S * len(self._watch.ranks) / RANKS_PER_POLL))

    def poll(self) -> None:
        """Read the state of the ranks."""
        if self._remote:
            self._remote.poll()
        self._watch.poll()

    def ending(self) -> Verdict | None:
        """Return the verdict if the job is to end now, else None; forward a stop request."""
        if self._signals.second is not None:
            return Verdict(128 + self._signals.second, ["second signal: killed all processes of this stage"])
        if self.got_stop_signal and not self.forward_stop():
            return self.verdict()
        if self._watch.has_failed() or self.silent_code() is not None:
            return self.after_failure()
        if hung := self._watch.hung(self._timeout_s):
            return hang_verdict(hung, self.status())
        if self.have_ended():
            self.poll()
            return self.verdict()
        return self.verdict() if self.is_straggling() else None

    def silent_code(self) -> int | None:
        """Return the exit code of a rank that failed before it wrote an outcome; None if there is no such rank."""
        return self._remote.silent_code() if self._remote else self._watch.silent_code()

    def have_ended(self) -> bool:
        """Return True if the processes of all ranks have ended."""
        if self._remote:
            return self._remote.have_ended()
        return all(process.poll() is not None for process in self._started.values())

    def forward_stop(self) -> bool:
        """Send the ranks a stop request; return False if no rank has started yet."""
        if not self._watch.ranks:
            return False
        if not self._has_said_stop:
            self._has_said_stop = True
            say("stopping, with a checkpoint if training has started; a second signal kills at once")
        if self._remote:
            self._remote.stop()
        else:
            self._watch.stop_ranks()
        return True

    def after_failure(self) -> Verdict:
        """Let the other ranks write their outcomes; return the verdict."""
        end = time.monotonic() + (AGENTS_SETTLE_S if self._remote else SETTLE_S)
        while self.may_say_more() and time.monotonic() < end:
            time.sleep(POLL_S / 2)
            self.poll()
        return self.verdict()

    def may_say_more(self) -> bool:
        """Return True while a rank here still runs, or while all known errors follow from that of another host."""
        failed = [state for state in self._watch.ranks.values() if state.outcome.has_failed]
        follows = self.silent_code() is None and all(state.outcome.secondary for state in failed)
        return bool(self._watch.running_locally()) or (self._remote is not None and follows)

    def is_straggling(self) -> bool:
        """Return True if a rank stopped long ago and others wait for it in a collective, which blocks signals."""
        codes = {state.outcome.code for state in self._watch.ranks.values()}
        if errors.EXIT_STOPPED not in codes or not self._watch.running_locally():
            return False
        self._first_end_s = self._first_end_s or time.monotonic()
        return time.monotonic() - self._first_end_s > ENDING_S

    def verdict(self) -> Verdict:
        return verdict_on(list(self._watch.ranks.values()), self.status())

    def status(self) -> JobStatus:
        """Return the state of the job besides its ranks."""
        return JobStatus(
            self._watch.run_dir,
            self.silent_code(),
            got_stop_signal=self.got_stop_signal,
            memory=self._memory,
            oom_kills=num_oom_kills() - self._oom_kills,
        )

    def kill(self) -> None:
        """End all processes that the job started."""
        if self._remote:
            self._remote.close()
        kill_ranks(self._started)
