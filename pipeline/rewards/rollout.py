"""The reward functions of a run: their calls for a rollout, prompt by prompt, while other responses are sampled."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline import dist
from pipeline.data.sources import is_conversational, parse_path
from pipeline.data.turns import Message
from pipeline.errors import Interrupted, RunError
from pipeline.rewards.calls import KINDS
from pipeline.rewards.failures import (
    RESPONSES,
    Counts,
    FailureWindow,
    check_one_for_each,
    counts_of,
    first_of_failures,
)
from pipeline.rewards.pool import Failure, Responses, RewardPool, Value


class RunFunctions:
    """The reward functions of a run: a context, at whose end their processes are stopped.

    weights: name of a function -> its weight in the sum.
    """

    def __init__(self, pool: RewardPool, *, max_failures: float, takes_tokens: bool) -> None:
        """Start no process yet.

        Args:
            pool: the functions with the processes of this rank, which it ends.
            max_failures: see `--max-reward-failures`.
            takes_tokens: False = a function that gives each token a value is refused.
        """
        self._takes_tokens = takes_tokens
        self.weights = {function.name: function.weight for function in pool.functions}
        self._pool = pool
        self._window, self._is_conversation = FailureWindow(max_share=max_failures), False
        self._failed_before = dict[str, list[Counts]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    def check(self, columns: Collection[str], sources: Sequence[str]) -> None:
        """Load each function once on this rank, and look whether it gets texts or messages. A collective.

        Args:
            columns: those of all rows that no layout reads.
            sources: the data paths of the prompts. Where any has conversations, all prompts are messages.

        Raises:
            InputError: see `RewardPool.check`.
        """
        self._pool.check(columns)
        self._is_conversation = dist.on_main(lambda: any(is_conversational(parse_path(one)[0]) for one in sources))

    def scoring(
        self, rows: Any, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, step: int
    ) -> "RolloutScoring":
        """Return the calls for a rollout of `rows`, the prompts with `messages` and perhaps `extra`, as JSON."""

        def responses_of(row: int, ids: Sequence[list[int]]) -> Responses:
            return Responses(
                row=f"{row + 1} of those of the run",
                messages=[Message(**turn) for turn in json.loads(rows[row]["messages"])],
                is_conversation=self._is_conversation,
                texts=[text.strip() for text in tokenizer.batch_decode(list(ids), skip_special_tokens=True)],
                ids=ids,
                columns=json.loads(rows[row].get("extra", "{}")),
                step=step,
            )

        before, takes_tokens = self._failed_before, self._takes_tokens
        return RolloutScoring(
            self._pool, responses_of, self._window, before, num_samples=num_samples, takes_tokens=takes_tokens
        )

    def counted(self, before: Mapping[str, Any], failures: Sequence[tuple["RolloutScoring", Tensor]]) -> dict[str, Any]:
        """Return `before`, the counts of earlier rollouts by function, with those of one more; as JSON has them.

        Args:
            failures: of each round of a rollout its calls, and (n, F) int64 of its responses, 0 = no failure, else
                1 + the index of its kind in KINDS.

        Raises:
            Interrupted: with an error, where a function failed too often.
        """
        after, kinds, firsts = dict[str, Any](), dict[str, list[str]](), dict[str, Failure]()
        for scoring, numbers in failures:
            firsts = scoring.failures | firsts
            for name, column in zip(scoring.names, numbers.unbind(1), strict=True):
                kinds.setdefault(name, []).extend(KINDS[kind - 1] if kind else "" for kind in column.tolist())
        for name, each in kinds.items():
            counts = {RESPONSES: len(each)} | {kind: each.count(kind) for kind in sorted(set(each) - {""})}
            after[name] = self._window.after(before.get(name, []), counts)
            try:
                self._window.check(name, after[name], firsts.get(name))
            except RunError as error:
                raise Interrupted(error) from None
        self._failed_before.clear()  # of rollouts the window decides, by the responses of all ranks
        return after


class RolloutScoring:
    """The calls for the prompts of one rollout that this rank scores.

    Args:
        responses_of: (row, tokens of each response) returns what functions see of the responses to a prompt.
        window: what ends a run, by the first responses alone too.
        failed_before: function -> the counts of the latest rollouts and batches of an evaluation in which it failed
            wholly; updated here.
        num_samples: responses to each prompt.
        takes_tokens: see `RunFunctions`.

    names: the functions, in order.
    failures: the first failed call of each function on any rank, once all ranks have exchanged them.
    """

    def __init__(
        self,
        pool: RewardPool,
        responses_of: Any,
        window: FailureWindow,
        failed_before: dict[str, list[Counts]],
        *,
        num_samples: int,
        takes_tokens: bool,
    ) -> None:
        self.names = [function.name for function in pool.functions]
        self.failures: dict[str, Failure] = {}
        self._pool, self._responses_of, self._num_samples = pool, responses_of, num_samples
        self._window, self._failed_before, self._takes_tokens = window, failed_before, takes_tokens
        self._ids: dict[int, dict[int, list[int]]] = {}
        self._handles: dict[int, Future[dict[str, list[Value]]]] = {}

    def ended(self, index: int, row: int, sample: int, ids: list[int]) -> None:
        """Add response number `sample` to a prompt; the prompt's last response starts its calls.

        Args:
            index: index of the prompt in the rollout.
            row: row of the prompt in the data.
            ids: tokens of the response.
        """
        responses = self._ids.setdefault(index, {})
        responses[sample] = ids
        if len(responses) == self._num_samples:
            self._handles[index] = self._pool.submit(self._responses_of(row, [responses[n] for n in sorted(responses)]))

    def gather(self, between: Callable[[], None]) -> dict[int, dict[str, list[Value]]]:
        """Wait for the calls; return {index: {function: a value of each response}}.

        between: called while it waits; may raise.

        Raises:
            InputError: a function returned what is no value, or what is none of this method; or it failed for all of
                the first responses.
            EnvironmentFault: no process can be started; or the first responses met no endpoint.
        """

        def look() -> None:
            between()
            self._check_first()

        by_prompt = dict(zip(self._handles, self._pool.gather(list(self._handles.values()), look), strict=True))
        for by_name in by_prompt.values() if not self._takes_tokens else ():
            for name, values in by_name.items():
                check_one_for_each(name, values)
        for name, values in self._given().items():
            before = self._failed_before.get(name, [])
            self._failed_before[name] = [*before, counts_of(values)] if first_of_failures(values) else []
        return by_prompt

    def _given(self) -> dict[str, list[Value]]:
        """Return what each function gave for the responses whose calls are done."""
        done = [handle.result() for handle in self._handles.values() if handle.done() and not handle.exception()]
        return {name: [value for by_name in done for value in by_name[name]] for name in self.names}

    def _check_first(self) -> None:
        """Raise where a function has failed for all responses that are done, and the others would change nothing.

        Each call that hangs takes its limit of time twice: without this all of a rollout would, and all batches of an
        evaluation.
        """
        expected = len(self._handles) * self._num_samples * dist.world_size()
        for name, values in self._given().items():
            before = self._failed_before.get(name, [])
            num_before = sum(counts[RESPONSES] for counts in before)
            is_long = 0 < num_before >= self._window.min_failures - len(values)
            if is_long or self._window.is_surely_passed(len(values), expected):
                self._window.check(name, [*before, counts_of(values)], first_of_failures(values))


def first_failures(by_prompt: Mapping[int, Mapping[str, Sequence[Value]]]) -> dict[str, Failure]:
    """Return the first failure of each function that has any."""
    firsts: dict[str, Failure] = {}
    for _, by_name in sorted(by_prompt.items()):
        for name, values in by_name.items():
            for value in values:
                if isinstance(value, Failure):
                    firsts.setdefault(name, value)
    return firsts
