"""One launcher as a child process: started, signalled and judged by the outcome files of its ranks.

DeepSpeed's launcher turns signals into exit code 1, forwards none to the ranks, and ends ranks that still save; so the
ranks write how they ended (pipeline/layout.py, `outcome_file`), and signals go to the ranks themselves.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeline import errors
from pipeline.layout import outcome_file

# What tells most comes first; 1 stands for everything that is not here.
INFORMATIVE = (
    errors.EXIT_INPUT,
    errors.EXIT_ENVIRONMENT,
    errors.EXIT_DIVERGED,
    errors.EXIT_NO_CHECKPOINT,
    errors.EXIT_STOPPED,
)
REPEAT_S = 2.0  # a signal within this time of the first is the same one: terminals and schedulers send several
ORPHAN_S = 30.0  # how long ranks may outlive their launcher before they are killed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended; `code` is None while it runs, and for good where it was killed."""

    code: int | None
    message: str
    pid: int
    host: str


def run_launcher(command: Sequence[str], run_dir: Path, environment: Mapping[str, str]) -> int:
    """Run `command` in a session of its own and return the exit code that its ranks' outcome files tell.

    SIGINT and SIGTERM reach the ranks once as SIGTERM; a second one, 2 s later or more, kills all processes.
    """
    clear_outcomes(run_dir)
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    with signals_forwarded(process.pid, run_dir) as was_signalled:
        launcher_code = process.wait()
        wait_for_ranks(run_dir)
    # The launcher led the session: whatever is left of its group is an orphan.
    kill_group(process.pid)
    outcomes = read_outcomes(run_dir)
    if was_signalled() and not outcomes:
        return errors.EXIT_STOPPED
    return final_code(outcomes, launcher_code)


def clear_outcomes(run_dir: Path) -> None:
    """Delete what an earlier run left, so that it is not read as this one's."""
    for file in outcome_file(run_dir, 0).parent.glob("rank-*.json"):
        file.unlink()


def read_outcomes(run_dir: Path) -> list[Outcome]:
    """The ranks' outcomes by rank; a file that is being written at this moment is left out."""
    files = outcome_file(run_dir, 0).parent.glob("rank-*.json")
    outcomes = []
    for file in sorted(files, key=lambda file: int(file.stem.removeprefix("rank-"))):
        with suppress(OSError, ValueError, KeyError):
            content = json.loads(file.read_text(encoding="utf-8"))
            outcomes.append(Outcome(content["code"], content["message"], content["pid"], content["host"]))
    return outcomes


def final_code(outcomes: Sequence[Outcome], launcher_code: int) -> int:
    """0 if every rank ended with 0; else the code that tells most; 1 where ranks say nothing.

    The launcher's own code counts only where no rank got as far as its outcome file.
    """
    if not outcomes:
        return launcher_code if launcher_code in INFORMATIVE else errors.EXIT_FAULT
    codes = {outcome.code for outcome in outcomes}
    if codes == {errors.EXIT_DONE}:
        return errors.EXIT_DONE
    return next((code for code in INFORMATIVE if code in codes), errors.EXIT_FAULT)


def running_ranks(run_dir: Path) -> list[int]:
    """Process ids of the ranks of this machine that have not ended."""
    here = socket.gethostname()
    pids = [o.pid for o in read_outcomes(run_dir) if o.code is None and o.host == here]
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Whether a process of this number exists and is ours."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


@contextmanager
def signals_forwarded(group: int, run_dir: Path) -> Iterator[Callable[[], bool]]:
    """While it is open, SIGINT and SIGTERM to this process stop the ranks instead of it; gives whether one came."""
    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            stop_ranks(group, run_dir)
        elif now - first >= REPEAT_S:
            say("second signal: killing all processes of this step")
            kill_group(group)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: first is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_ranks(group: int, run_dir: Path) -> None:
    """SIGTERM to the ranks of this machine; to the whole group where no rank has started."""
    if pids := running_ranks(run_dir):
        say("stopping after this step, with a checkpoint; a second signal kills at once")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    elif others := sorted({o.host for o in read_outcomes(run_dir) if o.code is None}):
        say(f"the ranks run on {', '.join(others)}: send SIGTERM to one of them there; a second signal here kills")
    else:
        say("stopped before any rank had started")
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)


def wait_for_ranks(run_dir: Path) -> None:
    """Give ranks that outlive their launcher the time to write their outcome."""
    end = time.monotonic() + ORPHAN_S
    while running_ranks(run_dir) and time.monotonic() < end:
        time.sleep(0.2)


def kill_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
