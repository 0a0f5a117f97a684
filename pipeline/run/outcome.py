"""Outcome of a rank, in a file, because launchers carry neither exit codes nor causes. Imports no torch.

The reader is the supervisor (pipeline/launching/supervisor.py), which names itself in the environment of the ranks.
"""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType

from pipeline.errors import EXIT_DONE, EXIT_STOPPED, EnvironmentFault
from pipeline.heartbeat import replace_json
from pipeline.out_of_memory import Halved
from pipeline.processes import is_alive, read_process
from pipeline.run.layout import beat_file, outcome_file

# "<pid>@<host>". DeepSpeed hands variables on to other machines only where their names begin with PYTHON or NCCL.
SUPERVISOR = "PYTHON_RUN_SUPERVISOR"
AGENT = "PYTHON_RUN_AGENT"  # the same of the supervisor's agent on a rank's host, where it has one
RUN_DIR = "PYTHON_RUN_DIR"  # absolute path of the run's folder, for the supervisor's launcher
FIRST_ERROR = "first-error"
OTHERS_FIRST_S = 0.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a rank: its exit code and the reason in words.

    `code` is None while it runs, and for good where it was killed. `secondary` errors follow from another rank's end.
    `time` is in seconds since 1970. `halved` is not empty where a start with these batches may go on.
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
        """True if its process is one of this machine."""
        return self.host == socket.gethostname()

    @property
    def has_failed(self) -> bool:
        """True if it has ended, and neither well nor on request."""
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
    """Write how this rank ended, or with `code` None that it runs."""
    here = (os.getpid(), socket.gethostname(), supervisor_name() or "")
    outcome = Outcome(rank, code, message, secondary, *here, time.time(), dict(halved))
    file = outcome_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_json(file, asdict(outcome))


def read_outcome(run_dir: Path, rank: int) -> Outcome | None:
    """Return the outcome of `rank`; None if it wrote none that can be read."""
    with suppress(OSError, ValueError, KeyError):
        content = json.loads(outcome_file(run_dir, rank).read_text(encoding="utf-8"))
        return Outcome(**{field.name: content[field.name] for field in fields(Outcome)})
    return None


def ranks_with_outcome(run_dir: Path) -> list[int]:
    files = outcome_file(run_dir, 0).parent.glob("rank-*.json")
    return sorted(int(file.stem.removeprefix("rank-")) for file in files)


def check_nobody_left(run_dir: Path) -> None:
    """Raise EnvironmentFault if ranks of an earlier run, whose supervisor is gone, live on and may be saving."""
    for rank in ranks_with_outcome(run_dir):
        outcome = read_outcome(run_dir, rank)
        if outcome is None or outcome.code is not None or not outcome.is_local or outcome.pid == os.getpid():
            continue
        written_s, process = outcome_file(run_dir, rank).stat().st_mtime, read_process(outcome.pid)
        if process and process.started_s <= written_s + 1.0:  # else its number was given again
            raise EnvironmentFault(
                f"{run_dir}: rank {rank} of an earlier run still works here; wait for process {outcome.pid}, or kill it"
            )


def clear_outcomes(run_dir: Path) -> None:
    """Delete outcomes and beats of an earlier run, so that they are not read as this run's."""
    for folder in (outcome_file(run_dir, 0).parent, beat_file(run_dir, 0).parent):
        for file in folder.iterdir() if folder.is_dir() else ():
            file.unlink(missing_ok=True)


def supervisor_name() -> str | None:
    """Return the name of the supervisor that started this rank; None without one."""
    return os.environ.get(SUPERVISOR)


def local_supervisor() -> int | None:
    """Return the process id of this rank's supervisor or its agent; None if neither lives on this machine."""
    pid, _, host = (os.environ.get(AGENT) or supervisor_name() or "").partition("@")
    return int(pid) if host == socket.gethostname() and is_alive(int(pid)) else None


def exit_code(code: int, run_dir: Path) -> int:
    """Return the code to end this process with: 0 if a supervisor reads the outcome file instead.

    At any other code DeepSpeed's launcher ends the other ranks, which may be saving, and prints a line of its own.
    """
    own = read_outcome(run_dir, own_rank())
    is_told = own is not None and own.pid == os.getpid() and own.code == code and local_supervisor() is not None
    return 0 if is_told else code


def is_first_to_fail(run_dir: Path, *, secondary: bool) -> bool:
    """Return True for the first rank of a run without supervisor that reports an error.

    An error that follows from another rank's end waits a moment for that one.
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
