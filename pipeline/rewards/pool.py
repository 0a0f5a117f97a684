"""Scores of responses by reward functions, computed in worker processes while the device samples the next ones.

A call has all responses of one prompt, so that what a function sees depends on no timing. A call that fails is made
once more for each response by itself; what fails again is a `Failure`.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.data.turns import Message, split_tools
from pipeline.errors import InputError, raise_lines
from pipeline.heartbeat import result_of
from pipeline.redact import redacted
from pipeline.rewards.calls import (
    Call,
    FailureKind,
    RefusedError,
    Signature,
    answer_to,
    check_args,
    checked_values,
    load,
)
from pipeline.rewards.functions import FLAG, RewardFunction
from pipeline.rewards.workers import Background, Workers

RANK_LIMIT_S = 600.0  # of a call in the rank: a judge tries again by itself


@dataclass(frozen=True, slots=True)
class Failure:
    """A response that a function gave no value: in which way, and the first message."""

    kind: FailureKind
    message: str


Value = float | list[float] | Failure | None  # of a response: also one a token; None: the function does not apply


@dataclass(frozen=True, slots=True)
class Responses:
    """Responses to one prompt.

    row: the prompt's row, as messages name it.
    messages: turns of the prompt.
    is_conversation: functions get lists of messages, not texts.
    texts: text of each response, without special tokens.
    ids: tokens of each response.
    columns: the row's other columns, as JSON has them.
    step: step of the training.
    conversations: turns of each response, where it could call tools, with what these answered; None without tools.
    """

    row: str
    messages: Sequence[Message]
    is_conversation: bool
    texts: Sequence[str]
    ids: Sequence[list[int]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    conversations: Sequence[list[dict[str, Any]]] | None = None

    def alone(self, number: int) -> "Responses":
        """Return response `number` by itself."""
        conversations = self.conversations and [self.conversations[number]]
        return replace(self, texts=[self.texts[number]], ids=[self.ids[number]], conversations=conversations)

    def call(self, function: RewardFunction, signature: Signature, columns: Collection[str]) -> Call:
        """Return the call of a function that gets what it takes of these columns; one that the row lacks is None."""
        _, turns = split_tools(self.messages)
        prompt = turns if self.is_conversation else "\n\n".join(turn["content"] for turn in turns)
        completions: list[Any] = [*self.texts]
        if self.conversations:
            completions = [*self.conversations]
        elif self.is_conversation:
            completions = [[{"role": "assistant", "content": text}] for text in self.texts]
        each = {"completions": completions, "completion_ids": [*self.ids]}
        repeated = {name: self.columns.get(name) for name in columns if name not in each} | {"prompts": prompt}
        each, repeated = (
            {name: value for name, value in one.items() if signature.takes(name)} for one in (each, repeated)
        )
        return Call([len(ids) for ids in self.ids], each, repeated, function.args, self.step)


class RewardPool(AbstractContextManager["RewardPool"]):
    """Workers that call reward functions. The pool is a context, at whose end its own workers are stopped.

    The built-in LLM judge, which needs a key, runs in this process, in a separate thread with an asyncio loop, so that
    the workers see no secrets.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        workers: Workers | None = None,
        prints_traces: bool = True,
        **limits: Any,
    ) -> None:
        """Start no process yet.

        Args:
            functions: those to call, all of other names.
            workers: those of the rank, which others use too; None: the pool has its own, by the `limits`.
            prints_traces: True = the trace of each call that raises goes to the log.
            limits: arguments of `Workers`.
        """
        self.functions, self._prints_traces = list(functions), prints_traces
        self._workers, self._has_own_workers = workers or Workers(**limits), not workers
        self._signatures = dict[str, Signature]()
        self._columns: list[str] = []
        self._in_rank = dict[str, Callable[..., Any]]()
        self._rank = Background("reward functions of the rank")

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self, columns: Collection[str]) -> None:
        """Load every function, and look whether the data has the columns that it needs; called before `submit`.

        Args:
            columns: those of all rows that no layout reads.

        Raises:
            InputError: functions that cannot be loaded or called; one line each.
            EnvironmentFault: a judge's key is not in the environment.
        """
        self._columns = [*columns]
        errors = list[str]()
        for function in self.functions:
            answer = result_of(self._workers.run(self._ask(function)))
            if reason := self._reason_against(function, answer):
                errors.append(f"{FLAG} {function.target}: {reason}")
        raise_lines(errors)

    def submit(self, responses: Responses) -> "Future[dict[str, list[Value]]]":
        """Start to score the responses of a prompt, and return at once; see `gather`."""
        return self._workers.run(self._given_by_all(responses))

    def gather(
        self, handles: Sequence["Future[dict[str, list[Value]]]"], between: Callable[[], None] = lambda: None
    ) -> list[dict[str, list[Value]]]:
        """Return for each handle of `submit` each function's values, by name, for the responses; beats while it waits.

        between: called with each beat; may raise.

        Raises:
            InputError: a function returned what is no value; the first of them in the handles' order.
            EnvironmentFault: no process can be started.
        """
        return [result_of(handle, between) for handle in handles]

    def close(self) -> None:
        """End the pool's own workers, and what still runs in them."""
        if self._has_own_workers:
            self._workers.close()
        self._rank.close()

    def _reason_against(self, function: RewardFunction, answer: Mapping[str, Any]) -> str:
        """Return why a function that a worker has answered for cannot be used, or an empty text."""
        if "signature" not in answer:
            return redacted(answer["refused"] if "refused" in answer else f"cannot be loaded: {answer['failed'][1]}")
        signature = self._signatures[function.name] = Signature(**answer["signature"])
        if signature.in_rank:
            try:
                self._in_rank[function.name] = load(function.target, function.digest)
                check_args(function.target, function.args, signature, in_rank=True)
            except RefusedError as error:
                return redacted(str(error))
        return signature.reason_against(function.args, self._columns)

    async def _given_by_all(self, responses: Responses) -> dict[str, list[Value]]:
        work = (self._given_by(function, responses) for function in self.functions)
        lists = await asyncio.gather(*work, return_exceptions=True)
        for values in lists:
            if isinstance(values, BaseException):
                raise values
        return {function.name: values for function, values in zip(self.functions, lists, strict=True)}  # type: ignore[misc]

    async def _given_by(self, function: RewardFunction, responses: Responses) -> list[Value]:
        values = await self._attempt(function, responses)
        if isinstance(values, list):
            return values
        attempts = (self._attempt(function, responses.alone(number)) for number in range(len(responses.texts)))
        again = await asyncio.gather(*attempts)
        return [one[0] if isinstance(one, list) else one for one in again]

    async def _attempt(self, function: RewardFunction, responses: Responses) -> list[Value] | Failure:
        """Call a function once. Raises InputError where what it returns is no value."""
        call = responses.call(function, self._signatures[function.name], self._columns)
        if function.name in self._in_rank:
            answer = await self._ask_rank(function, call)
        else:
            answer = await self._ask(function, call)
        if "refused" in answer:
            problem = redacted(answer["refused"])
            raise InputError(f"{FLAG} {function.target}: {function.name}, prompt {responses.row}: {problem}")
        if "failed" in answer:
            kind, message = answer["failed"]
            return Failure(kind, redacted(message))
        return answer["values"]

    async def _ask(self, function: RewardFunction, call: Call | None = None) -> dict[str, Any]:
        """Return a worker's answer to a call, or where there is none, to the request to load the function."""
        request = {"call": vars(call), "prints_trace": self._prints_traces} if call else None
        async with self._workers.one() as worker:
            return await self._workers.ask(worker, function, FLAG, request)

    async def _ask_rank(self, function: RewardFunction, call: Call) -> dict[str, Any]:
        """Return the answer to a call in this process."""
        arguments = call.arguments(self._signatures[function.name])

        async def answered() -> dict[str, Any]:
            try:
                return {"values": checked_values(await self._in_rank[function.name](**arguments), call.lengths)}
            except Exception as error:
                return answer_to(error, function.target)

        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._rank.run(answered())), RANK_LIMIT_S)
        except TimeoutError:
            return {"failed": ["timed out", f"no answer within {RANK_LIMIT_S:g} s"]}
