"""Lock of a run folder: `run.lock` names the one process that may run there. Imports no torch.

The kernel holds the lock (flock), so it ends with its process; the text in the file only says whose it is.
"""

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.errors import EnvironmentFault
from pipeline.processes import is_alive
from pipeline.run.layout import lock_file

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of a file system without flock


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir` while the context is open. A lock whose process has died is taken over, in one line.

    Raises:
        EnvironmentFault: another run holds it, or the folder cannot be written.
    """
    file = lock_file(run_dir)
    if file.exists() and not file.is_file():  # to open a FIFO could wait for ever
        raise EnvironmentFault(f"{file}: found no file, wanted one that can be locked; remove it")
    lock = FileLock(file, timeout=0, fallback_to_soft=False)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise EnvironmentFault(in_use(run_dir, read_holder(file))) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise EnvironmentFault(f"{run_dir}: cannot write there: {error.strerror}") from None
        holder = read_holder(file)
        if holder and (holder[1] != socket.gethostname() or is_alive(holder[0])):
            raise EnvironmentFault(in_use(run_dir, holder)) from None
    try:
        if holder := read_holder(file):
            print(f"{run_dir}: taking over from pid {holder[0]} on {holder[1]}, which is gone", file=sys.stderr)
        file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n", encoding="utf-8")
        try:
            yield
        finally:
            # Not deleted: a run that opened it a moment ago would lock a file that nobody else sees.
            file.write_text("", encoding="utf-8")
    finally:
        lock.release()


def read_holder(file: Path) -> tuple[int, str] | None:
    """Return the id and host of the process that the file names; None if it names none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(file.read_text(encoding="utf-8"))
        return content["pid"], content["host"]
    return None


def in_use(run_dir: Path, holder: tuple[int, str] | None) -> str:
    who = "pid {} on {}".format(*holder) if holder else "another process"
    return f"{run_dir}: {who} runs in this folder; wait for its end, stop it, or name another --run_dir"
