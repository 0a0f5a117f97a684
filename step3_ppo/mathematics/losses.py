"""The losses of PPO and what is logged of them: pure functions of tensors, coefficients as keyword-only numbers.

B sequences, T response tokens, right-padded; tensors are fp32, (B, T). `response_mask` (B, T) is True on the response's
tokens, its EOS included. Whatever the tensors hold elsewhere, NaN included, changes no loss and no gradient.

Losses are sums over tokens. The caller divides by the global count of response tokens, so that any number of ranks and
any micro-batch size give the same gradient. `weights`, (B, T) or (B, 1), multiply the loss of each token and have no
gradient: `row_factors`, which make other means of the tokens, and those of off_policy.py.

Sources: Schulman et al. 2017 (PPO), arXiv 1707.06347; Ziegler et al. 2019, arXiv 1909.08593; Schulman 2020,
"Approximating KL Divergence", joschu.net/blog/kl-approx.html; Yu et al. 2025 (DAPO), 2503.14476; Ye et al. 2020 (dual
clip), 1912.09729; Zheng et al. 2025 (GSPO), 2507.18071; MiniMax 2025 (CISPO), 2506.13585; Liu et al. 2025 (Dr.GRPO),
2503.20783; Yue et al. 2025 (VAPO), 2504.05118.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.tensor_ops import masked_sum, zero_outside
from step3_ppo.mathematics.estimators import LOG_RATIO_LIMIT, KlEstimator, kl_estimate

RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


class PolicyStats(NamedTuple):
    """Sums over the response tokens of one batch, detached scalars: add them up over batches and ranks, but take the
    maximum of the two `_max` fields."""

    ratio_sum: Tensor  # of new probability / old probability
    ratio_max: Tensor
    abs_log_ratio_max: Tensor  # before any clamp; 0 on the first update of a rollout
    clipped_low: Tensor  # tokens of a clip below the ratio of 1: they have no gradient
    clipped_high: Tensor  # of a clip above, the dual one among them; with CISPO capped ones, which keep their gradient
    approx_kl_sum: Tensor  # k3 estimate of KL(old policy || new policy): unbiased and never negative

    @property
    def clipped_count(self) -> Tensor:
        """Tokens of either clip."""
        return self.clipped_low + self.clipped_high


def row_factors(
    response_mask: Tensor, *, aggregation: Aggregation, num_tokens: int, num_rows: int, longest: int
) -> Tensor:
    """Weights of rows (B, 1) with which the sum of a loss over tokens, divided by `num_tokens`, is another mean.

    token_mean     1: every token of the step weighs the same
    sequence_mean  num_tokens / (num_rows * length of the row): the mean over rows of the mean over a row's tokens
    constant       num_tokens / (num_rows * longest): Dr.GRPO's, where a row's length does not divide its loss

    Args:
        num_tokens: response tokens that count, of the whole step.
        num_rows: rows of the whole step with any such token.
        longest: tokens of the longest response that a run allows.
    """
    lengths = response_mask.sum(1, keepdim=True).clamp(min=1)  # a row without tokens has nothing to weigh
    if aggregation == "token_mean":
        return torch.ones_like(lengths, dtype=torch.float32)
    if aggregation == "sequence_mean":
        return num_tokens / (num_rows * lengths)
    if aggregation == "constant":
        return num_tokens / (num_rows * torch.full_like(lengths, longest))
    raise ValueError(f"unknown aggregation {aggregation!r}: use token_mean, sequence_mean or constant")


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    estimator: KlEstimator,
    weights: Tensor | None = None,
) -> Tensor:
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
        return weighted_sum(k2, response_mask, weights)
    value = kl_estimate(log_probs.detach(), ref_log_probs, estimator=estimator)
    return weighted_sum(value + (k2 - k2.detach()), response_mask, weights)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    policy_clip: float,
    policy_clip_high: float | None = None,
    dual_clip: float | None = None,
    importance_sampling_level: RatioLevel = "token",
    weights: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """-sum_t min(ratio_t * A_t, clip(ratio_t, 1 - policy_clip, 1 + policy_clip) * A_t); Schulman et al. 2017, eq. 7.

    ratio_t = exp(log_probs - old_log_probs), the difference clamped before exp so that one token cannot make it Inf.

    Args:
        policy_clip_high: clip range above 1 (DAPO); None: `policy_clip`.
        dual_clip: c > 1: where A_t < 0 the objective is not below c * A_t (Ye et al. 2020), so that a ratio above c
            has no gradient; None or 0: no such bound.
        importance_sampling_level: "sequence" takes the geometric mean of its tokens' ratios for each token of a row,
            exp(mean_t log ratio_t), with its gradient (GSPO).
    """
    log_probs, old_log_probs, advantages = zero_outside(response_mask, log_probs, old_log_probs, advantages)
    ratio = _ratios(log_probs - old_log_probs, response_mask, importance_sampling_level)
    unclipped = -advantages * ratio
    high = policy_clip if policy_clip_high is None else policy_clip_high
    clipped = -advantages * ratio.clamp(1 - policy_clip, 1 + high)
    is_clipped, losses = clipped > unclipped, torch.maximum(unclipped, clipped)
    is_low, is_high = is_clipped & (advantages < 0), is_clipped & (advantages > 0)
    if dual_clip:
        bound = -advantages * dual_clip
        is_bounded = (advantages < 0) & (losses > bound)
        losses, is_high = torch.where(is_bounded, bound, losses), is_high | is_bounded
    stats = _policy_stats(log_probs.detach(), old_log_probs, ratio.detach(), (is_low, is_high), response_mask)
    return weighted_sum(losses, response_mask, weights), stats


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ratio_cap: float,
    importance_sampling_level: RatioLevel = "token",
    weights: Tensor | None = None,
) -> tuple[Tensor, PolicyStats]:
    """-sum_t min(ratio_t, ratio_cap) * A_t * log_probs_t, without a gradient through the ratio: CISPO.

    Every token keeps a gradient. `ratio_cap` bounds the ratio itself, not its distance from 1. The rest is as in
    `policy_loss`.
    """
    log_probs, old_log_probs, advantages = zero_outside(response_mask, log_probs, old_log_probs, advantages)
    ratio = _ratios((log_probs - old_log_probs).detach(), response_mask, importance_sampling_level)
    losses = -ratio.clamp(max=ratio_cap) * advantages * log_probs
    is_high = ratio > ratio_cap
    capped = (torch.zeros_like(is_high), is_high)
    stats = _policy_stats(log_probs.detach(), old_log_probs, ratio, capped, response_mask)
    return weighted_sum(losses, response_mask, weights), stats


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


def _ratios(log_ratio: Tensor, response_mask: Tensor, level: RatioLevel) -> Tensor:
    """(B, T) ratios of `log_ratio`, which is 0 outside the mask."""
    if level == "sequence":
        mean = log_ratio.sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def weighted_sum(losses: Tensor, response_mask: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of values of the response tokens, (B, T), each with its weight; those outside the mask are not read.

    Of exact divergences from another model it is the KL loss, of entropies the bonus that a loss gets less (Schulman
    et al. 2017, equation 9): both are of the whole distribution at each token, with its gradient.
    """
    if weights is not None:
        losses = losses * torch.where(response_mask, weights.detach(), 0)
    return masked_sum(losses, response_mask)


def _policy_stats(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ratio: Tensor,
    clipped: tuple[Tensor, Tensor],
    response_mask: Tensor,
) -> PolicyStats:
    """Statistics of detached tensors; `clipped` is True where a token is clipped (below, above)."""
    low, high = (masked_sum(is_clipped.float(), response_mask) for is_clipped in clipped)
    return PolicyStats(
        ratio_sum=masked_sum(ratio, response_mask),
        ratio_max=torch.where(response_mask, ratio, 0).max(),
        abs_log_ratio_max=(log_probs - old_log_probs).abs().max(),
        clipped_low=low,
        clipped_high=high,
        approx_kl_sum=kl_estimate(old_log_probs, log_probs, estimator="k3").sum(),
    )
