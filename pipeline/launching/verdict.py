"""How a job ended: one exit code and the last lines, from what is known of its ranks. Imports no torch."""

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import errors
from pipeline.launching.rank_watch import RankState, numbers_of
from pipeline.run.layout import rank_log_file

# What tells most comes first; 1 stands for everything that is not here.
INFORMATIVE = (errors.EXIT_INPUT, errors.EXIT_ENVIRONMENT, errors.EXIT_DIVERGED, errors.EXIT_NO_CHECKPOINT)
LAUNCHER_CODES = (*INFORMATIVE, errors.EXIT_STOPPED)
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Verdict:
    """Exit code, and what to print."""

    code: int
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What besides the ranks decides: the launcher's exit code (None: it was not waited for), memory, our own doing.

    `memory` says how much was free; `oom_kills` counts processes that the kernel killed for memory during the run.
    """

    run_dir: Path
    launcher_code: int | None
    asked_to_stop: bool
    memory: str
    oom_kills: int


def judge(ranks: Sequence[RankState], around: Circumstances) -> Verdict:
    """The first cause decides: an error of a rank's own, a rank's death, a stop, an error that followed from others.

    Ranks that still run are about to be killed by us, and no cause.
    """
    if not ranks:
        return without_ranks(around)
    failed = sorted((s for s in ranks if s.outcome.has_failed), key=lambda s: s.outcome.time)
    if own := [state for state in failed if not state.outcome.secondary]:
        return error_verdict(own, ranks, around)
    if dead := [state for state in ranks if state.died is not None]:
        first = min(dead, key=lambda state: state.died or 0.0)
        return Verdict(errors.EXIT_FAULT, [named(first, cause_of_death(first, around)), log_line(first, around)])
    if stopped := [s for s in ranks if s.outcome.code == errors.EXIT_STOPPED]:
        return Verdict(errors.EXIT_STOPPED, stopped[0].outcome.message.splitlines())
    if failed:
        return error_verdict(failed, ranks, around)
    if left := [state for state in ranks if state.outcome.code is None]:
        if around.asked_to_stop and len(left) == len(ranks):
            return Verdict(errors.EXIT_STOPPED, ["stopped before the first step; the same command starts again"])
        why = f"rank {numbers_of(left)} did not say how it ended; the launcher ended with {around.launcher_code}"
        return Verdict(errors.EXIT_FAULT, [named(left[0], why), log_line(left[0], around)])
    return Verdict(errors.EXIT_DONE, [])


def without_ranks(around: Circumstances) -> Verdict:
    """No rank got as far as its outcome file, or they write it where this machine cannot see it."""
    if around.asked_to_stop:
        return Verdict(errors.EXIT_STOPPED, ["stopped before any rank had started"])
    if around.launcher_code in LAUNCHER_CODES:
        return Verdict(around.launcher_code, [])
    line = (
        f"error: the launcher ended with {around.launcher_code} before any rank had started; its words are above "
        f"(on several machines {around.run_dir} must be on shared storage)"
    )
    return Verdict(errors.EXIT_FAULT, [line])


def error_verdict(failed: Sequence[RankState], ranks: Collection[RankState], around: Circumstances) -> Verdict:
    """The earliest error, shown once; the code that tells most."""
    first, codes = failed[0], {state.outcome.code for state in failed}
    code = next((code for code in INFORMATIVE if code in codes), errors.EXIT_FAULT)
    message = first.outcome.message
    if first.outcome.code == errors.EXIT_FAULT:
        # The traceback is in the log.
        return Verdict(code, [named(first, message), log_line(first, around)])
    lines = [f"error: {line}" for line in message.splitlines()]
    if any(state.outcome.message != message for state in ranks):
        lines += [named(first, "met this alone"), log_line(first, around)]
    return Verdict(code, lines)


def hang_verdict(hung: RankState, around: Circumstances) -> Verdict:
    """A rank gives no sign of life any more."""
    silent = f"no sign of life for {time.monotonic() - hung.heard:.0f} s in phase {hung.beat.phase}"
    why = "; its process is stopped (SIGSTOP)" if hung.process and hung.process.is_stopped else ""
    return Verdict(errors.EXIT_FAULT, [named(hung, silent + why), log_line(hung, around)])


def named(state: RankState, what: str) -> str:
    """`error: rank 1 on node-3, step 12, phase train: WHAT`."""
    said, beat = state.outcome, state.beat
    return f"error: rank {said.rank} on {said.host}, step {beat.step}, phase {beat.phase}: {what}"


def log_line(state: RankState, around: Circumstances) -> str:
    return f"error: its log: {rank_log_file(around.run_dir, state.outcome.rank)}"


def cause_of_death(state: RankState, around: Circumstances) -> str:
    """What ended a rank that could not say so itself; the launcher may not have said it in time."""
    number, code = signal_of(around.launcher_code), around.launcher_code
    if number is None and code:
        return f"its process is gone; the launcher ended with {code}"
    how = f"killed by {number.name}" if number else "its process is gone"
    if number not in (None, signal.SIGKILL):
        return how
    held = f"it held {state.process.rss_bytes / MIB:.0f} MiB" if state.process else ""
    facts = ", ".join(fact for fact in (held, around.memory) if fact)
    why = "the kernel ended it for want of memory" if around.oom_kills else "by hand, or out of memory?"
    return f"{how}: {why}" + (f" ({facts})" if facts else "")


def signal_of(launcher_code: int | None) -> signal.Signals | None:
    """The signal that ended a rank, from DeepSpeed's exit code: 256 less its number."""
    if launcher_code is None or launcher_code <= 128:
        return None
    try:
        return signal.Signals(256 - launcher_code)
    except ValueError:
        return None
