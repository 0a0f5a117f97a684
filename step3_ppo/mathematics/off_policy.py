"""Weights of tokens that were not drawn from the policy that is trained, and how far the two differ.

A sampler computes in other types, with merged adapters, or with weights of an earlier update: its tokens follow mu, not
the policy at the start of the update, "old". N sequences, T response tokens, right-padded; tensors are fp32,
(N, T). `mask` (N, T) is True on the response's tokens; whatever the tensors hold elsewhere, NaN included, changes
nothing.

Sources: Yao et al. 2025 (truncated weights of tokens), fengyao.notion.site/off-policy-rl; Ling Team 2025 (IcePop:
masked weights of tokens), arXiv 2510.18855; Liu et al. 2025 (of sequences), "When Speed Kills Stability". The names of
kinds are TRL's, but for geometric_mask.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.tensor_ops import masked_mean, masked_sum, zero_outside
from step3_ppo.mathematics.estimators import LOG_RATIO_LIMIT, kl_estimate

WeightKind = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]


class Difference(NamedTuple):
    """Difference of the sampler's token probabilities from the trainer's: scalars over all tokens of a rollout."""

    mean_abs: Tensor  # of |log old - log mu|, of a token
    max_abs: Tensor
    kl: Tensor  # KL(mu || old) of a token: k3, unbiased since the tokens were drawn from mu
    effective_share: Tensor  # effective sample size of the tokens' ratios w, neither capped nor masked, per token


class WeightShares(NamedTuple):
    """Effect of the token weights on a rollout: scalars."""

    clipped: Tensor  # tokens whose weight is capped, or 0
    rejected: Tensor  # rows of which every weight is 0


def importance_weights(
    old: Tensor, mu: Tensor, mask: Tensor, *, kind: WeightKind, cap: float, low: float = 0.0
) -> Tensor:
    """Weights of tokens, (N, T) without a gradient, that multiply the loss of each: estimates of old / mu.

    With w_t = exp(old_t - mu_t), W the product over a row's tokens, and W^(1/n) their geometric mean:

        token_truncate     min(w_t, cap)
        token_mask         w_t where low <= w_t <= cap, else 0
        sequence_truncate  min(W, cap) for each token of the row
        sequence_mask      W where low <= W <= cap, else 0, for each token of the row
        geometric_mask     1 where low <= W^(1/n) <= cap, else 0, for each token of the row: it rejects, and corrects
                           nothing; `cap` and `low` are close to 1

    Only W without a cap makes the expected gradient that of the policy; w_t leaves out that mu drew the other tokens of
    the row too. Losses are divided by the number of all tokens, those of weight 0 among them. Logarithms of ratios are
    clamped to +-20.
    """
    old, mu = zero_outside(mask, old.detach(), mu.detach())
    log_ratio = old - mu
    ratio = _exp(log_ratio)
    if kind in ("sequence_truncate", "sequence_mask"):
        ratio = _exp(log_ratio.sum(1, keepdim=True))
    elif kind == "geometric_mask":
        ratio = _exp(log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1))
    if kind in ("token_truncate", "sequence_truncate"):
        weights = ratio.clamp(max=cap)
    else:
        accepted = torch.ones_like(ratio) if kind == "geometric_mask" else ratio
        weights = torch.where((ratio >= low) & (ratio <= cap), accepted, 0)
    return torch.where(mask, weights, 0)


def difference_metrics(old: Tensor, mu: Tensor, mask: Tensor) -> Difference:
    """Compare the log-probabilities of the trainer with those of the sampler; 0 where no token counts."""
    old, mu = zero_outside(mask, old.detach(), mu.detach())
    distance = (old - mu).abs()
    ratio = _exp(old - mu).double()
    total, squares = masked_sum(ratio, mask), masked_sum(ratio.square(), mask)
    return Difference(
        mean_abs=masked_mean(distance, mask),
        max_abs=distance.max(),
        kl=masked_mean(kl_estimate(mu, old, estimator="k3"), mask),
        effective_share=total.square() / (mask.sum() * squares).clamp(min=1e-30),
    )


def weight_shares(weights: Tensor, mask: Tensor, *, cap: float) -> WeightShares:
    """Shares of tokens and of rows, those that count, that `importance_weights` with this `cap` has cut."""
    (weights,) = zero_outside(mask, weights)
    rows = mask.any(1)
    return WeightShares(
        clipped=masked_mean(((weights == 0) | (weights >= cap)).float(), mask),
        rejected=masked_mean((weights == 0).all(1).float(), rows),
    )


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
