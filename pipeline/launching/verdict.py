"""Verdict on a job: one exit code and its last lines, from the ends of its ranks. Imports no torch."""

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import errors
from pipeline.launching.rank_watch import RankState
from pipeline.out_of_memory import Halved
from pipeline.run.layout import rank_log_file

# The most specific first; 1 means every other error.
INFORMATIVE = (errors.EXIT_INPUT, errors.EXIT_ENVIRONMENT, errors.EXIT_DIVERGED, errors.EXIT_NO_CHECKPOINT)
LAUNCHER_CODES = (*INFORMATIVE, errors.EXIT_STOPPED)
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code of a job, and the lines to print.

    halved: not empty where the job ran out of memory and may be started again with these batches.
    """

    code: int
    lines: list[str]
    halved: Halved = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job apart from its ranks; a `launcher_code` of None: the launcher was not waited for.

    `memory` says how much was free; `oom_kills` counts processes that the kernel killed for memory during the run.
    """

    run_dir: Path
    launcher_code: int | None
    asked_to_stop: bool
    memory: str
    oom_kills: int


def judge(ranks: Sequence[RankState], job: JobStatus) -> Verdict:
    """Judge by the first cause: an error of a rank's own, a rank's death, a stop, an error that followed from others.

    Ranks that still run are about to be killed by us, and no cause.
    """
    if not ranks:
        return without_ranks(job)
    failed = sorted((s for s in ranks if s.outcome.has_failed), key=lambda s: s.outcome.time)
    if own := [state for state in failed if not state.outcome.secondary]:
        return error_verdict(own, ranks, job)
    if dead := [state for state in ranks if state.died_s is not None]:
        first = min(dead, key=lambda state: state.died_s or 0.0)
        return Verdict(errors.EXIT_FAULT, rank_lines(first, cause_of_death(first, job), job))
    if stopped := [s for s in ranks if s.outcome.code == errors.EXIT_STOPPED]:
        return Verdict(errors.EXIT_STOPPED, stopped[0].outcome.message.splitlines())
    if failed:
        return error_verdict(failed, ranks, job)
    if left := [state for state in ranks if state.outcome.code is None]:
        if job.asked_to_stop and len(left) == len(ranks):
            return Verdict(errors.EXIT_STOPPED, ["stopped before the first step; the same command starts again"])
        numbers = ", ".join(map(str, sorted(state.outcome.rank for state in left)))
        why = f"rank {numbers} did not say how it ended; the launcher ended with {job.launcher_code}"
        return Verdict(errors.EXIT_FAULT, rank_lines(left[0], why, job))
    return Verdict(errors.EXIT_DONE, [])


def without_ranks(job: JobStatus) -> Verdict:
    """Judge a job without outcome files: no rank got so far, or this machine cannot see their folder."""
    if job.asked_to_stop:
        return Verdict(errors.EXIT_STOPPED, ["stopped before any rank had started"])
    if job.launcher_code in LAUNCHER_CODES:
        return Verdict(job.launcher_code, [])
    line = (
        f"error: the launcher ended with {job.launcher_code} before any rank had started; its words are above "
        f"(on several machines {job.run_dir} must be on shared storage)"
    )
    return Verdict(errors.EXIT_FAULT, [line])


def error_verdict(failed: Sequence[RankState], ranks: Collection[RankState], job: JobStatus) -> Verdict:
    """Show the earliest error, once, with the most specific code."""
    first, codes = failed[0], {state.outcome.code for state in failed}
    code = next((code for code in INFORMATIVE if code in codes), errors.EXIT_FAULT)
    message = first.outcome.message
    if first.outcome.code == errors.EXIT_FAULT:
        # The traceback is in the log.
        return Verdict(code, rank_lines(first, message, job))
    lines = [f"error: {line}" for line in message.splitlines()]
    if any(state.outcome.message != message for state in ranks):
        lines += rank_lines(first, "only this rank met it", job)
    return Verdict(code, lines, {} if job.asked_to_stop else first.outcome.halved)


def hang_verdict(hung: RankState, job: JobStatus) -> Verdict:
    """Judge a job whose rank gives no sign of life any more."""
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
    """Return the cause in words for a rank that could not write it; the launcher may not have told it in time."""
    number, code = signal_of(job.launcher_code), job.launcher_code
    if number is None and code:
        return f"its process is gone; the launcher ended with {code}"
    how = f"killed by {number.name}" if number else "its process is gone"
    if number not in (None, signal.SIGKILL):
        return how
    held = f"it held {state.process.rss_bytes / MIB:.0f} MiB" if state.process else ""
    facts = ", ".join(fact for fact in (held, job.memory) if fact)
    why = "the kernel ended it for want of memory" if job.oom_kills else "by hand, or out of memory?"
    return f"{how}: {why}" + (f" ({facts})" if facts else "")


def signal_of(launcher_code: int | None) -> signal.Signals | None:
    """Return the signal that ended a rank, from DeepSpeed's exit code: 256 less its number."""
    number = 256 - (launcher_code or 0)
    return signal.Signals(number) if number in list(signal.Signals) else None
