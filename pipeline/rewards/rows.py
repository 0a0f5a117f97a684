"""The interface of rewards, and the input of reward models: sampled responses with prompts, as tokens and text."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.data.turns import Message, turns_of_json
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
    response_lengths: (n,) int64, tokens behind the prompt: a response includes its EOS, and what answered its turns.
    finished: (n,) bool, True = ended with an EOS or a stop string.
    settings: how the rows pass through a model that reads these tokens: see `RowSettings`.
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
            turns, extra = turns_of_json(row["messages"]), json.loads(row.get("extra", "{}"))
            yield ScoredRow(turns, str(text), sequence[: start + length], bool(self.finished[n]), extra)


@dataclass(frozen=True, slots=True)
class Scale:
    """The constants that normalise the raw scores of a reward model.

    mean: their mean.
    std: their standard deviation, above 0.
    takes_first: both are to be those of the scores of the first rollout.
    """

    mean: float
    std: float
    takes_first: bool = False

    def fitted(self, scores: Tensor) -> "Scale":
        """Return the constants of these raw scores (n,) if they are to be taken, else its own."""
        return Scale(*measured_constants(scores)) if self.takes_first else self


class Reward(Protocol):
    """A reward of responses: a reward model, a function, or the LLM judge, which is a function.

    name: what metrics and messages call it.
    weight: factor of its score in the sum.
    scale: normalises the scores of a model, which are then clipped; None: those of a function are summed as they are.
    """

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def scale(self) -> Scale | None: ...


class BatchReward(Reward, Protocol):
    """A reward that scores micro-batches of responses: a reward model, or a class of your own.

    reads_columns: its scores depend on `ScoredRow.extra`, so a resumed run must share it.
    """

    scale: Scale
    reads_columns: bool

    def score(self, rows: ScoredRows) -> Tensor:
        """Return (n,) fp32, higher is better; NaN where a row has none."""
