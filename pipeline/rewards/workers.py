"""Worker processes of one rank, which its reward functions and its tools share, one call a worker at a time."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.worker_process import WorkerLostError, WorkerProcess

log = logging.getLogger(__name__)

LOAD_LIMIT_S = 120.0  # of an import: that of torch from a slow disk takes a minute
UNNAMED = "%s %s: it uses %s, which no import statement names: changes of it are not noticed when a run resumes"
T = TypeVar("T")


class Background:
    """An asyncio loop in a separate thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancel the tasks of the loop, and end the loop."""
        self.run(cancel_others()).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def cancel_others(*rest: asyncio.Task[None]) -> None:
    """Cancel the tasks of the loop, except for this one and the `rest`."""
    others = asyncio.all_tasks() - {asyncio.current_task(), *rest}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Workers(AbstractContextManager["Workers"]):
    """Worker processes, each of which makes one call at a time. A context, at whose end the processes are stopped.

    `RewardPool` and `Tools` share the workers of a rank; whoever has created the workers closes them, after both.
    """

    def __init__(
        self, *, num_workers: int, timeout_s: float, passes: Sequence[str] = (), memory_bytes: int = 2**60
    ) -> None:
        """Start no process yet.

        Args:
            timeout_s: seconds that a call may take.
            passes: names of variables of the environment that workers see although they look like secrets.
            memory_bytes: memory that one worker may have, and each process that its functions start.
        """
        self.num_workers, self._timeout_s = num_workers, timeout_s
        self._workers = [WorkerProcess(number, passes, memory_bytes) for number in range(num_workers)]
        self._idle = self._workers[::-1]  # the last one works next: no more are started than are busy at once
        self._waiting: list[tuple[int | None, asyncio.Future[WorkerProcess]]] = []
        self._logged = set[str]()
        self._loop = Background("reward workers")

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start work in the loop of the workers, in which `one` and `ask` are called, and return at once."""
        return self._loop.run(work)

    @asynccontextmanager
    async def one(self, number: int | None = None) -> AsyncIterator[WorkerProcess]:
        """Wait for an idle worker, or for that of a number, which is nobody else's in the context; first come first."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((number, turn))
        self._serve()
        try:
            worker = await turn
            worker.forget_ended()
            yield worker
        finally:
            if not turn.cancelled():
                self._idle.append(turn.result())
            self._serve()

    def _serve(self) -> None:
        """Give the idle workers to the first who wait for them."""
        if self._idle:
            for number, turn in self._waiting:
                worker = next((one for one in reversed(self._idle) if number in (None, one.number)), None)
                if worker and not turn.done():
                    self._idle.remove(worker)
                    turn.set_result(worker)
            self._waiting = [one for one in self._waiting if not one[1].done()]

    async def ask(
        self,
        worker: WorkerProcess,
        function: RewardFunction,
        flag: str,
        request: Mapping[str, Any] | None,
        limit_s: float | None = None,
    ) -> dict[str, Any]:
        """Return a worker's answer to a request, or where there is none, to the request to load the function.

        Args:
            flag: that of the function, by which the worker knows what to do with it.
            limit_s: seconds that the answer may take; None: those of a call.
        """
        try:
            loaded = await worker.load(function, LOAD_LIMIT_S, flag)
            if request is None or "beside" not in loaded:
                return loaded
            of_all = {"flag": flag, "target": function.target, "digest": function.digest, "modules": function.modules}
            answer = await worker.ask(of_all | {**request}, limit_s or self._timeout_s)
            for module in {*loaded["beside"], *answer.get("beside", ())} - self._logged:
                self._logged.add(module)
                log.warning(UNNAMED, flag, function.target, module)
            return answer
        except WorkerLostError as error:
            return {"failed": [error.kind, str(error)]}

    def close(self) -> None:
        """End the processes, and what still runs."""
        self._loop.run(self._end()).result()
        self._loop.close()

    async def _end(self) -> None:
        # asyncio waits for ever for the end of a process that it kills before it has connected its pipes.
        while starts := [one.starting for one in self._workers if one.starting and not one.starting.done()]:
            await asyncio.wait(starts)
        await cancel_others(*(task for worker in self._workers for task in worker.watches))
        await asyncio.gather(*(worker.close() for worker in self._workers))
