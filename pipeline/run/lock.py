"""Lock a run's folder and the models that it writes, so that only one process writes them. It imports no torch.

The kernel releases the lock (flock) when its process ends. The text in the file only names that process.
"""

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.errors import EnvironmentFault, say
from pipeline.files import read_object
from pipeline.processes import is_alive
from pipeline.run.layout import lock_file, output_lock

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of a file system without flock


@contextmanager
def locked(run_dir: Path, outputs: Iterable[Path] = ()) -> Iterator[None]:
    """Lock `run_dir` and the model folders `outputs` while the context is open.

    A lock whose process has died is taken over; a line says so for the run's folder.

    Raises:
        EnvironmentFault: another run has locked one of them, or it cannot be written.
    """
    with ExitStack() as locks:
        locks.enter_context(lock_held(run_dir, lock_file(run_dir), "--run-dir"))
        for folder in outputs:
            locks.enter_context(lock_held(folder, output_lock(folder), "--output-dir"))
        yield


@contextmanager
def lock_held(folder: Path, file: Path, flag: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Lock a folder by its lock file; wait at most `wait_s` seconds for another process. Messages name it by `flag`.

    Raises EnvironmentFault: see `locked`.
    """
    if file.exists() and not file.is_file():  # opening a FIFO could wait for ever
        raise EnvironmentFault(f"{file}: not a file that can be locked; remove it")
    lock = FileLock(file, timeout=wait_s, fallback_to_soft=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise EnvironmentFault(in_use(folder, read_holder(file), flag)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise EnvironmentFault(f"{folder}: cannot write there: {error.strerror}") from None
        holder = read_holder(file)
        if holder and (holder[1] != socket.gethostname() or is_alive(holder[0])):
            raise EnvironmentFault(in_use(folder, holder, flag)) from None
    try:
        if (holder := read_holder(file)) and file.parent == folder:
            say(f"{folder}: taking over from pid {holder[0]} on {holder[1]}, which is gone")
        file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n", encoding="utf-8")
        try:
            yield
        finally:
            file.write_text("", encoding="utf-8")
            if file.parent != folder:  # the lock file of a run's folder stays: it marks that folder
                file.unlink()  # while it is locked, so that a process that has just opened it sees that it is gone
    finally:
        lock.release()


def read_holder(file: Path) -> tuple[int, str] | None:
    """Return the id and host of the process that the file names; None if it names none."""
    with suppress(KeyError):
        content = read_object(file)
        return content["pid"], content["host"]
    return None


def in_use(folder: Path, holder: tuple[int, str] | None, flag: str) -> str:
    who = "pid {} on {}".format(*holder) if holder else "another process"
    return f"{folder}: {who} runs in this folder; wait for its end, stop it, or name another {flag}"
