"""Conversion of raw scores to rewards and advantages: the Experience of a rollout, and its logged numbers.

N sequences, T longest response, R rewards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.rewards.rows import Scale
from pipeline.tensor_ops import finish_moments, masked_mean, moments, whiten
from step3_ppo.experience import Experience, Responses, RewardScores, Scores, ValueTargets
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.flags.methods import METHODS
from step3_ppo.mathematics.estimators import (
    DEVIATION_EPSILON,
    equal_groups,
    estimate_advantages,
    group_advantages,
    kl_estimate,
    leave_one_out_advantages,
    normalise_scores,
    shape_scores,
    spread_deviation,
    token_rewards,
    updated_spread,
    weighted_sum,
)
from step3_ppo.mathematics.off_policy import importance_weights


@dataclass(frozen=True, slots=True)
class Rewarded:
    """An Experience, and numbers for its metrics.

    experience: tensors for the updates.
    valid: (N,) bool, True = the row counts and all its numbers are finite.
    scores: (N,) fp32, raw scores, of several rewards their weighted sum; NaN where a reward gives no score. Without
        rewards, minus the mean of `kl` over the response: how much more probable the teacher finds its tokens than
        the policy does.
    by_reward: name of a reward -> (N,) fp32, its raw scores; NaN where it gives none.
    failures: name of a reward function -> (N,) bool, True = its call failed.
    sequence_rewards: (N,) fp32, rewards before the KL penalty.
    total_rewards: (N,) fp32, sums of the rewards of a row's tokens: with the KL penalty unless it is in the loss.
    clipped: (N,) bool, True = `reward_clip` clipped the score of a reward model.
    kl: (N, T) fp32, KL estimate k1; None without a reference.
    kl_k3: (N, T) fp32, KL estimate k3; None without a reference.
    advantage_mean: mean of the advantages before whitening.
    advantage_std: standard deviation of the advantages before whitening.
    equal_share: of groups with a response that counts, those whose rewards are all equal; NaN without groups.
    """

    experience: Experience
    valid: Tensor
    scores: Tensor
    by_reward: Mapping[str, Tensor]
    failures: Mapping[str, Tensor]
    sequence_rewards: Tensor
    total_rewards: Tensor
    clipped: Tensor
    kl: Tensor | None
    kl_k3: Tensor | None
    advantage_mean: float
    advantage_std: float
    equal_share: float


def reward_responses(
    responses: Responses,
    scores: Scores,
    judged: RewardScores,
    ppo: PPOCoefficients,
    *,
    kl_coef: float,
    group_size: int = 1,
) -> Rewarded:
    """Compute rewards, advantages and returns of a whole rollout; every rank has all rows, so whitening sees all.

    Before anything is averaged, it masks rows without any reward that applies, and rows with a number that is not
    finite, even in a single reward.

    group_size: responses to each prompt, which are next to each other.
    """
    columns = [one for one in (scores.log_probs, scores.ref_log_probs, scores.values) if one is not None]
    valid = is_scored(responses, judged) & torch.stack([column.isfinite().all(1) for column in columns]).all(0)
    normalised, shaped, at_tokens = summed(responses, judged, valid, ppo)
    alike = equal_groups(shaped, valid, group_size=group_size)
    equal_share = alike[valid.view(-1, group_size).any(1)].float().mean().item()
    if ppo.replace_equal_groups and group_size > 1:
        valid = valid & ~alike.repeat_interleave(group_size)
        shaped = torch.where(valid, shaped, 0.0)
    mask = responses.response_mask & valid.unsqueeze(1)
    log_probs, *rest = (torch.where(mask, tensor, 0.0) for tensor in columns)
    ref_log_probs = None if scores.ref_log_probs is None else rest.pop(0)
    values = rest[0] if rest else None
    kl, penalty = kl_and_penalty(ppo, log_probs, ref_log_probs)
    per_token = token_rewards(shaped, penalty, mask, kl_coef=kl_coef)
    if at_tokens is not None:
        # What a function gives tokens stands at them, and not at the last one.
        per_token = per_token + token_rewards(-at_tokens.sum(1), torch.zeros_like(kl), mask, kl_coef=0.0) + at_tokens
    advantages, returns = advantages_of(ppo, per_token, shaped, values, mask, group_size=group_size)
    if METHODS[ppo.method].has_teacher:
        taught = torch.where(mask, -kl_coef * penalty, 0.0)
        advantages = taught_advantages(ppo, taught, shaped, mask, group_size=group_size)
    targets = None if values is None else ValueTargets(values, returns)
    mean, variance = finish_moments(moments(advantages, mask))
    trained = whiten(advantages, mask, mean=mean, var=variance) if ppo.whiten_advantages else advantages
    by_reward = {one.name: column for one, column in zip(judged.rewards, judged.values.unbind(1), strict=True)}
    failed = zip(judged.rewards, (judged.applies & ~judged.values.isfinite()).unbind(1), strict=True)
    return Rewarded(
        experience=Experience(mask, log_probs, ref_log_probs, trained, targets),
        valid=valid,
        scores=summed_raw(judged) if by_reward else -masked_mean(kl, mask, dim=1),
        by_reward=by_reward,
        failures={one.name: column for one, column in failed if one.scale is None},
        sequence_rewards=shaped,
        total_rewards=per_token.sum(1),
        clipped=torch.stack([column.abs() > ppo.reward_clip for column in normalised or [shaped * 0]]).any(0),
        kl=None if ref_log_probs is None else kl,
        kl_k3=None if ref_log_probs is None else kl_estimate(log_probs, ref_log_probs, estimator="k3"),
        advantage_mean=mean.item(),
        advantage_std=variance.sqrt().item(),
        equal_share=equal_share,
    )


def is_scored(responses: Responses, judged: RewardScores) -> Tensor:
    """(N,) bool, True = the row counts, each reward that applies gives it a finite score, and some reward does."""
    if not judged.rewards:  # distillation without rewards
        return responses.valid
    return responses.valid & judged.applies.any(1) & (judged.values.isfinite() | ~judged.applies).all(1)


def kl_and_penalty(ppo: PPOCoefficients, log_probs: Tensor, ref_log_probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the KL estimate k1 (N, T), and the estimate that rewards get less of; 0 without a reference.

    With the KL in the loss the rewards have no penalty.
    """
    zero = torch.zeros_like(log_probs)
    if ref_log_probs is None:
        return zero, zero
    kl = kl_estimate(log_probs, ref_log_probs, estimator="k1")
    return kl, zero if ppo.kl_in_loss else kl_estimate(log_probs, ref_log_probs, estimator=ppo.sampled_estimator)


def rewarded_alike(responses: Responses, judged: RewardScores, ppo: PPOCoefficients, *, group_size: int) -> Tensor:
    """(N / group_size,) bool, True = the rewards before the KL penalty of all responses to the prompt are equal."""
    valid = is_scored(responses, judged)
    _, shaped, _ = summed(responses, judged, valid, ppo)
    return equal_groups(shaped, valid, group_size=group_size)


def summed_raw(judged: RewardScores) -> Tensor:
    """Return the weighted sum (N,) of raw scores; a function that gives a response none counts as 0 there."""
    columns = zip(judged.rewards, judged.values.unbind(1), strict=True)
    raw = [column.nan_to_num(0.0) if one.scale is None else column for one, column in columns]
    return weighted_sum(raw, [one.weight for one in judged.rewards])


def fitted_scales(responses: Responses, judged: RewardScores) -> list[Scale | None]:
    """Return the constants of each reward; of one that takes those of the first rollout, the constants of these scores.

    Those that take them do so in each rollout until a run has set them.
    """
    columns = judged.values[responses.valid].unbind(1)
    return [one.scale and one.scale.fitted(column) for one, column in zip(judged.rewards, columns, strict=True)]


def updated_spreads(
    responses: Responses, judged: RewardScores, previous: Sequence[Sequence[float]] | None
) -> list[list[float]]:
    """Return the spread of each reward's raw scores in this rollout, continued from its `previous` value."""
    columns = judged.values.unbind(1)
    before = previous or [[0.0, 0.0, 0.0] for _ in columns]
    starts = [torch.tensor(one, dtype=torch.float64, device=judged.values.device) for one in before]
    return [updated_spread(one, column, responses.valid).tolist() for one, column in zip(starts, columns, strict=True)]


def deviations(scales: Sequence[Scale | None], spreads: Sequence[Sequence[float]]) -> list[float]:
    """Return what each raw score is divided by, besides the std of its scale; 1 without spreads.

    Scores that never vary are divided by 1 as well: they teach nothing.
    """
    if not spreads:
        return [1.0] * len(scales)
    spread = [spread_deviation(torch.tensor(one, dtype=torch.float64)).item() for one in spreads]
    stds = [one.std if one else 1.0 for one in scales]
    return [(one + DEVIATION_EPSILON) / std if one else 1.0 for one, std in zip(spread, stds, strict=True)]


def summed(
    responses: Responses, judged: RewardScores, valid: Tensor, ppo: PPOCoefficients
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Sum the rewards of each response with their weights; rows that do not count have 0 of each.

    Returns (normalised scores (N,) of each reward model, sequence rewards (N,), their part that functions gave to
    tokens, (N, T), or None).
    """
    scales, weights = fitted_scales(responses, judged), [one.weight for one in judged.rewards]
    divisors = deviations(scales, judged.spreads)
    raw = torch.where(valid.unsqueeze(1), judged.values, 0.0)
    normalised = [
        normalise_scores(column, mean=scale.mean, std=scale.std) / divisor
        for column, scale, divisor in zip(raw.unbind(1), scales, divisors, strict=True)
        if scale is not None
    ]
    num_models, none = len(normalised), torch.zeros(len(valid), device=valid.device)
    limits = {"reward_clip": ppo.reward_clip, "missing_eos_penalty": ppo.missing_eos_penalty}
    shaped = shape_scores(normalised or [none], weights[:num_models] or [1.0], responses.finished, **limits)
    if num_models == len(weights):
        return normalised, shaped, None
    shares = zip(weights[num_models:], divisors[num_models:], strict=True)
    factors = torch.tensor([weight / divisor for weight, divisor in shares], device=valid.device)
    counts = (valid.unsqueeze(1) & judged.applies[:, num_models:]).float() * factors  # (N, F)
    at_tokens = None if judged.per_token is None else (judged.per_token * counts.unsqueeze(2)).sum(1)
    return normalised, shaped + (raw[:, num_models:].nan_to_num(0.0) * counts).sum(1), at_tokens


def advantages_of(
    ppo: PPOCoefficients,
    rewards: Tensor,
    shaped: Tensor,
    values: Tensor | None,
    mask: Tensor,
    *,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Return the advantages and the returns, (N, T) each, that the method makes of token rewards (N, T).

    A method that compares responses gives all tokens of one the same advantage, that of the sum of its rewards.

    Args:
        shaped: (N,) fp32, the sequence rewards among them.
    """
    valid, totals = mask.any(1), rewards.sum(1)
    if ppo.method == "grpo":
        compared = group_advantages(totals, valid, group_size=group_size, scale=ppo.scale_by_group)
        return torch.where(mask, compared.unsqueeze(1), 0.0), rewards
    if ppo.method == "rloo":
        compared = leave_one_out_advantages(totals, valid, group_size=group_size)
        return torch.where(mask, compared.unsqueeze(1), 0.0), rewards
    if ppo.group_baseline:
        baseline = shaped - group_advantages(shaped, valid, group_size=group_size, scale=False)
        rewards = rewards - token_rewards(baseline, torch.zeros_like(rewards), mask, kl_coef=0.0)
    of_returns = ppo.gae_lambda if ppo.returns_lambda < 0 else ppo.returns_lambda
    return estimate_advantages(
        rewards, values, mask, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda, returns_lambda=of_returns
    )


def taught_advantages(ppo: PPOCoefficients, taught: Tensor, shaped: Tensor, mask: Tensor, *, group_size: int) -> Tensor:
    """Return the advantages (N, T) of distillation.

    Those of the teacher are discounted sums of its token rewards from each token on, by default of that token alone,
    whose expectation is then the gradient of the reverse KL at the token. To them is added, for all tokens of a
    response, its reward less the mean reward of the prompt's responses.

    Args:
        taught: (N, T) fp32, kl_coef * (log teacher - log policy) of the sampled tokens; 0 with the KL in the loss.
        shaped: (N,) fp32, sequence rewards; 0 without rewards.
    """
    advantages, _ = estimate_advantages(taught, None, mask, gamma=ppo.gamma, gae_lambda=1.0)
    if group_size == 1:
        return advantages
    compared = group_advantages(shaped, mask.any(1), group_size=group_size, scale=False)
    return advantages + torch.where(mask, compared.unsqueeze(1), 0.0)


def off_policy_weights(ppo: PPOCoefficients, old: Tensor, sampled: Tensor, mask: Tensor) -> Tensor:
    """(N, T) weights of the tokens' losses: of the trainer's log-probabilities, `old`, over those of the sampler."""
    return importance_weights(
        old,
        sampled[:, : mask.shape[1]],
        mask,
        kind=ppo.off_policy_weights,  # type: ignore[arg-type]  # not called for "none" and "auto"
        cap=ppo.off_policy_cap,
        low=ppo.off_policy_low,
    )
