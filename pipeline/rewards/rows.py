"""The input of rewards (sampled responses and their prompts, as tokens and text) and the weight of each reward."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.data.turns import Message
from pipeline.models.reward_model import measured_constants
from pipeline.tensor_ops import lengths_to_mask


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A response to a prompt.

    messages: turns of the prompt.
    response: its text, without special tokens.
    ids: (S,) int64, tokens of prompt and response.
    finished: True = ended with an EOS or a stop string.
    extra: the prompt row's other columns, as JSON has them; {} where it has none.
    """

    messages: list[Message]
    response: str
    ids: Tensor
    finished: bool
    extra: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Responses of a micro-batch. A text is decoded, and a prompt looked up, when a row is iterated over.

    sequences: (n, S) int64, prompt and response in one row, padded on the right.
    prompt_lengths: (n,) int64.
    response_lengths: (n,) int64; a response includes its EOS.
    finished: (n,) bool, True = ended with an EOS or a stop string.
    settings: how the rows pass through a model that reads these tokens: see `TokenValueModel.forward`.
    row_of: place in this batch -> the prompt's row: `messages` and, where rows have other columns, `extra`, as JSON.
    tokenizer: tokenizer of the sequences.
    """

    sequences: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    finished: Tensor
    settings: Mapping[str, Any]
    row_of: Callable[[int], Mapping[str, Any]]
    tokenizer: PreTrainedTokenizerBase

    @property
    def mask(self) -> Tensor:
        """(n, S) bool, True = real token."""
        return lengths_to_mask(self.prompt_lengths + self.response_lengths, self.sequences.shape[1])

    def __iter__(self) -> Iterator[ScoredRow]:
        for n, sequence in enumerate(self.sequences):
            start, length = int(self.prompt_lengths[n]), int(self.response_lengths[n])
            text = self.tokenizer.decode(sequence[start : start + length], skip_special_tokens=True)
            row = self.row_of(n)
            turns, extra = [Message(**turn) for turn in json.loads(row["messages"])], json.loads(row.get("extra", "{}"))
            yield ScoredRow(turns, str(text), sequence[: start + length], bool(self.finished[n]), extra)


class Reward(Protocol):
    """A reward of responses; reads_columns: its scores depend on `ScoredRow.extra`, so a resumed run must share it."""

    reads_columns: bool

    def score(self, rows: ScoredRows) -> Tensor:
        """Return (n,) fp32, higher is better; NaN where a row has none."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward among those of a run: each is normalised by its own constants, clipped, and summed with its weight.

    name: what messages call it.
    reward: what scores responses.
    weight: factor of its normalised score in the sum.
    mean: mean of its raw scores.
    std: standard deviation of its raw scores, above 0.
    takes_first: both are to be those of the scores of the first rollout.
    """

    name: str
    reward: Reward
    weight: float
    mean: float
    std: float
    takes_first: bool = False

    def fitted(self, scores: Tensor) -> "WeightedReward":
        """Return it with the mean and standard deviation of these raw scores, (n,)."""
        mean, std = measured_constants(scores)
        return replace(self, mean=mean, std=std, takes_first=False)

    def score(self, rows: ScoredRows) -> Tensor:
        """Return (n,) fp32 raw scores on the rows' device. Raises ValueError for another number of scores."""
        scores = self.reward.score(rows)
        if scores.shape != rows.finished.shape:
            raise ValueError(f"reward {self.name}: scores of shape {[*scores.shape]} for {len(rows.finished)} rows")
        return scores.float().to(rows.finished.device)
