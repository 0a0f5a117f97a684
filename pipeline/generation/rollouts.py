"""The types that every generation backend takes and returns, and the random numbers for drawing tokens.

Every random number is a function of (seed, purpose, epoch, prompt id, sample index, position). So a rollout depends
neither on its batch nor on ranks or restarts. N is the number of rows (prompts x samples), V that of the vocabulary.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from pipeline.models.tokenizers import choose_padding_token, eos_ids, num_token_ids
from pipeline.random_numbers import uniforms


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties of a tokenizer that generation reads.

    eos_ids: ids that end a response.
    pad_id: id that pads rows.
    num_tokens: number of the tokenizer's tokens; only ids below it are drawn, since further rows of the vocabulary are
        padding. None: all rows can be drawn.
    decode: ids -> text with special tokens, in which `Sampling.stop` is searched; None if no request has stop texts.
    """

    eos_ids: frozenset[int]
    pad_id: int
    num_tokens: int | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> Self:
        """Return the vocabulary of a tokenizer; `eos_ids` includes those of the model's generation_config."""

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

        ends = eos_ids(tokenizer, generation_config)
        return cls(ends, choose_padding_token(tokenizer).pad_id, num_token_ids(tokenizer), decode)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a response.

    max_new_tokens: limit of a response's tokens, including its EOS.
    temperature: divides the logits; 0: greedy decoding, with log-probabilities at temperature 1.
    top_p: probability of the nucleus; 1: all tokens.
    top_k: number of most likely tokens that can be drawn; 0: all.
    stop: texts that end a response, at the token that completes one of them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is drawn (the first of equally likely ones)."""
        return self.temperature == 0

    @property
    def drawn_with(self) -> tuple[float, float, int]:
        """The temperature, top_p and top_k of a draw; greedy decoding has top_k 1."""
        return (1.0, 1.0, 1) if self.is_greedy else (self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True, slots=True)
class Truncation:
    """The kinds of truncation that a batch of rows needs. Each row is truncated by its own settings.

    largest_k: largest top_k of the rows; 0: no row has a top_k.
    has_nucleus: True if a row has a top_p below 1.
    """

    largest_k: int = 0
    has_nucleus: bool = False

    @classmethod
    def of(cls, samplings: Iterable[Sampling]) -> Self:
        """Return the truncation that responses with these settings need."""
        drawn_with = [sampling.drawn_with for sampling in samplings]
        largest_k = max((top_k for *_, top_k in drawn_with), default=0)
        return cls(largest_k, any(top_p < 1.0 for _, top_p, _ in drawn_with))

    def __or__(self, other: "Truncation") -> "Truncation":
        return Truncation(max(self.largest_k, other.largest_k), self.has_nucleus or other.has_nucleus)

    def __bool__(self) -> bool:
        return self.largest_k > 0 or self.has_nucleus

    def apply(self, logits: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        """Set (N, V) logits outside the top_k (N,) tokens and the top_p (N,) nucleus of their row to -inf.

        The nucleus is the smallest set of most likely tokens whose probability reaches top_p (Holtzman et al. 2020).
        Tokens as likely as the last one of a set belong to it too, so that the order of a sort does not matter.
        """
        if self.largest_k:
            highest = logits.topk(min(self.largest_k, logits.shape[-1]), dim=-1).values
            kth = highest.gather(1, (top_k - 1).clamp(0, highest.shape[1] - 1).unsqueeze(1))
            logits = logits.masked_fill((logits < kth) & (top_k > 0).unsqueeze(1), float("-inf"))
        if self.has_nucleus:
            ordered = logits.sort(dim=-1, descending=True).values
            probabilities = ordered.softmax(-1)
            outside = probabilities.cumsum(-1) - probabilities >= top_p.unsqueeze(1)
            last = ordered.masked_fill(outside, float("inf")).amin(-1, keepdim=True)
            logits = logits.masked_fill((logits < last) & (top_p < 1.0).unsqueeze(1), float("-inf"))
        return logits


@dataclass(frozen=True, slots=True)
class RandomKey:
    """The key of a generation's random numbers; prompt, sample and position complete it."""

    seed: int
    purpose: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt and the hash of its content, which keys its random numbers."""

    ids: Sequence[int]
    prompt_id: int

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        """Return a prompt whose random numbers are keyed by its token ids."""
        digest = hashlib.blake2b(" ".join(map(str, ids)).encode(), digest_size=8).digest()
        return cls(ids, int.from_bytes(digest, "big") >> 1)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled responses as ragged rows. Row n is sample n % num_samples of prompt n // num_samples.

    prompts: N int64 tensors (P_n,).
    responses: N int64 tensors (T_n,): what the model sampled, EOS included, and what answered it between its turns.
    sampled: N bool tensors (T_n,) on the host, True: the model sampled the token.
    log_probs: N fp32 tensors, log-probabilities of the sampled tokens alone, at the sampling temperature under the
        untruncated distribution.
    finished: (N,) bool, True: ended by an EOS or stop text; False: truncated at max_new_tokens.
    """

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    sampled: list[torch.Tensor]
    log_probs: list[torch.Tensor]
    finished: torch.Tensor


class GenerationStopped(Exception):
    """The error of a generation that the caller stopped between two decode steps; its tokens are dropped."""


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw (N,) int64 tokens by inverting the cumulative distribution of (N, V) logits at (N,) uniforms in (0, 1).

    -inf excludes a token. A row with NaN or +inf gives an arbitrary token, whose log-probability is not finite either.
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    threshold = uniform.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def rollout_uniforms(
    key: RandomKey, prompt_ids: torch.Tensor, sample_index: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Return the uniforms (N, T) float64 of N rows, whose prompt ids and sample indices are (N,) int64."""
    return uniforms(
        seed=key.seed,
        purpose=key.purpose,
        epoch=key.epoch,
        prompt_ids=prompt_ids.unsqueeze(1),
        sample_index=sample_index.unsqueeze(1),
        position=torch.arange(num_tokens, device=prompt_ids.device),
    )
