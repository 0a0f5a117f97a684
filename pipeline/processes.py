"""Processes, signals and memory of this machine, for the run lock, the supervisor and limits on single calls.

The module imports no torch. GPU memory is in pipeline/engine/memory.py.
"""

import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

OWN_CGROUPS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Controllers of a cgroup -> its limit on memory, in bytes: of version 2, and of version 1, with a folder of their name.
LIMIT_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}
# Counters of out-of-memory kills: this container's, else the machine's.
OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
PARENT = "RLHF_TRAIN_PID"  # variable with the process id of an `rlhf train`; the supervisor stops when that dies
WAITS = "RLHF_WAITS"  # variable of a process that is started early, whose standard input is a pipe; see `wait_for_go`
# Variable of the ranks of `rlhf train`, such as `2/3 340`: the index of the stage among those that run, and the seconds
# that the later stages took last time, if all are known.
PIPELINE = "RLHF_PIPELINE"
# Addresses that threads map as they start, for each core: two pools of one thread a core, each thread with a stack of
# 8 MiB and an arena of malloc, 128 MiB until it is aligned.
BYTES_OF_THREADS = 2 * (8 + 128) * 2**20
_limiting_memory = threading.Lock()
REPEAT_S = 2.0  # a signal this soon after the first is a repeat: terminals and schedulers send several


@dataclass(frozen=True, slots=True)
class Process:
    """A process at the time of the last read.

    pid: id of the process.
    status: psutil's word for its state.
    cpu_s: processor time that it has used.
    rss_bytes: bytes of its resident memory.
    started_s: its start, in seconds since 1970.
    """

    pid: int
    status: str
    cpu_s: float
    rss_bytes: int
    started_s: float = 0.0

    @property
    def is_stopped(self) -> bool:
        """True while a signal (SIGSTOP) or a debugger holds it."""
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def python_environment() -> dict[str, str]:
    """Return the environment for a child Python process that imports this project before any other."""
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def read_process(pid: int) -> Process | None:
    """Return the process with this id; None if there is none, or if it is a zombie."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            status, cpu, memory = process.status(), process.cpu_times(), process.memory_info()
        if status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return Process(pid, status, cpu.user + cpu.system, memory.rss, process.create_time())
    return None


def is_alive(pid: int) -> bool:
    return read_process(pid) is not None


def in_sessions(sessions: Collection[int]) -> Iterator[Process]:
    """Yield all descendants of these session leaders that are still in the sessions."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) in sessions and (process := read_process(pid)):
                yield process


def kill_sessions(sessions: Collection[int]) -> None:
    """Send SIGKILL to the sessions until only processes remain that the kernel blocks (on a dead disk)."""
    end = time.monotonic() + 5.0
    while (members := list(in_sessions(sessions))) and time.monotonic() < end:
        for process in members:
            send(process.pid, signal.SIGKILL)
        time.sleep(0.02)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def is_of_train() -> bool:
    """Return whether an `rlhf train` started this process."""
    return os.environ.get(PARENT) == str(os.getppid())


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep while they wait, unless OMP_WAIT_POLICY is set; call it before torch is imported.

    By default they spin and keep a core busy that other processes may need.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def wait_for_go() -> bool:
    """Wait for the go signal of the process that started this one early; return False if that process ends before.

    Return True at once if this process was not started early, or has got the signal before.
    """
    return not os.environ.pop(WAITS, "") or bool(os.read(0, 1))


def give_go(process: "subprocess.Popen[bytes]") -> None:
    """Send the go signal to a process that was started early; it may have ended."""
    if process.stdin:
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(b"\n")


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send this process the signal `number` when its parent, the process `parent`, dies (Linux)."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, number)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), number)


def free_memory() -> str:
    """Return the free memory of this machine in words: `1.2 of 23.0 GiB were free`."""
    memory = psutil.virtual_memory()
    return f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB were free"


def memory_of_machine() -> int:
    """Return the bytes of memory that all processes of this machine, or of this container, can have together."""
    return min([psutil.virtual_memory().total, *memory_limits()])


def memory_limits() -> Iterator[int]:
    """Yield the memory limits in bytes of this process's cgroups and of their parents, in versions 1 and 2.

    In a container the path may be the host's, and only the top folder may exist: that is the container's own.
    """
    lines = []
    with suppress(OSError):
        lines = OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = CGROUPS / controllers
        cgroup = top / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents) if controllers in LIMIT_FILES else ():
            with suppress(OSError, ValueError):  # no such file, or `max`
                yield int((folder / LIMIT_FILES[controllers]).read_text(encoding="utf-8"))
            if folder == top:
                break


def peak_memory() -> int:
    """Return the largest resident memory of this process so far in bytes; 0 if the kernel does not report it.

    getrusage is not used: its value is inherited from the process that forked this one.
    """
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def num_oom_kills() -> int:
    """Return the number of processes that the kernel has killed for memory so far; 0 if it does not report it."""
    for file in OOM_COUNTERS:
        with suppress(OSError, ValueError):
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


REPEAT_LIMIT_S = 1.0  # interval of repeated alarms: Python drops an exception that is raised in a finalizer


class TimeLimitError(BaseException):
    """The time limit of a call is over. It is no Exception, because libraries such as jinja catch those."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the body after `seconds`; outside the main thread, which gets signals, in Python code."""
    if threading.current_thread() is not threading.main_thread():
        raised = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(TimeLimitError)
        timer = threading.Timer(seconds, ctypes.pythonapi.PyThreadState_SetAsyncExc, raised)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # an error that the timer has set is raised here at the latest, not in the caller's next call
        return

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let allocations of the body fail with MemoryError beyond `num_bytes` more than are mapped now (Linux only).

    The limit is that of the process, so one thread at a time has one: two would each restore what the other has set.
    Threads of libraries may start meanwhile, such as those of tokenizers. What they map is allowed beside it: a thread
    without memory for its own data ends the process with 127.
    """
    with _limiting_memory:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = psutil.Process().memory_info().vms + num_bytes + (os.cpu_count() or 1) * BYTES_OF_THREADS
        limits = [limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Signals:
    """The first and second SIGINT, SIGTERM or SIGHUP to this process, stored until the job's loop reads them."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.second: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup makes the process ignore SIGHUP; that stays.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now
        elif now - self.first >= REPEAT_S:
            self.second = number
