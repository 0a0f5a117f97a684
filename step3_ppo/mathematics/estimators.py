"""Estimates of PPO for language models: KL divergence, token rewards, advantages; pure functions of tensors.

B sequences, T response tokens, right-padded; tensors are fp32, (B, T) per token or (B,) per sequence. `response_mask`
(B, T) is True on the response's tokens, its EOS included. Functions that take it ignore what tensors hold elsewhere,
NaN included, and return 0 there. The losses are in losses.py.

Sources: Ziegler et al. 2019, arXiv 1909.08593; Schulman et al. 2016 (GAE), arXiv 1506.02438; Schulman 2020,
"Approximating KL Divergence", joschu.net/blog/kl-approx.html; Yue et al. 2025 (VAPO), arXiv 2504.05118. Methods without
a critic: Shao et al. 2024 (GRPO), arXiv 2402.03300; Liu et al. 2025 (Dr.GRPO), 2503.20783; Yu et al. 2025 (DAPO),
2503.14476; Ahmadian et al. 2024 (RLOO), 2402.14740; Hu et al. 2025 (REINFORCE++), 2501.03262.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.tensor_ops import check_tokens, finish_moments, zero_outside

KlEstimator = Literal["k1", "k2", "k3"]

# exp(20) is 5e8: far beyond any ratio of a healthy run, and its square is still finite in fp32.
LOG_RATIO_LIMIT = 20.0
# Number of tokens whose discounted sums are one matrix product; chosen by hand.
SUM_BLOCK = 256

# Epsilon that is added to a standard deviation before scores are divided by it, as in TRL.
DEVIATION_EPSILON = 1e-4

# Ziegler et al. 2019, section 2.2: the controller never reacts to more than a 20 % error.
ADAPTIVE_KL_ERROR_LIMIT = 0.2


# --- KL divergence ---


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Return KL(policy || ref), (B, T), estimated at each token that the policy sampled; Schulman 2020.

    With d = log_probs - ref_log_probs: k1 = d (unbiased, signed), k2 = d**2 / 2 (biased, low variance),
    k3 = exp(-d) - 1 + d (unbiased, never negative).
    """
    check_tokens(log_probs, ref_log_probs)
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # Clamped before exp: clamping its infinity afterwards would leave 0 * inf = NaN in the gradient.
        negated = (-difference).clamp(max=LOG_RATIO_LIMIT)
        return torch.expm1(negated) - negated
    raise ValueError(f"unknown KL estimator {estimator!r}: use k1, k2 or k3")


def next_kl_coef(kl_coef: float, observed_kl: float, *, target: float, horizon: float, num_sequences: int) -> float:
    """Return the next KL coefficient of a proportional controller; Ziegler et al. 2019, section 2.2.

    e = clip((observed - target) / target, -0.2, 0.2);  coef * (1 + e * num_sequences / horizon)
    `observed_kl` is the mean over sequences of k1 summed over a sequence's tokens. The sequences are the
    `num_sequences` of all ranks since the last call.
    """
    if math.isnan(observed_kl):
        raise ValueError("the observed KL is NaN: skip the update of the KL coefficient for this rollout")
    error = (observed_kl - target) / target
    error = min(max(error, -ADAPTIVE_KL_ERROR_LIMIT), ADAPTIVE_KL_ERROR_LIMIT)
    return kl_coef * (1 + error * num_sequences / horizon)


# --- rewards ---


def normalise_scores(scores: Tensor, *, mean: float, std: float) -> Tensor:
    """Return (scores - mean) / std with the constants of a reward; stage 2 has measured those of a reward model."""
    assert std > 0, std
    return (scores - mean) / std


def missing_eos(scores: Tensor, finished: Tensor, *, penalty: float) -> Tensor:
    """Subtract `penalty` from truncated responses: `finished` (B,) is True for those that ended with EOS."""
    assert finished.dtype == torch.bool and finished.shape == scores.shape, (finished.dtype, finished.shape)
    return torch.where(finished, scores, scores - penalty)


def weighted_sum(scores: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum (B,) of the scores (B,) of each reward; one alone with weight 1 keeps its bits."""
    first, *others = (weight * column for column, weight in zip(scores, weights, strict=True))
    return sum(others, start=first)


def shape_scores(
    scores: Sequence[Tensor],
    weights: Sequence[float],
    finished: Tensor,
    *,
    reward_clip: float,
    missing_eos_penalty: float,
) -> Tensor:
    """Return sequence rewards (B,) from the normalised scores (B,) of each reward.

    Each score is clipped to [-reward_clip, reward_clip] before the weighted sum, so none outweighs its share. The
    penalty is subtracted once after that, so the clip cannot hide it.
    """
    clipped = [column.clamp(-reward_clip, reward_clip) for column in scores]
    total = weighted_sum(clipped, weights)
    _check_sequences(total)
    return missing_eos(total, finished, penalty=missing_eos_penalty)


def token_rewards(sequence_rewards: Tensor, kl: Tensor, response_mask: Tensor, *, kl_coef: float) -> Tensor:
    """r_t = -kl_coef * kl_t, plus the sequence reward at the last response token (index length - 1); (B, T).

    Ziegler et al. 2019, section 2.2, R = r - coef * log(policy / ref), spread over the tokens. A row without tokens,
    which only fills a batch, gets no reward.
    """
    check_tokens(kl, mask=response_mask)
    _check_sequences(sequence_rewards, num_sequences=len(kl))
    last_index = response_mask.sum(1, keepdim=True) - 1  # (B, 1)
    is_last = torch.arange(kl.shape[1], device=kl.device) == last_index  # (B, T)
    penalties = torch.where(response_mask, -kl_coef * kl, 0)
    return penalties + torch.where(is_last, sequence_rewards.unsqueeze(1), 0)


# --- advantages ---


def estimate_advantages(
    rewards: Tensor,
    values: Tensor | None,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    returns_lambda: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; Schulman et al. 2016, section 3, equation 16. Returns (advantages, returns).

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1};  returns_t = A_t + V_t
    V_t is the value before token t is chosen. After the last token, V = 0 and A = 0. This also holds for a truncated
    response: the critic's value is not bootstrapped there, and `missing_eos` can penalise the score instead.

    Without values V = 0 and lambda = 1: the advantage is the discounted sum of rewards, which begins with t's own. That
    is the REINFORCE estimate (Williams 1992). Methods without a critic differ in the sequence rewards that
    `token_rewards` spreads, all with gamma = 1:

        REINFORCE++           the scores, with the KL in the token rewards; the result is whitened over the batch
        REINFORCE++-baseline  `group_advantages` of the scores, scale=False; else the same
        RLOO                  `leave_one_out_advantages` of the rows' sums of token rewards; then no KL a second time
        GRPO, Dr.GRPO, DAPO   `group_advantages` of the scores; the KL, if any, in the loss

    A sequence reward without KL gives all tokens of its row the same advantage.

    Args:
        returns_lambda: lambda of the A in the returns; None: that of the advantages.
    """
    if values is None:
        values, gae_lambda, returns_lambda = torch.zeros_like(rewards), 1.0, None
    rewards, values = zero_outside(response_mask, rewards, values)
    next_values = functional.pad(values[:, 1:], (0, 1))
    errors = rewards + gamma * next_values - values
    advantages = discounted_sums(errors, gamma * gae_lambda)
    if returns_lambda is None:
        return advantages, advantages + values
    return advantages, discounted_sums(errors, gamma * returns_lambda) + values


def discounted_sums(terms: Tensor, decay: float) -> Tensor:
    """(B, T) -> (B, T): s_t = terms_t + decay * s_{t+1}, as products with powers of `decay` in fp64.

    A loop over tokens would launch thousands of small kernels. Blocks keep the matrix of powers small.
    """
    sums = torch.empty_like(terms)
    carried = terms.new_zeros(len(terms), 1, dtype=torch.float64)  # the sum after the block
    for stop in range(terms.shape[1], 0, -SUM_BLOCK):
        start = max(0, stop - SUM_BLOCK)
        position = torch.arange(stop - start, device=terms.device)
        distance = (position.unsqueeze(1) - position).double()  # [j, t]: term j counts towards sum t from j = t on
        powers = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0)
        block = terms[:, start:stop].double() @ powers + carried * decay ** (stop - start - position).double()
        sums[:, start:stop] = block
        carried = block[:, :1]
    return sums


def explained_variance(return_moments: Tensor, error_moments: Tensor) -> Tensor:
    """Return 1 - Var[returns - values] / Var[returns], a float64 scalar; NaN where the returns do not vary.

    Both arguments are results of `tensor_ops.moments`: (count, sum, sum of squares), float64 (3,), which add up over
    micro-batches and ranks. `return_moments` are those of the returns, `error_moments` of returns - values.
    """
    return_variance = finish_moments(return_moments)[1]
    error_variance = finish_moments(error_moments)[1]
    return torch.where(return_variance > 0, 1 - error_variance / return_variance, torch.nan)


# --- groups: N rows are the responses to G prompts, k = group_size to each: N = G * k, in order of prompt ---


def group_advantages(scores: Tensor, valid: Tensor, *, group_size: int, scale: bool) -> Tensor:
    """Return each score (N,) minus the mean of its group, (N,).

    With `scale` it is divided by the group's unbiased standard deviation + 1e-4: GRPO; without it: Dr.GRPO. Only rows
    that are True in `valid` (N,) count. The result is 0 for other rows, and for a row that is the only valid one of its
    group.
    """
    grouped, compared, counts = _groups(scores, valid, group_size)
    differences = torch.where(compared, grouped - grouped.sum(1, keepdim=True) / counts.clamp(min=1), 0)
    if scale:
        variances = differences.square().sum(1, keepdim=True) / (counts - 1).clamp(min=1)
        differences = differences / (variances.sqrt() + DEVIATION_EPSILON)
    return differences.flatten().to(scores.dtype)


def leave_one_out_advantages(scores: Tensor, valid: Tensor, *, group_size: int) -> Tensor:
    """Return each score minus the mean of the other valid scores of its group, (N,): RLOO.

    Arguments, and rows whose result is 0, are as in `group_advantages`.
    """
    grouped, compared, counts = _groups(scores, valid, group_size)
    others = (grouped.sum(1, keepdim=True) - grouped) / (counts - 1).clamp(min=1)
    return torch.where(compared, grouped - others, 0).flatten().to(scores.dtype)


def equal_groups(scores: Tensor, valid: Tensor, *, group_size: int) -> Tensor:
    """Return (G,) bool: True if all valid scores of a group are equal, or none is valid; DAPO replaces such groups."""
    counted = valid.view(-1, group_size)
    grouped = scores.view(-1, group_size)
    return torch.where(counted, grouped, -torch.inf).amax(1) <= torch.where(counted, grouped, torch.inf).amin(1)


def _groups(scores: Tensor, valid: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, comparable rows and counts by group.

    - (G, k) float64: scores, 0 where not valid. In fp64 the mean of equal scores is exactly that score, so that their
      advantages are 0.
    - (G, k) bool: True if the row is valid and its group has another valid row.
    - (G, 1) int64: number of valid rows of the group.
    """
    assert valid.dtype == torch.bool and valid.shape == scores.shape, (valid.dtype, valid.shape, scores.shape)
    counted = valid.view(-1, group_size)
    counts = counted.sum(1, keepdim=True)
    return torch.where(counted, scores.view(-1, group_size).double(), 0), counted & (counts > 1), counts


# --- scale of rewards ---


def updated_spread(spread: Tensor, scores: Tensor, valid: Tensor) -> Tensor:
    """Add the scores (N,) of one more rollout to the statistics `spread`; return the new statistics, float64 (3,).

    A spread is (count, mean, sum of squared differences from the mean) of all scores so far, merged as by Chan et al.
    1979. The first one is zeros. NaN and rows that are not `valid` (N,) do not count.
    """
    counted = valid & ~scores.isnan()
    added = counted.sum().double()
    new = torch.where(counted, scores.double(), 0)
    mean = new.sum() / added.clamp(min=1)
    squares = torch.where(counted, new - mean, 0).square().sum()
    count, old_mean, old_squares = spread.unbind()
    total, shift = count + added, mean - old_mean
    share = added / total.clamp(min=1)
    return torch.stack([total, old_mean + shift * share, old_squares + squares + shift.square() * count * share])


def spread_deviation(spread: Tensor) -> Tensor:
    """Return the unbiased standard deviation of the scores in `spread`, a float64 scalar; 0 of fewer than two scores.

    TRL's scale_rewards="batch" divides each score's difference from its group's mean by this + `DEVIATION_EPSILON`, for
    the scores of one whole rollout.
    """
    count, _, squares = spread.unbind()
    return (squares / (count - 1).clamp(min=1)).sqrt()


# --- checks ---


def _check_sequences(tensor: Tensor, num_sequences: int | None = None) -> None:
    assert tensor.dim() == 1 and tensor.dtype == torch.float32, (tensor.shape, tensor.dtype)
    assert num_sequences is None or len(tensor) == num_sequences, (tensor.shape, num_sequences)
