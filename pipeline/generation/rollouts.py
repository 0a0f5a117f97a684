"""The types that every generation backend takes and returns, and the random numbers that tokens are drawn with.

Every random number is a function of (seed, purpose, epoch, prompt id, sample index, position): a rollout depends on
neither its batch, nor ranks or restarts. N rows (prompts x samples), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.random_numbers import uniforms


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters.

    max_new_tokens: tokens of a response at most, its EOS included.
    temperature: divides the logits.
    top_p: probability of the nucleus; 1 = all tokens.
    top_k: most likely tokens that are kept; 0 = all.
    num_tokens: only ids below it are drawn, those that the tokenizer has: rows that pad a vocabulary belong to no
        token. None = all rows of the vocabulary.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RandomKey:
    """The key of a generation's random numbers, which prompt, sample and position complete."""

    seed: int
    purpose: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt and the hash of its content, which keys its random numbers."""

    ids: Sequence[int]
    prompt_id: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """The sampled responses as ragged rows; row n is sample n % num_samples of prompt n // num_samples.

    prompts: N int64 tensors (P_n,).
    responses: N int64 tensors (T_n,); a response includes its EOS.
    log_probs: N fp32 tensors (T_n,): log-probabilities of the sampled tokens at the sampling temperature under the
        untruncated distribution.
    finished: (N,) bool, True = ended with an EOS; False = cut at max_new_tokens.
    prompt_ids: (N,) int64, with sample_index the key of the row's random numbers.
    sample_index: (N,) int64.
    """

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    log_probs: list[torch.Tensor]
    finished: torch.Tensor
    prompt_ids: torch.Tensor
    sample_index: torch.Tensor


class GenerationStopped(Exception):
    """The error of a generation that the caller stopped between two decode steps; nothing of the rollout is kept."""


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw (N,) int64 tokens by inverting the cumulative distribution of (N, V) logits at (N,) uniforms in (0, 1).

    Logits that are not finite give some token of the vocabulary; its log-probability tells.
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
