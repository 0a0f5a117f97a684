"""The reward functions of a run: their calls for a rollout, prompt by prompt, while other responses are sampled."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline import dist
from pipeline.data.sources import is_conversational, parse_path
from pipeline.data.turns import turns_of_json
from pipeline.errors import Interrupted, RunError
from pipeline.heartbeat import result_of
from pipeline.rewards.failures import (
    RESPONSES,
    Counts,
    FailureWindow,
    check_one_for_each,
    counts_of,
    first_of_failures,
)
from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.pool import Failure, Responses, RewardPool, Value

ByName = dict[str, list[Value]]  # name of a function -> its value of each response to a prompt
TOOLS = "--tools: calls"  # name of what calls of tools have lost, beside the functions


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """A response that has ended.

    ids: its tokens, without what tools answered.
    messages: its turns, and what tools answered, where it could call tools; else None.
    reward: the value that its environment gives it; None: it has no environment.
    failure: why a call of a tool lost it, if one did.
    """

    ids: list[int]
    messages: list[dict[str, Any]] | None = None
    reward: Future[float | Failure | None] | None = None
    failure: Failure | None = None


class FunctionCalls:
    """The reward functions of a run and their calls for one rollout.

    functions: the functions, in order.
    takes_tokens: False = a function that gives each token a value is refused.
    window: what ends a run, by the first responses of a rollout alone too.
    failed_before: function -> the counts of the latest rollouts and batches of an evaluation in which it failed wholly.
    by_row: row of a prompt -> the values of the responses to it, of all ranks, as far as they are gathered.
    """

    def __init__(
        self,
        pool: RewardPool | None,
        *,
        max_failures: float,
        takes_tokens: bool,
        environment: RewardFunction | None = None,
        has_tools: bool = False,
    ) -> None:
        """Start no process yet.

        Args:
            pool: the functions with the processes of this rank; None without functions.
            max_failures: that of `--max-reward-failures`.
            environment: a further function whose values come with the responses, `EndedResponse.reward`.
            has_tools: responses that calls of tools have lost count as failures, too.
        """
        self.functions: Sequence[RewardFunction] = [*(pool.functions if pool else []), *filter(None, [environment])]
        self._environment = environment
        self.counted_names = [*(one.name for one in self.functions), *[TOOLS] * has_tools]
        self.takes_tokens, self.window = takes_tokens, FailureWindow(max_share=max_failures)
        self.failed_before = dict[str, list[Counts]]()
        self.by_row = dict[int, ByName]()
        self._pool, self._is_conversation = pool, False

    def close(self) -> None:
        """End what still runs, and the processes that are the pool's own."""
        if self._pool:
            self._pool.close()

    def check(self, columns: Collection[str], sources: Sequence[str]) -> None:
        """Load each function once on this rank, and look whether it gets texts or messages. A collective.

        Args:
            columns: those of all rows that no layout reads.
            sources: the data paths of the prompts. Where any has conversations, all prompts are messages.

        Raises:
            InputError: see `RewardPool.check`.
        """
        if self._pool:
            self._pool.check(columns)
            self._is_conversation = dist.on_main(lambda: any(is_conversational(parse_path(one)[0]) for one in sources))

    def begin(self, rows: Any, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, step: int) -> None:
        """Begin a rollout, and forget the last one.

        Args:
            rows: the prompts with `messages` and perhaps `extra`, as JSON.
            num_samples: responses to each prompt.
            step: step of the training.
        """
        self._rows, self._tokenizer, self._num_samples, self._step = rows, tokenizer, num_samples, step
        self._responses = dict[int, dict[int, EndedResponse]]()
        self._pending = dict[int, Future[dict[str, list[Value]]]]()
        self.by_row = {}

    def ended(self, row: int, sample: int, response: EndedResponse) -> None:
        """Add response number `sample` to the prompt of a row; the prompt's last one starts its calls."""
        responses = self._responses.setdefault(row, {})
        responses[sample] = response
        if self._pool and len(responses) == self._num_samples:
            self._pending[row] = self._pool.submit(self._seen(row, [responses[n] for n in sorted(responses)]))

    def _seen(self, row: int, responses: Sequence[EndedResponse]) -> Responses:
        """Return what functions see of the responses to a prompt."""
        ids, messages = [one.ids for one in responses], [one.messages for one in responses if one.messages is not None]
        texts = self._tokenizer.batch_decode(list(ids), skip_special_tokens=True)
        return Responses(
            row=f"{row + 1} of those of the run",
            messages=turns_of_json(self._rows[row]["messages"]),
            is_conversation=self._is_conversation or bool(messages),
            texts=[text.strip() for text in texts],
            ids=ids,
            columns=json.loads(self._rows[row].get("extra", "{}")),
            step=self._step,
            conversations=messages or None,
        )

    def values(self, rows: Sequence[int | None], should_stop: Callable[[], bool]) -> list[list[Value]]:
        """Wait for the calls; return for each response the value of each function, on all ranks. A collective.

        Args:
            rows: the row of each response's prompt; None: padding. Responses to a prompt stand together, in order.
            should_stop: called while it waits; True: the run is to stop.

        Raises:
            Interrupted: on all ranks, with the first rank's error; without one if any rank is to stop.
        """
        if not self.counted_names:
            return [[] for _ in rows]
        given, interruption = dict[int, ByName](), None
        try:
            given = self.wait(should_stop)
        except RunError as error:
            interruption = Interrupted(error)
        except Interrupted as stop:
            interruption = stop
        dist.meet()  # a barrier: functions may take longer than the time limit of a collective
        reports = dist.gather_objects((given, interruption))
        if interruptions := [one for _, one in reports if one is not None]:
            raise next((one for one in interruptions if one.error is None), interruptions[0])
        for by_row, _ in reports:
            self.by_row |= by_row
        names, none = [one.name for one in self.functions], list[Value]([None] * len(self.functions))
        k = self._num_samples
        return [
            none if row is None else [self.by_row[row][name][n % k] for name in names] for n, row in enumerate(rows)
        ]

    def wait(self, should_stop: Callable[[], bool]) -> dict[int, ByName]:
        """Wait for the calls of this rank; return the values for the responses to each prompt.

        Raises:
            InputError: a function returned what is no value, or what is none of this method; or it failed for all of
                the first responses.
            EnvironmentFault: no process can be started; or the first responses met no endpoint.
            Interrupted: `should_stop` returned True.
        """

        def look() -> None:
            if should_stop():
                raise Interrupted
            self._check_first()

        by_row = dict[int, ByName]()
        if self._pool:
            by_row = dict(zip(self._pending, self._pool.gather(list(self._pending.values()), look), strict=True))
        for row, responses in self._responses.items() if TOOLS in self.counted_names else ():
            ended = [responses[n] for n in sorted(responses)]
            added: ByName = {TOOLS: [one.failure for one in ended]}
            if self._environment:
                added[self._environment.name] = [result_of(one.reward, look) for one in ended if one.reward is not None]
            by_row[row] = by_row.get(row, {}) | added
        for by_name in by_row.values() if not self.takes_tokens else ():
            for name, values in by_name.items():
                check_one_for_each(name, values)
        for name, values in self._given().items():
            before = self.failed_before.get(name, [])
            self.failed_before[name] = [*before, counts_of(values)] if first_of_failures(values) else []
        self._pending.clear()
        self._responses.clear()
        return by_row

    def _given(self) -> dict[str, list[Value]]:
        """Return what each function gave for the responses whose calls are done."""
        done = [one.result() for one in self._pending.values() if one.done() and not one.exception()]
        names = [one.name for one in self.functions if one is not self._environment]
        return {name: [value for by_name in done for value in by_name[name]] for name in names}

    def _check_first(self) -> None:
        """Raise where a function has failed for all responses that are done, and the others would change nothing.

        Each call that hangs takes its limit of time twice: without this all of a rollout would, and all batches of an
        evaluation.
        """
        expected = len(self._pending) * self._num_samples * dist.world_size()
        for name, values in self._given().items():
            before = self.failed_before.get(name, [])
            num_before = sum(counts[RESPONSES] for counts in before)
            is_long = 0 < num_before >= self.window.min_failures - len(values)
            if is_long or self.window.is_surely_passed(len(values), expected):
                self.window.check(name, [*before, counts_of(values)], first_of_failures(values))

    def counted(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return `before`, the counts of earlier rollouts by function, with those of this one; as JSON has them.

        Raises:
            Interrupted: with an error, where a function failed too often.
        """
        after = dict[str, Any]()
        for name in self.counted_names:
            values = [value for by_name in self.by_row.values() for value in by_name[name]]
            after[name] = self.window.after(before.get(name, []), counts_of(values))
            first = next((value for value in values if isinstance(value, Failure)), None)
            try:
                is_environment = self._environment is not None and name == self._environment.name
                self.window.check(f"--environment: {name}" if is_environment else name, after[name], first)
            except RunError as error:
                raise Interrupted(error) from None
        self.failed_before.clear()  # of rollouts the window decides, by the responses of all ranks
        return after
