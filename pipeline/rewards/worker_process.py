"""The parent's side of a worker: its process, which is started when it is needed, killed and replaced."""

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import EnvironmentFault
from pipeline.processes import python_environment, send
from pipeline.redact import redacted, without_secrets
from pipeline.rewards.calls import FailureKind
from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.worker import SIGNALLED

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 2**28  # of a line: numbers of the tokens of a prompt's responses
MAX_PRINTED_LINES, MAX_LINE = 200, 500  # of a worker in a run, and characters of a line, that go into the log
POLL_S = 0.02
GRACE_S, CLOSE_S = 0.2, 1.0  # between the end of a worker and that of its pipes, in a run and at its end


class WorkerLostError(Exception):
    """A worker that was killed, or died, before it had answered. kind: of the failure."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class WorkerProcess:
    """A process that loads and calls reward functions, one at a time. Its methods run in one asyncio loop."""

    def __init__(self, number: int, passes: Sequence[str], memory_bytes: int) -> None:
        self.number, self._passes, self._memory_bytes = number, passes, memory_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._loaded: dict[tuple[str, str], dict[str, Any]] = {}  # flag and target of a function -> the answer
        self.num_ended = 0  # processes that this one has followed
        self._numbers = itertools.count()
        self._num_printed = 0
        self.watches: set[asyncio.Task[None]] = set()
        self.starting: asyncio.Task[asyncio.subprocess.Process] | None = None

    async def load(self, function: RewardFunction, limit_s: float, flag: str) -> dict[str, Any]:
        """Send the worker the request to load a function, once; return its answer. Raises WorkerLostError."""
        key, target = (flag, function.target), function.target
        if self._process is None or key not in self._loaded:
            request = {"digest": function.digest, "args": function.args, "modules": function.modules, "do": "load"}
            self._loaded[key] = await self.ask({"flag": flag, "target": target} | request, limit_s)
        return self._loaded[key]

    async def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the worker's answer to a request.

        Raises:
            WorkerLostError: none within the limit, and the worker is killed, or it has died.
            EnvironmentFault: the system refuses a process.
        """
        if (process := self._process) is None:
            self.starting = asyncio.create_task(self._start())
            process = await self.starting
        number = next(self._numbers)
        line = json.dumps({**request, "number": number}).encode() + b"\n"
        reading = asyncio.ensure_future(_exchange(process, line))
        ending = asyncio.ensure_future(_ended(process))
        try:
            ended, _ = await asyncio.wait((reading, ending), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            answer = reading.result() if reading in ended else None
            if answer is None and ended:  # of the end of the process and that of its pipe, the other is near
                await asyncio.wait((reading, ending), timeout=GRACE_S)
                answer = reading.result() if reading.done() else None
            if answer is not None and answer.get("number") == number:
                return answer
            if not ended:
                raise WorkerLostError("timed out", f"no answer within {limit_s:g} s")
            raise WorkerLostError("worker died", _end_of(process.returncode))
        except BaseException:
            self.kill()
            raise
        finally:
            reading.cancel()
            ending.cancel()

    def forget_ended(self) -> None:
        """Forget a process that has ended since its last answer, so that no call is lost to it."""
        if self._process is not None and self._process.returncode is not None:
            self.kill()

    async def close(self) -> None:
        """End the worker, and log the rest of what its functions have printed."""
        self.kill()
        if self.watches:
            await asyncio.wait(self.watches, timeout=CLOSE_S)

    def kill(self) -> None:
        """End the worker and the processes that its functions have started: its guard does."""
        if self._process is not None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped gets the first with the second
                send(self._process.pid, number)
            if self._process.stdin:
                self._process.stdin.close()
            self.num_ended += 1
        self._process = None
        self._loaded.clear()

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "pipeline.rewards.worker", str(os.getpid()), str(self._memory_bytes)),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=worker_environment(self._passes),
                limit=MAX_ANSWER_BYTES,
                start_new_session=True,  # no signal to the rank's processes reaches the guard before its work is done
            )
        except OSError as error:
            raise EnvironmentFault(
                f"a worker for reward functions cannot be started: {error.strerror}; raise ulimit -u and -n"
            ) from error
        task = asyncio.create_task(self._watch(self._process))
        self.watches.add(task)
        task.add_done_callback(self.watches.discard)
        return self._process

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Log what functions print until a process ends; beyond the first lines only that there is more."""
        assert process.stderr
        while text := await process.stderr.read(2**16):
            for line in text.decode(errors="replace").splitlines():
                self._num_printed += 1
                if self._num_printed <= MAX_PRINTED_LINES:
                    log.info("reward worker %d: %s", self.number, redacted(line[:MAX_LINE]))
                elif self._num_printed == MAX_PRINTED_LINES + 1:
                    log.info(
                        "reward worker %d: prints more than %d lines; no more of it is logged",
                        *(self.number, MAX_PRINTED_LINES),
                    )
        await _ended(process)


def worker_environment(passes: Sequence[str]) -> dict[str, str]:
    """Return the variables of a worker: this process's without secrets but `passes`, one thread, a fixed order of sets.

    Raises EnvironmentFault where there is no variable of one of these names.
    """
    if missing := [name for name in passes if name not in os.environ]:
        raise EnvironmentFault(f"--reward-env {missing[0]}: no such variable in the environment; export it, then start")
    passed = {name: os.environ[name] for name in passes}
    return {"OMP_NUM_THREADS": "1"} | without_secrets(python_environment()) | passed | {"PYTHONHASHSEED": "0"}


async def _exchange(process: asyncio.subprocess.Process, line: bytes) -> dict[str, Any] | None:
    """Send a line, and return the answer; None where the pipe ends or holds something else."""
    assert process.stdin and process.stdout
    try:
        process.stdin.write(line)
        await process.stdin.drain()
        answer = json.loads(await process.stdout.readline())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process; its own `wait` waits for those who have inherited its pipes, too."""
    while process.returncode is None:
        await asyncio.sleep(POLL_S)


def _end_of(code: int | None) -> str:
    """Return how a process with this exit code has ended, None: it has not, and gave another answer than was asked."""
    if code is None:
        return "its answer cannot be read"
    number = code - SIGNALLED if code > SIGNALLED else -code
    is_signal = number in signal.valid_signals()
    return f"its process ended ({f'signal {number}, {signal.strsignal(number)}' if is_signal else f'exit code {code}'})"
