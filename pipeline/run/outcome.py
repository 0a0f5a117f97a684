"""Write and read how a rank ended, in a file, because an exit code has no cause. It imports no torch.

The supervisor (rlhf/launch.py) reads it. It names itself in the environment of the ranks.
"""

import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.errors import EXIT_DONE, EXIT_STOPPED, EnvironmentFault
from pipeline.files import read_object
from pipeline.heartbeat import replace_json
from pipeline.out_of_memory import Halved
from pipeline.processes import is_alive, read_process
from pipeline.run.layout import beat_file, outcome_file

# Environment variables with "<pid>@<host>" of the supervisor, and of its agent on a rank's host if there is one.
# Variables with this prefix are passed on to other hosts (launching/remote_host.py).
SUPERVISOR = "PYTHON_RUN_SUPERVISOR"
AGENT = "PYTHON_RUN_AGENT"
FIRST_ERROR = "first-error"
OTHERS_FIRST_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rank: its exit code and the reason in words.

    rank: number of the rank.
    code: exit code; None while the rank runs, and also if it was killed.
    message: reason in words.
    secondary: True = the error is a consequence of another rank's end.
    pid: id of the rank's process.
    host: name of the rank's machine.
    supervisor: name of the supervisor that started it, "" without one.
    time: time of writing, in seconds since 1970.
    halved: batch sizes with which another start may continue; empty if there are none.
    """

    rank: int
    code: int | None
    message: str
    secondary: bool
    pid: int
    host: str
    supervisor: str
    time: float
    halved: Halved = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """True if its process runs on this machine."""
        return self.host == socket.gethostname()

    @property
    def has_failed(self) -> bool:
        """True if the rank ended with an error, neither normally nor on request."""
        return self.code not in (None, EXIT_DONE, EXIT_STOPPED)


def own_rank() -> int:
    """Return this process's rank from the launcher's environment; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def write_outcome(
    run_dir: Path,
    rank: int,
    code: int | None,
    message: str,
    *,
    secondary: bool = False,
    halved: Halved = MappingProxyType({}),
) -> None:
    """Write how this rank ended; `code` None: that it runs."""
    here = (os.getpid(), socket.gethostname(), supervisor_name() or "")
    outcome = Outcome(rank, code, message, secondary, *here, time.time(), dict(halved))
    file = outcome_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_json(file, asdict(outcome))


def read_outcome(run_dir: Path, rank: int) -> Outcome | None:
    """Return the outcome of `rank`; None if there is none or it cannot be read."""
    content = read_object(outcome_file(run_dir, rank))
    types: dict[str, Any] = {"code": int | None, "message": str, "pid": int, "host": str, "time": int | float}
    if all(isinstance(content.get(name, ...), kind) for name, kind in types.items()):
        with suppress(KeyError):
            return Outcome(**{field.name: content[field.name] for field in fields(Outcome)})
    return None


def ranks_with_outcome(run_dir: Path) -> list[int]:
    files = outcome_file(run_dir, 0).parent.glob("rank-*.json")
    numbers = (file.stem.removeprefix("rank-") for file in files)
    return sorted(int(number) for number in numbers if number.isdecimal())


def has_process(run_dir: Path, outcome: Outcome) -> bool:
    """Return True if the process that wrote an outcome on this machine is alive."""
    process = read_process(outcome.pid)
    written_s = outcome_file(run_dir, outcome.rank).stat().st_mtime
    return process is not None and process.started_s <= written_s + 1.0  # else another process has got its number


def check_nobody_left(run_dir: Path) -> None:
    """Raise EnvironmentFault if ranks of an earlier run still live without their supervisor and may be saving."""
    for rank in ranks_with_outcome(run_dir):
        outcome = read_outcome(run_dir, rank)
        if outcome is None or outcome.code is not None or not outcome.is_local or outcome.pid == os.getpid():
            continue
        if has_process(run_dir, outcome):
            raise EnvironmentFault(
                f"{run_dir}: rank {rank} of an earlier run still works here; wait for process {outcome.pid}, or kill it"
            )


def clear_outcomes(run_dir: Path) -> None:
    """Delete outcomes and heartbeats of an earlier run, so that nobody reads them as this run's."""
    for folder in (outcome_file(run_dir, 0).parent, beat_file(run_dir, 0).parent):
        for file in (*folder.glob("*rank-*.json*"), folder / FIRST_ERROR):
            file.unlink(missing_ok=True)


def supervisor_name() -> str | None:
    """Return the name of the supervisor that started this rank; None without one."""
    return os.environ.get(SUPERVISOR)


def local_supervisor() -> int | None:
    """Return the process id of this rank's supervisor or of its agent here; None if neither runs on this machine."""
    pid, _, host = (os.environ.get(AGENT) or supervisor_name() or "").partition("@")
    return int(pid) if host == socket.gethostname() and is_alive(int(pid)) else None


def is_reported(code: int, run_dir: Path) -> bool:
    """Return True if the outcome of this rank is written and a running supervisor will read it."""
    written = read_outcome(run_dir, own_rank())
    is_written = written is not None and written.pid == os.getpid() and written.code == code
    return is_written and local_supervisor() is not None


def is_first_to_fail(run_dir: Path, *, secondary: bool) -> bool:
    """Return True for the first rank that reports an error, in a run without a supervisor.

    A rank whose error is a consequence of another rank's end waits a moment, so that the other one reports first.
    """
    if secondary:
        time.sleep(OTHERS_FIRST_S)
    try:
        os.close(os.open(outcome_file(run_dir, 0).with_name(FIRST_ERROR), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return own_rank() == 0
    return True
