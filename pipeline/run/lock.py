"""One run in a folder at a time: `run.lock` names the process that runs there. Imports no torch.

The kernel holds the lock (flock), so it ends with its process; the text in the file only says whose it is.
"""

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import EnvironmentFault
from pipeline.processes import is_alive
from pipeline.run.layout import lock_file


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that runs, or ran, in a folder."""

    pid: int
    host: str

    @property
    def may_live(self) -> bool:
        """False only where it is known to have ended."""
        return self.host != socket.gethostname() or is_alive(self.pid)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` while the context is open. A lock whose process has died is taken over, in one line.

    Raises:
        EnvironmentFault: another run holds it, or the folder cannot be written.
    """
    file = lock_file(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise EnvironmentFault(f"{run_dir}: cannot write there: {error.strerror}") from None
    try:
        before = read_holder(handle)
        if not take(handle, before):
            raise EnvironmentFault(in_use(run_dir, before))
        if before:
            print(f"{run_dir}: taking over from pid {before.pid} on {before.host}, which is gone", file=sys.stderr)
        write_text(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        try:
            yield
        finally:
            # Not deleted: a run that opened it a moment ago would lock a file that nobody else sees.
            write_text(handle, "")
    finally:
        os.close(handle)


def take(handle: int, before: Holder | None) -> bool:
    """Lock the open file; where its file system knows no locks, the text alone decides."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        return before is None or not before.may_live
    return True


def read_holder(handle: int) -> Holder | None:
    """Who stands in the file; None where nobody does."""
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads(os.pread(handle, 4096, 0))
        return Holder(content["pid"], content["host"])
    return None


def write_text(handle: int, text: str) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def in_use(run_dir: Path, holder: Holder | None) -> str:
    who = f"pid {holder.pid} on {holder.host}" if holder else "another process"
    return f"{run_dir}: {who} runs in this folder; wait for its end, stop it, or name another --run_dir"
