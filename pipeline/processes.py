"""Processes, signals and memory of this machine, by /proc. Imports no torch."""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PROC = Path("/proc")
OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), PROC / "vmstat")  # of this container, else of the machine
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GIB = 2**30
REPEAT_S = 2.0  # a signal within this time of the first is the same one: terminals and schedulers send several
KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has not ended; `state` is the kernel's letter (R, S, D, T), `cpu_s` what it used so far."""

    pid: int
    state: str
    session: int
    cpu_s: float
    rss_bytes: int

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger holds it."""
        return self.state in "Tt"


def read_process(pid: int) -> Process | None:
    """The process of this number; None where there is none, or only what its parent has not collected yet."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # man proc_pid_stat: the name in brackets may hold anything; `fields` begins with the third one.
    fields = text.rpartition(")")[2].split()
    state, session, ticks, pages = fields[0], int(fields[3]), int(fields[11]) + int(fields[12]), int(fields[21])
    return None if state in "ZX" else Process(pid, state, session, ticks / TICKS_PER_S, pages * PAGE_BYTES)


def is_alive(pid: int) -> bool:
    return read_process(pid) is not None


def in_session(session: int) -> Iterator[Process]:
    """The processes that were started, directly or not, by the leader of this session, and did not leave it."""
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (process := read_process(int(folder.name))) and process.session == session:
            yield process


def kill_session(session: int) -> None:
    """SIGKILL to all of the session, until none is left but what the kernel holds back (a dead disk)."""
    end = time.monotonic() + KILL_S
    while (members := list(in_session(session))) and time.monotonic() < end:
        for process in members:
            send(process.pid, signal.SIGKILL)
        time.sleep(0.02)


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone already."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def free_memory() -> str:
    """`1.2 of 23.0 GiB were free`, of this machine; "" where it does not tell."""
    found = {}
    with suppress(OSError, ValueError):
        for line in (PROC / "meminfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) * 1024
    if "MemAvailable" not in found:
        return ""
    return f"{found['MemAvailable'] / GIB:.1f} of {found['MemTotal'] / GIB:.1f} GiB were free"


def num_oom_kills() -> int:
    """How many processes the kernel has killed for memory so far; 0 where it does not tell."""
    for file in OOM_COUNTERS:
        with suppress(OSError, ValueError):
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


class TimeLimitError(Exception):
    """The time is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the body after `seconds`. Without effect outside the main thread, which gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise TimeLimitError


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let allocations of the body fail with MemoryError beyond `num_bytes` more than are mapped now (Linux only)."""
    try:
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + num_bytes
    known = [limit for limit in (soft, hard, wanted) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
