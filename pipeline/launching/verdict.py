"""The verdict on a job: one exit code and its last lines, from the outcomes of its ranks. It imports no torch."""

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import errors
from pipeline.launching.rank_watch import RankState
from pipeline.out_of_memory import Halved
from pipeline.run.layout import rank_log_file

# Exit codes of errors, the most specific first; 1 means every other error.
INFORMATIVE = (errors.EXIT_INPUT, errors.EXIT_ENVIRONMENT, errors.EXIT_DIVERGED, errors.EXIT_NO_CHECKPOINT)
# Codes of a rank that has printed why it ended: the supervisor adds no line.
SILENT_CODES = (*INFORMATIVE, errors.EXIT_STOPPED)
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code of a job, and the lines to print.

    halved: the smaller batches to start the job again with, if it ran out of memory; else empty.
    """

    code: int
    lines: list[str]
    halved: Halved = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job besides its ranks.

    run_dir: the run's folder.
    silent_code: exit code of a rank that failed before it wrote an outcome; None if there is no such rank.
    got_stop_signal: the supervisor got a signal.
    memory: free memory, in words.
    oom_kills: number of processes that the kernel killed for lack of memory during the run.
    """

    run_dir: Path
    silent_code: int | None
    got_stop_signal: bool
    memory: str
    oom_kills: int


def verdict_on(ranks: Sequence[RankState], job: JobStatus) -> Verdict:
    """Return the verdict by the first of these causes that applies.

    An error of a rank's own; a rank's death; a rank that ended before it wrote an outcome; a stop; an error that only
    followed from another rank's end (`secondary`); a rank without an outcome. A rank that still runs counts for the
    last one alone: the supervisor is about to kill it.
    """
    failed = sorted((s for s in ranks if s.outcome.has_failed), key=lambda s: s.outcome.time)
    if causes := [state for state in failed if not state.outcome.secondary]:
        return error_verdict(causes, ranks, job)
    if dead := [state for state in ranks if state.died_s is not None]:
        first = min(dead, key=lambda state: state.died_s or 0.0)
        return Verdict(errors.EXIT_FAULT, rank_lines(first, cause_of_death(first, job), job))
    if not ranks or job.silent_code is not None:
        return silent_verdict(job)
    if stopped := [s for s in ranks if s.outcome.code == errors.EXIT_STOPPED]:
        return Verdict(errors.EXIT_STOPPED, stopped[0].outcome.message.splitlines())
    if failed:
        return error_verdict(failed, ranks, job)
    if left := [state for state in ranks if state.outcome.code is None]:
        if job.got_stop_signal and len(left) == len(ranks):
            return Verdict(errors.EXIT_STOPPED, ["stopped before the first step; the same command starts again"])
        numbers = ", ".join(map(str, sorted(state.outcome.rank for state in left)))
        return Verdict(errors.EXIT_FAULT, rank_lines(left[0], f"rank {numbers} ended without an outcome", job))
    return Verdict(errors.EXIT_DONE, [])


def silent_verdict(job: JobStatus) -> Verdict:
    """Return the verdict on a job in which a rank ended before it wrote an outcome, or no rank wrote one."""
    if job.got_stop_signal:
        return Verdict(errors.EXIT_STOPPED, ["stopped before any rank had started"])
    code = job.silent_code or 0
    if code in SILENT_CODES:
        return Verdict(code, [])
    how = f"ended with {code}" if code >= 0 else f"was {killed_by(code)}"
    return Verdict(errors.EXIT_FAULT, [f"error: a rank {how} before it had started; its output is above"])


def error_verdict(failed: Sequence[RankState], ranks: Collection[RankState], job: JobStatus) -> Verdict:
    """Return the verdict with the earliest error, shown once, and the most specific exit code."""
    first, codes = failed[0], {state.outcome.code for state in failed}
    code = next((code for code in INFORMATIVE if code in codes), errors.EXIT_FAULT)
    message = first.outcome.message
    if first.outcome.code == errors.EXIT_FAULT:
        # The traceback is in the log.
        return Verdict(code, rank_lines(first, message, job))
    lines = [f"error: {line}" for line in message.splitlines()]
    if any(state.outcome.message != message for state in ranks):
        lines += rank_lines(first, "the error is of this rank only", job)
    return Verdict(code, lines, {} if job.got_stop_signal else first.outcome.halved)


def hang_verdict(hung: RankState, job: JobStatus) -> Verdict:
    """Return the verdict on a job with a rank that no longer gives a sign of life."""
    silent = f"no sign of life for {time.monotonic() - hung.alive_s:.0f} s in phase {hung.beat.phase}"
    why = "; its process is stopped (SIGSTOP)" if hung.process and hung.process.is_stopped else ""
    return Verdict(errors.EXIT_FAULT, rank_lines(hung, silent + why, job))


def rank_lines(state: RankState, what: str, job: JobStatus) -> list[str]:
    """Return `error: rank 1 on node-3, step 12, phase train: WHAT`, and a line that names the rank's log."""
    outcome, beat = state.outcome, state.beat
    return [
        f"error: rank {outcome.rank} on {outcome.host}, step {beat.step}, phase {beat.phase}: {what}",
        f"error: its log: {rank_log_file(job.run_dir, outcome.rank)}",
    ]


def cause_of_death(state: RankState, job: JobStatus) -> str:
    """Return the cause of death, in words, of a rank that could not write it."""
    how = killed_by(state.exit_code)
    if state.exit_code is not None and state.exit_code != -signal.SIGKILL:
        return how or f"its process ended with {state.exit_code}"
    used = f"it used {state.process.rss_bytes / MIB:.0f} MiB" if state.process else ""
    facts = ", ".join(fact for fact in (used, job.memory) if fact)
    why = "the kernel killed it for lack of memory" if job.oom_kills else "by hand, or out of memory?"
    return f"{how or 'its process is gone'}: {why}" + (f" ({facts})" if facts else "")


def killed_by(code: int | None) -> str:
    """Return `killed by SIGSEGV` for the exit code of a process that a signal killed; else an empty text."""
    number = -(code or 0)
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    return f"killed by {name}" if number > 0 else ""
