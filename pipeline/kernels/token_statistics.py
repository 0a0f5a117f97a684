"""Log-probability and entropy of single tokens from the logits of a language model's head.

All training and scoring calls it. Shapes: M tokens, V vocabulary. On a GPU one kernel reads the logits once, in their
own type, and another overwrites them by their gradient (token_kernels.py). On a CPU torch computes both; tests compare
the two.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import torch

from pipeline.model_types import declared

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """The scaling of a head's output before the softmax, in the order `scale`, `cap`, `temperature`.

    temperature: divisor of the logits.
    scale: factor of the logits.
    cap: soft limit of the logits, which become cap * tanh(logits / cap); None: no limit.
    """

    temperature: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: "PretrainedConfig", temperature: float) -> Self:
        """Return the scaling that a model's configuration sets (Cohere multiplies, Granite divides, Gemma 2 caps)."""
        scale = declared(config, "logit_scale") or 1.0 / (declared(config, "logits_scaling") or 1)
        return cls(temperature, scale, declared(config, "final_logit_softcapping") or None)

    def applied_to(self, logits: torch.Tensor) -> torch.Tensor:
        """Return scaled logits, in their own type."""
        logits = logits * self.scale if self.scale != 1.0 else logits
        logits = torch.tanh(logits / self.cap) * self.cap if self.cap else logits
        return logits / self.temperature if self.temperature != 1.0 else logits

    def apply_(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale logits in place: in generation a second copy would cost too much memory for a large vocabulary."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits


def token_statistics(
    logits: torch.Tensor, targets: torch.Tensor, scaling: LogitScaling, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities (M,) of int64 targets (M,) under logits (M, V), and entropies (M,), in nats and fp32.

    Entropies are None without `with_entropy`. The backward pass may overwrite the logits, so no other function may read
    them later.
    """
    if logits.is_cuda and has_triton():
        from pipeline.kernels.token_kernels import FusedStatistics

        cap = scaling.cap or 0.0
        factor = scaling.scale / (cap or scaling.temperature)
        return FusedStatistics.apply(logits, targets, (factor, cap / scaling.temperature), with_entropy)
    return plain_statistics(logits, targets, scaling, with_entropy=with_entropy)


@cache
def has_triton() -> bool:
    """Return True if kernels can be compiled: triton comes with torch for GPUs, not with torch for CPUs."""
    return find_spec("triton") is not None


def plain_statistics(
    logits: torch.Tensor, targets: torch.Tensor, scaling: LogitScaling, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `token_statistics` with torch, on any device."""
    all_log_probs = torch.log_softmax(scaling.applied_to(logits.float()), dim=-1)
    log_probs = all_log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probs, entropies(all_log_probs) if with_entropy else None


def entropies(all_log_probs: torch.Tensor) -> torch.Tensor:
    """Return the entropies (M,) of log-probabilities (M, V), in nats; a token of probability 0 (-inf) adds 0."""
    values: torch.Tensor = Entropies.apply(all_log_probs)
    return values


class Entropies(torch.autograd.Function):
    """The entropies of log-probabilities; saves for backward only these, which `log_softmax` saves too."""

    @staticmethod
    def forward(ctx: Any, all_log_probs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(all_log_probs)
        return -(all_log_probs.exp() * finite(all_log_probs)).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (all_log_probs,) = ctx.saved_tensors
        return -gradients[0].unsqueeze(-1) * all_log_probs.exp() * (finite(all_log_probs) + 1)


def finite(all_log_probs: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities with -1e30 in place of -inf: infinity times a probability of 0 would be NaN."""
    return all_log_probs.clamp(min=-1e30)
