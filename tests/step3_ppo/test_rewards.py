"""Rewards, advantages and the metrics of a rollout, worked by hand and by slow loops."""

import copy
import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from support.reward_rows import (
    LENGTHS,
    Outputs,
    constants,
    of_models,
    random_scores,
    rewarded,
    rows_of,
    scores_by_hand,
)  # fmt: skip

from step3_ppo.experience import Scores
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.rewarding import reward_responses
from step3_ppo.rollout_metrics import evaluation_metrics, rollout_metrics


def test_the_reward_stands_at_the_last_token_by_hand():
    # Row 0: three tokens, KL per token 0.2, 0, 0.4; score 3. With lambda = gamma = 1 and values 0, the return of a
    # token is the sum of rewards from it on: rewards -0.1, 0, -0.2 + 3 -> 2.7, 2.8, 2.8.
    # Row 1: an EOS alone; KL -0.6; score -1: reward 0.3 - 1 = -0.7. Nothing after it.
    scores = scores_by_hand(
        [[-1.0, -1, -1], [-1, 0, 0]], [[-1.2, -1, -1.4], [-0.4, 0, 0]], [[0.0, 0, 0], [0, 0, 0]], [3.0, -1.0]
    )
    found = rewarded(rows_of([3, 1], [True, True]), scores)
    expected = torch.tensor([[2.7, 2.8, 2.8], [-0.7, 0, 0]])
    torch.testing.assert_close(found.experience.targets.returns, expected)
    torch.testing.assert_close(found.experience.advantages, expected)
    torch.testing.assert_close(found.kl.sum(1), torch.tensor([0.6, -0.6]))
    assert found.sequence_rewards.tolist() == [3.0, -1.0]


def test_normalise_clip_penalty_and_kl_come_in_this_order():
    # (9 - 1) / 2 = 4, clipped to 3, cut off: 3 - 1.5 = 1.5; KL 0.2 * 0.5 = 0.1 off: 1.4.
    # Any other order: clip first (3 - 1) / 2 = 1 - 1.5; penalty first (9 - 1.5 - 1) / 2 = 3.25 -> 3.
    scores = scores_by_hand([[-1.0]], [[-1.2]], [[0.0]], [9.0])
    found = rewarded(rows_of([1], [False]), scores, mean=1.0, std=2.0, reward_clip=3.0, missing_eos_penalty=1.5)
    assert found.sequence_rewards.item() == pytest.approx(1.5)
    assert found.experience.targets.returns.item() == pytest.approx(1.4)


def test_the_clip_does_not_touch_the_kl():
    # Score 1 within the clip, KL of 20: the reward is 1 - 0.5 * 20 = -9, far outside of 5.
    scores = scores_by_hand([[-1.0]], [[-21.0]], [[0.0]], [1.0])
    assert rewarded(rows_of([1], [True]), scores).experience.targets.returns.item() == pytest.approx(-9.0)


def test_a_kl_in_the_loss_is_not_in_the_reward():
    scores = scores_by_hand([[-1.0]], [[-1.2]], [[0.0]], [1.0])
    found = rewarded(rows_of([1], [True]), scores, kl_in_loss=True, kl_estimator="k2")
    assert found.experience.targets.returns.item() == pytest.approx(1.0)
    other = rewarded(rows_of([1], [True]), scores, kl_estimator="k2")
    assert other.experience.targets.returns.item() == pytest.approx(1.0 - 0.5 * 0.2**2 / 2)


def chosen(outputs: Outputs, rows: torch.Tensor) -> Outputs:
    """Some rows of outputs for LENGTHS, as wide as the longest of them."""
    width = max(LENGTHS[n] for n in rows)
    columns = (getattr(outputs.scores, field.name)[rows, :width] for field in fields(Scores))
    return Outputs(Scores(*columns), outputs.judged[rows])


def sums(errors: list[float], decay: float) -> list[float]:
    """The discounted sum from each token on."""
    return [sum(decay ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


def test_the_critic_learns_returns_of_a_lambda_of_its_own():
    """VC-PPO: lambda 1 for the returns."""
    responses, outputs = rows_of(LENGTHS, [True] * 5), random_scores(LENGTHS)
    for of_returns in (1.0, 0.0):
        found = rewarded(responses, outputs, kl_coef=0.0, gamma=0.9, gae_lambda=0.8, returns_lambda=of_returns)
        for n, length in enumerate(LENGTHS):
            values = [*outputs.scores.values[n, :length].tolist(), 0.0]
            errors = [0.9 * values[t + 1] - values[t] for t in range(length)]
            errors[-1] += outputs.judged[n].item()
            advantages = sums(errors, 0.9 * 0.8)
            returns = [s + v for s, v in zip(sums(errors, 0.9 * of_returns), values, strict=False)]
            np.testing.assert_allclose(found.experience.advantages[n, :length], advantages, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.experience.targets.returns[n, :length], returns, rtol=1e-4, atol=1e-5)


def test_the_mean_reward_to_a_prompt_is_taken_off_before_the_critics_estimate_by_a_slow_loop():
    """--group-baseline of PPO: two responses to each of three prompts, of which the last row does not count."""
    lengths, valid = [3, 1, 5, 2, 4, 2], [True] * 5 + [False]
    responses, outputs = rows_of(lengths, [True] * 6, valid), random_scores(lengths)
    ppo = PPOCoefficients(group_baseline=True, gamma=0.9, gae_lambda=0.8, whiten_advantages=False)
    judged = of_models(outputs.judged)
    found = reward_responses(responses, outputs.scores, judged, ppo, kl_coef=0.2, group_size=2)
    for n, length in enumerate(lengths[:5]):
        both = [outputs.judged[other].item() for other in (n - n % 2, n - n % 2 + 1) if valid[other]]
        kl = (outputs.scores.log_probs[n] - outputs.scores.ref_log_probs[n]).tolist()
        values, following = [*outputs.scores.values[n, :length].tolist(), 0.0], 0.0
        for t in reversed(range(length)):
            r = -0.2 * kl[t] + (outputs.judged[n].item() - sum(both) / len(both) if t == length - 1 else 0.0)
            following = r + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * following
            assert found.experience.advantages[n, t].item() == pytest.approx(following, rel=1e-4, abs=1e-5)
            returns = found.experience.targets.returns[n, t].item()
            assert returns == pytest.approx(following + values[t], rel=1e-4, abs=1e-5)
    assert found.sequence_rewards[:5].equal(outputs.judged[:5, 0]), "what is logged is the reward itself"


def test_experience_equals_a_slow_loop():
    responses, outputs = rows_of(LENGTHS, [True, False, True, True, False]), random_scores(LENGTHS)
    scores = outputs.scores
    found = rewarded(
        responses, outputs, mean=0.3, std=1.7, kl_coef=0.2, gamma=0.9, gae_lambda=0.8, whiten_advantages=True,
        reward_clip=0.7, missing_eos_penalty=0.4,
    )  # fmt: skip
    advantages, returns = [], []
    for n, length in enumerate(LENGTHS):
        shaped = float(np.clip((outputs.judged[n].item() - 0.3) / 1.7, -0.7, 0.7)) - 0.4 * (not responses.finished[n])
        kl = (scores.log_probs[n] - scores.ref_log_probs[n]).tolist()
        values = [*scores.values[n, :length].tolist(), 0.0]
        row: list[float] = []
        following = 0.0
        for t in reversed(range(length)):
            r = -0.2 * kl[t] + (shaped if t == length - 1 else 0.0)
            following = r + 0.9 * values[t + 1] - values[t] + 0.9 * 0.8 * following
            row.insert(0, following)
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, values, strict=False)])
    flat = np.concatenate(advantages)
    for n, length in enumerate(LENGTHS):
        wanted = (np.array(advantages[n]) - flat.mean()) / flat.std()
        np.testing.assert_allclose(found.experience.advantages[n, :length], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.experience.targets.returns[n, :length], returns[n], rtol=1e-4, atol=1e-5)
        assert (found.experience.advantages[n, length:] == 0).all() and (
            found.experience.targets.returns[n, length:] == 0
        ).all()
    assert found.advantage_mean == pytest.approx(flat.mean(), rel=1e-4)
    assert found.advantage_std == pytest.approx(flat.std(), rel=1e-4)


def test_whitening_is_over_all_rows_and_their_tokens():
    found = rewarded(rows_of(LENGTHS, [True] * 5), random_scores(LENGTHS), whiten_advantages=True)
    tokens = found.experience.advantages[found.experience.response_mask]
    assert len(tokens) == sum(LENGTHS)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.std(correction=0).item() == pytest.approx(1, rel=1e-4)
    per_row = found.experience.advantages[0, :3]
    assert abs(per_row.mean().item()) > 0.01


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["judged", "log_probs", "ref_log_probs", "values"])
def test_a_row_with_a_number_that_is_not_finite_is_masked_before_whitening(name, bad):
    scores = random_scores(LENGTHS)
    spoiled = copy.deepcopy(scores)
    (spoiled.judged[2] if name == "judged" else getattr(spoiled.scores, name)[2, 1]).fill_(bad)
    found = rewarded(rows_of(LENGTHS, [True] * 5), spoiled, whiten_advantages=True)
    kept = torch.tensor([0, 1, 3, 4])
    lengths = [LENGTHS[n] for n in kept]
    without = rewarded(rows_of(lengths, [True] * 4), chosen(scores, kept), whiten_advantages=True)
    assert found.valid.tolist() == [True, True, False, True, True]
    assert not found.experience.response_mask[2].any() and (found.experience.advantages[2] == 0).all()
    torch.testing.assert_close(found.experience.advantages[kept][:, :4], without.experience.advantages)
    for tensor in (
        found.experience.targets.returns,
        found.experience.targets.values,
        found.experience.log_probs,
        found.kl,
    ):
        assert tensor.isfinite().all()


def test_a_row_that_only_fills_adds_nothing():
    scores = random_scores(LENGTHS)
    found = rewarded(rows_of(LENGTHS, [True] * 5, [True] * 4 + [False]), scores, whiten_advantages=True)
    first = rewarded(rows_of(LENGTHS[:4], [True] * 4), chosen(scores, torch.arange(4)), whiten_advantages=True)
    torch.testing.assert_close(found.experience.advantages[:4], first.experience.advantages)
    assert not found.experience.response_mask[4].any()


# --- several rewards ---

SEVERAL = [constants(0.75, 1.0, 2.0), constants(-2.0, 10.0, 0.5), constants(0.25, -3.0, 4.0)]


def test_several_rewards_equal_a_slow_loop_over_rows_and_rewards():
    """Each raw score has its own constants and the clip, then its weight; the penalty is subtracted once."""
    generator = torch.Generator().manual_seed(5)
    judged = torch.stack(
        [one.scale.mean + 2 * one.scale.std * torch.randn(5, generator=generator) for one in SEVERAL], 1
    )
    finished = [True, False, True, False, True]
    outputs = random_scores(LENGTHS)._replace(judged=judged)
    found = rewarded(rows_of(LENGTHS, finished), outputs, rewards=SEVERAL, reward_clip=1.5, missing_eos_penalty=0.4)
    expected, raw, cut = [], [], []
    for n, row in enumerate(judged.tolist()):
        total, unshaped, was_cut = 0.0, 0.0, False
        for score, (weight, mean, std) in zip(
            row, [(0.75, 1.0, 2.0), (-2.0, 10.0, 0.5), (0.25, -3.0, 4.0)], strict=True
        ):
            normalised = (score - mean) / std
            was_cut = was_cut or normalised > 1.5 or normalised < -1.5
            total += weight * min(max(normalised, -1.5), 1.5)
            unshaped += weight * score
        expected.append(total if finished[n] else total - 0.4)
        raw.append(unshaped)
        cut.append(was_cut)
    assert any(cut) and not all(cut)
    assert found.clipped.tolist() == cut
    np.testing.assert_allclose(found.sequence_rewards, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.scores, raw, rtol=1e-5, atol=1e-5)
    for n, length in enumerate(LENGTHS):  # lambda and gamma are 1: the first return is the sum of the row's rewards
        kl = (outputs.scores.log_probs - outputs.scores.ref_log_probs)[n].sum().item()
        returns = found.experience.targets.returns[n]
        assert returns[0].item() == pytest.approx(expected[n] - 0.5 * kl, rel=1e-4, abs=1e-5)
        assert (returns[length:] == 0).all()


@pytest.mark.parametrize("reward", range(3))
def test_a_row_without_a_score_of_one_reward_is_masked(reward):
    outputs = random_scores(LENGTHS)._replace(judged=torch.ones(5, 3))
    outputs.judged[3, reward] = math.nan
    found = rewarded(rows_of(LENGTHS, [True] * 5), outputs, rewards=SEVERAL)
    assert found.valid.tolist() == [True, True, True, False, True]
    assert found.experience.advantages.isfinite().all() and not found.experience.response_mask[3].any()
    assert found.scores.isnan().tolist() == [False, False, False, True, False], "samples.jsonl says null"


def test_one_reward_of_weight_1_is_the_normalised_score_to_the_last_bit():
    judged = torch.randn(1000, 1, generator=torch.Generator().manual_seed(1)) * 3
    found = rewarded(
        rows_of([1] * 1000, [True] * 1000), Outputs(random_scores([1] * 1000).scores, judged), mean=0.3, std=1.7
    )
    assert found.scores.equal(judged[:, 0])
    assert found.sequence_rewards.equal(((judged[:, 0] - 0.3) / 1.7).clamp(-5.0, 5.0))


# --- metrics of a rollout ---


def test_rollout_metrics_by_hand():
    scores = scores_by_hand(
        [[-1.0, -2.0], [-1, 0], [-5, -5]],
        [[-1.5, -1.0], [-2, 0], [-5, -5]],
        [[0.0, 1.0], [2, 0], [9, 9]],
        [3.0, -1.0, 50.0],
    )
    responses = rows_of([2, 1, 2], [True, False, True], [True, True, False])
    found = rewarded(responses, scores, kl_coef=0.5, missing_eos_penalty=1.0)
    metrics = rollout_metrics(responses, scores.scores, found, PPOCoefficients())
    # KL per sequence: 0.5 - 1 = -0.5 and 1; mean 0.25. Shaped 3 and -1 - 1 = -2; minus half the KL: 3.25 and -2.5.
    assert metrics["objective/kl"] == pytest.approx(0.25)
    assert metrics["objective/rlhf_reward"] == pytest.approx((3.25 - 2.5) / 2)
    assert metrics["objective/scores"] == pytest.approx(1.0)
    k3 = (math.exp(-0.5) - 1 + 0.5) + (math.exp(1) - 1 - 1) + (math.exp(-1) - 1 + 1)
    assert metrics["objective/kl_k3"] == pytest.approx(k3 / 2, rel=1e-5)
    assert metrics["completions/mean_length"] == pytest.approx(1.5)
    assert metrics["completions/eos_fraction"] == metrics["completions/truncated_fraction"] == 0.5
    assert metrics["policy/sampler_error"] == pytest.approx(2.0)
    assert metrics["objective/entropy"] == pytest.approx(1.0)
    # Values 0, 1, 2; returns by the rewards tested above.
    returns, values = found.experience.targets.returns[found.experience.response_mask].numpy(), np.array([0.0, 1, 2])
    assert metrics["value/explained_variance"] == pytest.approx(1 - (returns - values).var() / returns.var(), rel=1e-5)
    assert metrics["rows_masked"] == 0
    shown = evaluation_metrics(metrics, num_rows=2)
    assert shown["eval_objective/kl"] == metrics["objective/kl"] and "eval_policy/sampler_error" not in shown


@pytest.mark.parametrize(
    ("estimator", "in_loss"), [("k1", False), ("k2", False), ("k3", False), ("k2", True), ("k3", True)]
)
def test_the_rlhf_reward_is_that_of_the_flags_by_a_slow_loop(estimator, in_loss):
    """The KL of the estimator that the rewards are made with, and none where the loss takes it."""
    outputs, finished = random_scores(LENGTHS), [True, False, True, True, False]
    found = rewarded(
        rows_of(LENGTHS, finished), outputs, kl_coef=0.3, kl_estimator=estimator, kl_in_loss=in_loss,
        missing_eos_penalty=0.7, reward_clip=1.0,
    )  # fmt: skip
    total = 0.0
    for n, length in enumerate(LENGTHS):
        total += min(max(outputs.judged[n, 0].item(), -1.0), 1.0) - (0.0 if finished[n] else 0.7)
        for t in range(0 if in_loss else length):
            d = (outputs.scores.log_probs[n, t] - outputs.scores.ref_log_probs[n, t]).item()
            total -= 0.3 * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
    metrics = rollout_metrics(rows_of(LENGTHS, finished), outputs.scores, found, PPOCoefficients())
    assert metrics["objective/rlhf_reward"] == pytest.approx(total / len(LENGTHS), rel=1e-4)


def test_the_share_of_clipped_scores_by_hand():
    # Normalised (score - 1) / 2: 4 and -5 are beyond 3, 0 and exactly 3 are not; the last row only fills the batch.
    scores = scores_by_hand([[-1.0]] * 5, [[-1.0]] * 5, [[0.0]] * 5, [9.0, -9.0, 1.0, 7.0, 50.0])
    responses = rows_of([1] * 5, [False] * 5, [True, True, True, True, False])
    found = rewarded(responses, scores, mean=1.0, std=2.0, reward_clip=3.0)
    metrics = evaluation_metrics(rollout_metrics(responses, scores.scores, found, PPOCoefficients()), num_rows=2)
    assert metrics["eval_objective/score_clipfrac"] == 0.5 and metrics["eval_rows"] == 2


def test_masked_rows_are_counted_and_left_out_of_the_metrics():
    scores = random_scores(LENGTHS)
    bad = scores._replace(judged=torch.where(torch.arange(5).unsqueeze(1) == 2, math.nan, scores.judged))
    responses = rows_of(LENGTHS, [True] * 5)
    metrics = rollout_metrics(responses, bad.scores, rewarded(responses, bad), PPOCoefficients())
    assert metrics["rows_masked"] == 1
    assert metrics["objective/scores"] == pytest.approx(scores.judged[[0, 1, 3, 4]].mean().item(), rel=1e-5)
    assert all(math.isfinite(value) for value in metrics.values())
