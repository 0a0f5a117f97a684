"""Tools that a model calls during an episode, and environments: their calls in the workers, and their schemas.

Their interface is that of TRL's GRPOTrainer. A tool is a function with type hints and a Google-style docstring; it may
be a coroutine. An environment is a class, created once for each episode without arguments: `reset(**columns)` begins
the episode, `get_reward()`, where there is one, ends it, and its other public methods are tools. User code runs only in
the workers.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.tool_calls import ToolCall, WrongCall
from pipeline.errors import InputError, raise_lines
from pipeline.heartbeat import result_of
from pipeline.redact import redacted
from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.pool import Failure
from pipeline.rewards.worker_process import WorkerProcess
from pipeline.rewards.workers import LOAD_LIMIT_S, Workers

log = logging.getLogger(__name__)

TOOLS, ENVIRONMENT = "--tools", "--environment"
_NUMBERS = itertools.count()  # of episodes; workers are shared by several `Tools`
NOT_REPEATED = "its process was lost, and in a new one its environment does not give the same answers again"
RAISED = "%s %s: %s raised %s; the model gets the error as the result, and further ones of this tool are not logged"
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call.

    name: that of the call.
    text: what the model gets.
    failed: True if the call was wrong, or the tool raised: the text says what.
    seconds: time that the tool took, without the time that the call waited for a worker.
    """

    name: str
    text: str
    failed: bool
    seconds: float


@dataclass(slots=True)
class _Episode:
    """An open episode.

    number: different for each episode of this process; in the workers, that of its instance.
    lock: makes one call after another, in order.
    history: requests that its instance has answered, with the text and the error of each answer.
    process: number of the worker's process in which the instance was created; -1 before.
    failure: the failure that has lost the episode, None if there is none.
    """

    number: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    history: list[tuple[Answer, tuple[Any, Any]]] = field(default_factory=list)
    process: int = -1
    failure: Failure | None = None


class Tools:
    """Functions and an environment that the model calls, in the workers, which `Workers.close` ends after `close`.

    An instance of the environment lives in the process of one worker. If that process is lost by another episode, the
    instance is created again at its next call: the same `reset` and calls are repeated, and their results must be the
    same. So an environment must be determined by its row and its calls; one that draws random numbers must seed them.
    A tool must not depend on what earlier calls have left in the module: calls go to any process, in any order.
    Instances of one worker share its memory, so one that fills it can cost another one its episode.
    All methods are called in one thread.

    schemas: JSON schemas of the functions in order, then of the environment's methods by name; by `check`.
    has_reward: True if the environment has a `get_reward`; by `check`.
    descriptions: what the worker has told of each file, as JSON has it; by `check`.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], environment: RewardFunction | None, workers: Workers
    ) -> None:
        """Start no process yet.

        Args:
            functions: those of `--tools`, see `function_of_file`.
            environment: the class of `--environment`; None: the tools have no state.
            workers: the processes of this rank, which others use too.
        """
        self.schemas, self.has_reward, self.descriptions = list[dict[str, Any]](), False, list[Answer]()
        self._functions, self._environment, self._workers = list(functions), environment, workers
        self._tools = dict[str, RewardFunction]()  # name of a tool -> its function, or the class of the method
        self._episodes = dict[Hashable, _Episode]()
        self._logged = set[str]()

    def check(self, descriptions: Sequence[Answer] = ()) -> None:
        """Load the tools in a worker, create an instance of the environment, and fill `schemas`; called before `begin`.

        The worker's process is ended: it has imported transformers.

        Args:
            descriptions: those of an earlier check of the same files, with which nothing is loaded.

        Raises:
            InputError: what cannot be loaded or called; one line each.
        """
        codes = [*self._functions, *([self._environment] if self._environment else [])]
        answers = self.descriptions = [*descriptions] or result_of(self._workers.run(self._described(codes)))
        lines, origins = list[str](), dict[str, str]()
        for code, answer in zip(codes, answers, strict=True):
            origin = f"{self._flag(code)} {code.target}"
            if "schemas" not in answer:
                reason = answer["refused"] if "refused" in answer else f"cannot be loaded: {answer['failed'][1]}"
                lines.append(redacted(f"{origin}: {reason}"))
            for schema in answer.get("schemas", ()):
                if (name := schema["function"]["name"]) in origins:
                    same = f"two tools have the name {name!r}, by which the model calls them; rename one"
                    lines.append(f"{origins[name]} and {origin}: {same}")
                origins[name], self._tools[name] = origin, code
        raise_lines(lines)
        self.schemas = [schema for answer in answers for schema in answer["schemas"]]
        self.has_reward = any(answer["has_reward"] for answer in answers)

    def begin(self, episode: Hashable, row: Mapping[str, Any]) -> "Future[str | None | Failure]":
        """Begin an episode; return the text of the environment's `reset`, None if it returned none, or a failure.

        Args:
            episode: its name, which no open episode has.
            row: columns of its row, as JSON has them; `reset` gets those that it takes.

        Raises:
            ValueError: the episode is open.
            InputError: by the future: `reset` returned no text, or the user's file has changed since the start.
        """
        if episode in self._episodes:
            raise ValueError(f"the episode {episode!r} is open")
        request = {"do": "reset", "row": json.loads(json.dumps({**row}))}
        opened = self._episodes[episode] = _Episode(next(_NUMBERS))
        return self._workers.run(self._begin(opened, request))

    def call(self, episode: Hashable, calls: Sequence[ToolCall | WrongCall]) -> "Future[list[ToolResult] | Failure]":
        """Make the calls of a turn, one after another; return their results in order, or the failure of the episode.

        A failure is for the whole episode: each further call, and `end`, return it too.

        Raises:
            ValueError: the episode is not open.
            InputError: by the future: the user's file has changed since the start.
        """
        return self._workers.run(self._call(self._open(episode), [*calls]))

    def end(self, episode: Hashable) -> "Future[float | None | Failure]":
        """End an episode, and forget its instance; return the environment's reward, or the failure of the episode.

        The reward is None if there is no environment, or no `get_reward`, or that has returned None.

        Raises:
            ValueError: the episode is not open.
            InputError: by the future: `get_reward` returned no finite number.
        """
        ended = self._open(episode)
        del self._episodes[episode]
        return self._workers.run(self._end(ended, has_reward=self.has_reward))

    def close(self) -> None:
        """Forget the episodes that are open, without their rewards; calls that are pending end by themselves."""
        for episode in self._episodes.values():
            self._workers.run(self._end(episode, has_reward=False))
        self._episodes.clear()

    def _open(self, episode: Hashable) -> _Episode:
        if episode not in self._episodes:
            raise ValueError(f"the episode {episode!r} is not open: it has not begun, or has ended")
        return self._episodes[episode]

    def _flag(self, code: RewardFunction) -> str:
        return ENVIRONMENT if code is self._environment else TOOLS

    async def _described(self, codes: Sequence[RewardFunction]) -> list[Answer]:
        async with self._workers.one() as worker:
            request, limit_s = {"do": "describe"}, LOAD_LIMIT_S  # it imports transformers
            answers = [await self._workers.ask(worker, code, self._flag(code), request, limit_s) for code in codes]
            worker.kill()
        return answers

    async def _begin(self, episode: _Episode, request: Answer) -> str | None | Failure:
        async with episode.lock:
            answer = await self._ask_instance(episode, request) if self._environment else {"text": None}
            return answer if isinstance(answer, Failure) else answer["text"]

    async def _call(self, episode: _Episode, calls: Sequence[ToolCall | WrongCall]) -> list[ToolResult] | Failure:
        results = list[ToolResult]()
        async with episode.lock:
            for call in () if episode.failure else calls:
                result = await self._result(episode, call)
                if isinstance(result, Failure):
                    episode.failure = result
                    break
                results.append(result)
            return episode.failure or results

    async def _end(self, episode: _Episode, *, has_reward: bool) -> float | None | Failure:
        async with episode.lock:
            if has_reward and not episode.failure:
                answer = await self._ask_instance(episode, {"do": "end"})
                return answer if isinstance(answer, Failure) else answer["reward"]
            if self._environment:
                async with self._home_of(episode) as worker:
                    if episode.process == worker.num_ended:
                        await self._ask(worker, self._environment, {"do": "forget", "instance": episode.number})
            return episode.failure

    async def _result(self, episode: _Episode, call: ToolCall | WrongCall) -> ToolResult | Failure:
        """Return the result of a call, or the failure that loses the episode."""
        if isinstance(call, WrongCall):
            return ToolResult(call.name, call.problem, failed=True, seconds=0.0)
        if call.name not in self._tools:
            problem = f"Error: no tool has this name, only {', '.join(self._tools)}"
            return ToolResult(call.name, problem, failed=True, seconds=0.0)
        code, request = self._tools[call.name], {"do": "call", "method": call.name, "arguments": call.arguments}
        if code is self._environment:
            answer = await self._ask_instance(episode, request)
        else:
            async with self._workers.one() as worker:
                answer = await self._ask(worker, code, request)
        if isinstance(answer, Failure):
            return answer
        if (cause := answer["cause"]) and call.name not in self._logged:
            self._logged.add(call.name)
            log.warning(RAISED, self._flag(code), code.target, call.name, redacted(cause))
        text = redacted(answer["text"]) if cause else answer["text"]
        return ToolResult(call.name, text, failed=cause is not None, seconds=answer["seconds"])

    def _home_of(self, episode: _Episode) -> AbstractAsyncContextManager[WorkerProcess]:
        """Wait for the worker of an episode's instance."""
        return self._workers.one(episode.number % self._workers.num_workers)

    async def _ask_instance(self, episode: _Episode, request: Answer) -> Answer | Failure:
        """Return the answer of an episode's instance, which is created again if its process has been lost."""
        assert self._environment
        async with self._home_of(episode) as worker:
            request = request | {"instance": episode.number}
            history = [] if episode.process == worker.num_ended else episode.history
            episode.process = worker.num_ended
            for before, outcome in history:
                again = await self._ask(worker, self._environment, before)
                if isinstance(again, Failure) or outcome != (again.get("text"), again.get("cause")):
                    episode.failure = Failure("worker died", NOT_REPEATED)
                    return episode.failure
            answer = await self._ask(worker, self._environment, request)
        if isinstance(answer, Failure):
            episode.failure = answer
        else:
            episode.history.append((request, (answer.get("text"), answer.get("cause"))))
        return answer

    async def _ask(self, worker: WorkerProcess, code: RewardFunction, request: Answer) -> Answer | Failure:
        """Return a worker's answer. Raises InputError where the user's code breaks the interface."""
        answer = await self._workers.ask(worker, code, self._flag(code), request)
        if "refused" in answer:
            raise InputError(redacted(f"{self._flag(code)} {code.target}: {answer['refused']}"))
        if "failed" not in answer:
            return answer
        if answer.get("is_full"):
            worker.kill()
        kind, message = answer["failed"]
        return Failure(kind, redacted(message))
