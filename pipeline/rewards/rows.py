"""What a reward reads: sampled responses with their prompts, as tokens and as text."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.data.turns import Message
from pipeline.tensor_ops import lengths_to_mask


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A response to a prompt.

    messages: turns of the prompt.
    response: its text, without special tokens.
    ids: (S,) int64, tokens of prompt and response.
    finished: True = ended with an EOS.
    """

    messages: list[Message]
    response: str
    ids: Tensor
    finished: bool


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Responses of a micro-batch. A text is decoded, and a prompt looked up, when a row is iterated over.

    sequences: (n, S) int64, prompt and response in one row, padded on the right.
    prompt_lengths: (n,) int64.
    response_lengths: (n,) int64; a response includes its EOS.
    finished: (n,) bool, True = ended with an EOS.
    num_packed_tokens: tokens of all rows where a pass packs them; None where it pads them.
    prompt_of: place in this batch -> the prompt's turns as JSON.
    tokenizer: tokenizer of the sequences.
    """

    sequences: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    finished: Tensor
    num_packed_tokens: int | None
    prompt_of: Callable[[int], str]
    tokenizer: PreTrainedTokenizerBase

    @property
    def mask(self) -> Tensor:
        """(n, S) bool, True = real token."""
        return lengths_to_mask(self.prompt_lengths + self.response_lengths, self.sequences.shape[1])

    def __iter__(self) -> Iterator[ScoredRow]:
        for n, sequence in enumerate(self.sequences):
            start, length = int(self.prompt_lengths[n]), int(self.response_lengths[n])
            text = self.tokenizer.decode(sequence[start : start + length], skip_special_tokens=True)
            turns = [Message(**turn) for turn in json.loads(self.prompt_of(n))]
            yield ScoredRow(turns, str(text), sequence[: start + length], bool(self.finished[n]))


class Reward(Protocol):
    """A reward of responses."""

    def score(self, rows: ScoredRows) -> Tensor:
        """Return (n,) fp32, higher is better; NaN where a row has none."""
