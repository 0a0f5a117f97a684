"""The losses of PPO and what is logged of them: pure functions of tensors, coefficients as keyword-only numbers.

B sequences, T response tokens, right-padded; tensors are fp32, (B, T). `response_mask` (B, T) is True on the response's
tokens, its EOS included. Whatever the tensors hold elsewhere, NaN included, changes no loss and no gradient.

Losses are sums over tokens. The caller divides by the global count of response tokens, so that any number of ranks and
any micro-batch size give the same gradient. Sources: Schulman et al. 2017 (PPO), arXiv 1707.06347; Ziegler et al. 2019,
arXiv 1909.08593; Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.tensor_ops import masked_sum, zero_outside
from step3_ppo.estimators import LOG_RATIO_LIMIT, KlEstimator, kl_estimate


class PolicyStats(NamedTuple):
    """Sums over the response tokens of one batch, detached scalars: add them up over batches and ranks, but take the
    maximum of the two `_max` fields."""

    ratio_sum: Tensor  # of new probability / old probability
    ratio_max: Tensor
    abs_log_ratio_max: Tensor  # before any clamp; 0 on the first update of a rollout
    clipped_count: Tensor  # tokens where the clipped objective is the smaller one: they have no gradient
    approx_kl_sum: Tensor  # k3 estimate of KL(old policy || new policy): unbiased and never negative


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, estimator: KlEstimator) -> Tensor:
    """KL(policy || ref) to minimise, summed over the response tokens; its gradient is that of k2 for k2 and for k3.

    For tokens a drawn from the policy p, with d = log p(a) - log ref(a):
        grad KL = sum_a p (d + 1) grad log p = E[d * grad log p] = E[grad k2], since E[grad log p] = 0.
    k1 would give E[grad log p] = 0, pure noise, and is refused. k3 alone would give E[(1 - ref/p) grad log p], the
    gradient of the opposite divergence KL(ref || p). So "k3" reports k3's value and passes k2's gradient.
    """
    if estimator == "k1":
        raise ValueError("the KL estimator k1 has no gradient in expectation: use k2 or k3 in a loss")
    log_probs, ref_log_probs = zero_outside(response_mask, log_probs, ref_log_probs)
    k2 = kl_estimate(log_probs, ref_log_probs, estimator="k2")
    if estimator == "k2":
        return k2.sum()
    value = kl_estimate(log_probs.detach(), ref_log_probs, estimator=estimator)
    return (value + (k2 - k2.detach())).sum()


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, policy_clip: float
) -> tuple[Tensor, PolicyStats]:
    """-sum_t min(ratio_t * A_t, clip(ratio_t, 1 - policy_clip, 1 + policy_clip) * A_t); Schulman et al. 2017, eq. 7.

    ratio_t = exp(log_probs - old_log_probs), the difference clamped before exp so that one token cannot make it Inf.
    """
    log_probs, old_log_probs, advantages = zero_outside(response_mask, log_probs, old_log_probs, advantages)
    ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - policy_clip, 1 + policy_clip)
    loss = masked_sum(torch.maximum(unclipped, clipped), response_mask)
    return loss, _policy_stats(log_probs.detach(), old_log_probs, ratio.detach(), clipped > unclipped, response_mask)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """sum_t 0.5 * max((V_t - R_t)**2, (clip(V_t, V_old_t - c, V_old_t + c) - R_t)**2) with c = `value_clip`.

    After the code of Ziegler et al. 2019 (lm-human-preferences, train_policy.py). None turns the clip off. Returns
    (loss, clipped count): the count is of the tokens whose clipped error is the larger one.
    """
    values, old_values, returns = zero_outside(response_mask, values, old_values, returns)
    unclipped = (values - returns).square()
    if value_clip is None:
        return 0.5 * unclipped.sum(), values.new_zeros(())
    # Not old + clamp(new - old): that is not exactly `new` inside the range, and rounding would count as clipping.
    near_old = values.clamp(old_values - value_clip, old_values + value_clip)
    clipped = (near_old - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped).sum(), (clipped > unclipped).float().sum()


def _policy_stats(
    log_probs: Tensor, old_log_probs: Tensor, ratio: Tensor, is_clipped: Tensor, response_mask: Tensor
) -> PolicyStats:
    return PolicyStats(
        ratio_sum=masked_sum(ratio, response_mask),
        ratio_max=torch.where(response_mask, ratio, 0).max(),
        abs_log_ratio_max=(log_probs - old_log_probs).abs().max(),
        clipped_count=masked_sum(is_clipped.float(), response_mask),
        approx_kl_sum=kl_estimate(old_log_probs, log_probs, estimator="k3").sum(),
    )
