"""The scoring of a rollout by reward functions: prompt by prompt, while the responses to others are sampled."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.data.turns import Message
from pipeline.rewards.pool import Failure, Responses, RewardPool, Value


class RolloutScoring:
    """The calls for the prompts of one rollout that this rank scores.

    Args:
        rows: the data set of the prompts: `messages` and, where rows have other columns, `extra`, as JSON.
        tokenizer: decodes responses.
        num_samples: responses to each prompt.
        is_conversation: functions get lists of messages, not texts.
        step: step of the training.

    failures: the first failed call of each function on any rank, once all ranks have exchanged them.
    """

    def __init__(
        self,
        pool: RewardPool,
        rows: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_samples: int,
        is_conversation: bool,
        step: int,
    ) -> None:
        self._pool, self._rows, self._tokenizer = pool, rows, tokenizer
        self._num_samples, self._is_conversation, self._step = num_samples, is_conversation, step
        self.failures: dict[str, Failure] = {}
        self._ids: dict[int, dict[int, list[int]]] = {}
        self._handles: dict[int, Future[dict[str, list[Value]]]] = {}

    @property
    def names(self) -> list[str]:
        """The functions by name, in order."""
        return [function.name for function in self._pool.functions]

    def ended(self, place: int, row: int, sample: int, ids: list[int]) -> None:
        """Take response number `sample` to the prompt of a `row`, the one at `place`; its last one begins the calls."""
        responses = self._ids.setdefault(place, {})
        responses[sample] = ids
        if len(responses) == self._num_samples:
            self._handles[place] = self._pool.submit(self._responses(row, [responses[n] for n in sorted(responses)]))

    def _responses(self, row: int, ids: Sequence[list[int]]) -> Responses:
        prompt = self._rows[row]
        return Responses(
            row=f"{row + 1} of those of the run",
            messages=[Message(**turn) for turn in json.loads(prompt["messages"])],
            is_conversation=self._is_conversation,
            texts=[text.strip() for text in self._tokenizer.batch_decode(list(ids), skip_special_tokens=True)],
            ids=ids,
            columns=json.loads(prompt.get("extra", "{}")),
            step=self._step,
        )

    def gather(self) -> dict[int, dict[str, list[Value]]]:
        """Wait for the calls; return {place: {function: a value of each response}}.

        Raises:
            InputError: a function returned what is no value.
            EnvironmentFault: no process can be started.
        """
        return dict(zip(self._handles, self._pool.gather(list(self._handles.values())), strict=True))


def first_failures(found: Mapping[int, Mapping[str, Sequence[Value]]]) -> dict[str, Failure]:
    """Return the first failure of each function that has any."""
    firsts: dict[str, Failure] = {}
    for _, by_name in sorted(found.items()):
        for name, values in by_name.items():
            for value in values:
                if isinstance(value, Failure):
                    firsts.setdefault(name, value)
    return firsts
