"""The types that every generation backend takes and returns, and the draw of a token from a uniform number.

N rows (prompts x samples), V vocabulary. Every random number is a function of (seed, purpose, epoch, prompt id, sample
index, position), so a rollout does not depend on the batch it is made in, on ranks or on restarts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.random_numbers import uniforms


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `max_new_tokens` counts the EOS; top_p 1 and top_k 0 switch truncation off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class RandomKey:
    """What the uniforms of a generation are a function of, besides prompt, sample and position."""

    seed: int
    purpose: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt and the hash of its content, which keys its random numbers."""

    ids: Sequence[int]
    prompt_id: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled responses, ragged; row n belongs to prompt n // num_samples, sample n % num_samples.

    prompts, responses: N int64 tensors (P_n,), (T_n,); a response includes its EOS.
    log_probs: N fp32 tensors (T_n,): log-probabilities of the sampled tokens at the sampling temperature under the
        untruncated distribution.
    finished: (N,) bool, True = ended with an EOS; False = cut at max_new_tokens.
    prompt_ids, sample_index: (N,) int64, the keys of the row's random numbers.
    """

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    log_probs: list[torch.Tensor]
    finished: torch.Tensor
    prompt_ids: torch.Tensor
    sample_index: torch.Tensor


class GenerationStopped(Exception):
    """Raised between two decode steps when the caller asked to stop; nothing of the rollout is kept."""


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: (N, V) logits and (N,) uniforms in (0, 1) -> (N,) int64 tokens."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    threshold = uniform.to(cumulative).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def rollout_uniforms(
    key: RandomKey, prompt_ids: torch.Tensor, sample_index: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """(N, T) float64: the uniform of every token of N rows, whose prompt ids and sample numbers are (N,) int64."""
    return uniforms(
        seed=key.seed,
        purpose=key.purpose,
        epoch=key.epoch,
        prompt_ids=prompt_ids.unsqueeze(1),
        sample_index=sample_index.unsqueeze(1),
        position=torch.arange(num_tokens, device=prompt_ids.device),
    )
