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
    pool: the functions with the processes of this rank.
    takes_tokens: False = a function that gives each token a value is refused.
    is_conversation: functions get lists of messages, not texts.
    window: what ends a run, by the first responses of a rollout alone too.
    failed_before: function -> the counts of the latest rollouts and batches of an evaluation in which it failed wholly.
    """

    def __init__(self, pool: RewardPool, *, max_failures: float, takes_tokens: bool) -> None:
        """Start no process yet; `max_failures` is that of `--max-reward-failures`."""
        self.weights = {function.name: function.weight for function in pool.functions}
        self.pool, self.takes_tokens, self.is_conversation = pool, takes_tokens, False
        self.window = FailureWindow(max_share=max_failures)
        self.failed_before = dict[str, list[Counts]]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()

    def check(self, columns: Collection[str], sources: Sequence[str]) -> None:
        """Load each function once on this rank, and look whether it gets texts or messages. A collective.

        Args:
            columns: those of all rows that no layout reads.
            sources: the data paths of the prompts. Where any has conversations, all prompts are messages.

        Raises:
            InputError: see `RewardPool.check`.
        """
        self.pool.check(columns)
        self.is_conversation = dist.on_main(lambda: any(is_conversational(parse_path(one)[0]) for one in sources))

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
            after[name] = self.window.after(before.get(name, []), counts)
            try:
                self.window.check(name, after[name], firsts.get(name))
            except RunError as error:
                raise Interrupted(error) from None
        self.failed_before.clear()  # of rollouts the window decides, by the responses of all ranks
        return after


class RolloutScoring:
    """The calls for the prompts of one rollout that this rank scores.

    Args:
        functions: those of the run; its `failed_before` is updated here.
        rows: the prompts with `messages` and perhaps `extra`, as JSON.
        num_samples: responses to each prompt.
        step: step of the training.

    names: the functions, in order.
    failures: the first failed call of each function on any rank, once all ranks have exchanged them.
    """

    def __init__(
        self, functions: RunFunctions, rows: Any, tokenizer: PreTrainedTokenizerBase, *, num_samples: int, step: int
    ) -> None:
        self.names = list(functions.weights)
        self.failures: dict[str, Failure] = {}
        self._functions, self._rows, self._tokenizer = functions, rows, tokenizer
        self._num_samples, self._step = num_samples, step
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
            ids_of_all = [responses[n] for n in sorted(responses)]
            self._handles[index] = self._functions.pool.submit(self._responses(row, ids_of_all))

    def _responses(self, row: int, ids: Sequence[list[int]]) -> Responses:
        """Return what functions see of the responses to a prompt."""
        texts = self._tokenizer.batch_decode(list(ids), skip_special_tokens=True)
        return Responses(
            row=f"{row + 1} of those of the run",
            messages=[Message(**turn) for turn in json.loads(self._rows[row]["messages"])],
            is_conversation=self._functions.is_conversation,
            texts=[text.strip() for text in texts],
            ids=ids,
            columns=json.loads(self._rows[row].get("extra", "{}")),
            step=self._step,
        )

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

        of_prompts = self._functions.pool.gather(list(self._handles.values()), look)
        by_prompt, failed_before = dict(zip(self._handles, of_prompts, strict=True)), self._functions.failed_before
        for by_name in by_prompt.values() if not self._functions.takes_tokens else ():
            for name, values in by_name.items():
                check_one_for_each(name, values)
        for name, values in self._given().items():
            before = failed_before.get(name, [])
            failed_before[name] = [*before, counts_of(values)] if first_of_failures(values) else []
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
        expected, window = len(self._handles) * self._num_samples * dist.world_size(), self._functions.window
        for name, values in self._given().items():
            before = self._functions.failed_before.get(name, [])
            num_before = sum(counts[RESPONSES] for counts in before)
            is_long = 0 < num_before >= window.min_failures - len(values)
            if is_long or window.is_surely_passed(len(values), expected):
                window.check(name, [*before, counts_of(values)], first_of_failures(values))


def first_failures(by_prompt: Mapping[int, Mapping[str, Sequence[Value]]]) -> dict[str, Failure]:
    """Return the first failure of each function that has any."""
    firsts: dict[str, Failure] = {}
    for _, by_name in sorted(by_prompt.items()):
        for name, values in by_name.items():
            for value in values:
                if isinstance(value, Failure):
                    firsts.setdefault(name, value)
    return firsts
