"""Exact divergences of two models' distributions of the next token, from the logits of both heads.

M tokens, V vocabulary. A caller passes a piece of the tokens at a time, so that the logits of all never exist.

Sources: Agarwal et al. 2024 (GKD), arXiv 2306.13649; Lin 1991 (Jensen-Shannon divergence).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from pipeline.kernels.token_statistics import finite

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


def divergences(log_probs: Tensor, other_log_probs: Tensor, *, kind: Divergence) -> Tensor:
    """Return the divergence (M,) in nats of each token's distribution p from another model's, q; fp32, 0 or more.

        reverse_kl   KL(p || q), which on-policy distillation minimises
        forward_kl   KL(q || p)
        jsd          (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, at most log 2

    Args:
        log_probs: (M, V) fp32 log p.
        other_log_probs: (M, V) fp32 log q.
    """
    p, q = finite(log_probs), finite(other_log_probs)  # a probability of 0 adds 0
    if kind == "reverse_kl":
        return divergence_of(p, q)
    if kind == "forward_kl":
        return divergence_of(q, p)
    middle = torch.logaddexp(p, q) - math.log(2)
    return (divergence_of(p, middle) + divergence_of(q, middle)) / 2


def divergence_of(first: Tensor, second: Tensor) -> Tensor:
    """Return KL(first || second), (M,), of log-probabilities (M, V)."""
    return (first.exp() * (first - second)).sum(1)
