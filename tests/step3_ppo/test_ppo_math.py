import math

import numpy as np
import pytest
import torch
from support.ragged import B, T, ragged_mask, random_tokens, sequences

from pipeline.tensor_ops import lengths_to_mask, moments
from step3_ppo.mathematics.estimators import (
    SUM_BLOCK,
    estimate_advantages,
    explained_variance,
    normalise_scores,
    shape_scores,
    token_rewards,
)

NAN = math.nan


def shaped(scores: list[float], finished: list[bool], **changes) -> list[float]:
    settings = {"mean": 2.0, "std": 4.0, "reward_clip": 5.0, "missing_eos_penalty": 1.0} | changes
    normalised = normalise_scores(torch.tensor(scores), mean=settings.pop("mean"), std=settings.pop("std"))
    return shape_scores([normalised], [1.0], torch.tensor(finished), **settings).tolist()


def test_scores_are_normalised_then_clipped_then_penalised():
    # 4: (4 - 2) / 4 = 0.5. 102: 25, clipped to 5; cut off: 5 - 1 = 4, a penalty before the clip would leave 5.
    # -98: -25, clipped to -5; cut off: -6, below the clip.
    assert shaped([4.0, 4.0, 102.0, 102.0, -98.0], [True, False, True, False, False]) == [0.5, -0.5, 5, 4, -6]


def test_the_clip_acts_on_normalised_scores():
    # Raw 10 is beyond the clip of 5, normalised it is 2.
    assert shaped([10.0], [True]) == [2]


def test_the_clip_can_be_off():
    assert shaped([402.0], [True], reward_clip=math.inf) == [100]


def test_a_reward_model_without_spread_is_refused():
    with pytest.raises(AssertionError):
        shaped([1.0], [True], std=0.0)


def test_token_rewards_by_hand():
    # Row 0 has 2 tokens: the sequence reward 10 lands on index 1, not on the first padding. Row 1 is full.
    # Row 2 has one token. Row 3 has none: its reward goes nowhere. KL costs 0.1 each.
    kl = torch.tensor([[1.0, 2.0, NAN], [3.0, -4.0, 5.0], [6.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = lengths_to_mask(torch.tensor([2, 3, 1, 0]), 3)
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0, 40.0]), kl, mask, kl_coef=0.1)
    expected = torch.tensor([[-0.1, 9.8, 0.0], [-0.3, 0.4, 19.5], [29.4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)


@pytest.mark.parametrize("seed", range(3))
def test_token_rewards_equal_a_slow_loop(seed):
    mask = ragged_mask(seed)
    (kl,) = random_tokens(seed, 1, mask)
    scores = torch.randn(B, generator=torch.Generator().manual_seed(seed))
    expected = np.zeros((B, T))
    for row, (of_row,) in enumerate(sequences(mask, kl)):
        for t, value in enumerate(of_row):
            expected[row, t] = -0.3 * value + (scores[row].item() if t == len(of_row) - 1 else 0)
    np.testing.assert_allclose(token_rewards(scores, kl, mask, kl_coef=0.3), expected, rtol=1e-5, atol=1e-6)


# --- advantages ---


def slow_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """The definition: a sum over all later TD errors of one sequence."""
    next_values = np.append(values[1:], 0.0)
    errors = rewards + gamma * next_values - values
    length = len(errors)
    return np.array([sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, length)) for t in range(length)])


def test_gae_by_hand():
    # gamma 1/2, lambda 1/2. Row 0, 3 tokens, r = 0, 0, 8 and V = 4, 2, 6:
    #   delta_2 = 8 - 6 = 2; delta_1 = 6/2 - 2 = 1; delta_0 = 2/2 - 4 = -3
    #   A_2 = 2; A_1 = 1 + 2/4 = 3/2; A_0 = -3 + 3/8 = -21/8; returns = A + V
    # Row 1, 2 tokens, r = 1, 2 and V = 2, 4: delta_1 = -2; delta_0 = 1 + 4/2 - 2 = 1; A_0 = 1 - 2/4 = 1/2
    rewards = torch.tensor([[0.0, 0.0, 8.0], [1.0, 2.0, NAN]])
    values = torch.tensor([[4.0, 2.0, 6.0], [2.0, 4.0, NAN]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages, returns = estimate_advantages(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [[-21 / 8, 3 / 2, 2], [1 / 2, -2, 0]]
    assert returns.tolist() == [[11 / 8, 7 / 2, 8], [5 / 2, 2, 0]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_a_slow_loop(seed, gamma, gae_lambda):
    mask = ragged_mask(seed)
    rewards, values = random_tokens(seed, 2, mask)
    advantages, returns = estimate_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    expected = np.zeros((B, T))
    for row, (r, v) in enumerate(sequences(mask, rewards, values)):
        expected[row, : len(r)] = slow_gae(r, v, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
    expected_returns = expected + torch.where(mask, values, 0).numpy()
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-5, atol=1e-5)
    assert advantages.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize("length", [SUM_BLOCK, SUM_BLOCK + 1, 3 * SUM_BLOCK - 5])
def test_gae_over_several_blocks_equals_a_slow_loop(length):
    random = np.random.default_rng(length)
    rewards, values = random.normal(size=(2, 3, length))
    mask = torch.ones(3, length, dtype=torch.bool)
    rewards, values = rewards.astype(np.float32), values.astype(np.float32)
    found, _ = estimate_advantages(torch.tensor(rewards), torch.tensor(values), mask, gamma=0.99, gae_lambda=0.97)
    expected = np.stack([slow_gae(r, v, 0.99, 0.97) for r, v in zip(rewards, values, strict=True)])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value():
    mask = ragged_mask(4)
    rewards, values = random_tokens(4, 2, mask)
    advantages, returns = estimate_advantages(rewards, values, mask, gamma=0.9, gae_lambda=1.0)
    for a, g, r, v in sequences(mask, advantages, returns, rewards, values):
        discounted = [sum(0.9 ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
        np.testing.assert_allclose(a, discounted - v, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(g, discounted, rtol=1e-5, atol=1e-5)


def test_gae_with_lambda_zero_is_the_td_error():
    mask = ragged_mask(5)
    rewards, values = random_tokens(5, 2, mask)
    advantages, _ = estimate_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.0)
    for a, r, v in sequences(mask, advantages, rewards, values):
        np.testing.assert_allclose(a, r + 0.9 * np.append(v[1:], 0)[: len(v)] - v, rtol=1e-5, atol=1e-5)


def test_explained_variance_by_hand():
    # Returns 1, 3, 5: variance 8/3. Errors 0, 1, -1 (values 1, 2, 6): variance 2/3. 1 - 1/4 = 3/4.
    returns, errors = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0.0, 1.0, -1.0])
    everything = torch.ones(3, dtype=torch.bool)
    assert explained_variance(moments(returns, everything), moments(errors, everything)).item() == pytest.approx(0.75)
    constant = moments(torch.ones(3), everything)
    assert explained_variance(constant, moments(errors, everything)).isnan()


def test_explained_variance_of_fake_ranks_equals_numpy():
    mask = ragged_mask(6)
    returns, values = random_tokens(6, 2, mask)
    parts = list(zip(returns.split([1, 2, 3]), values.split([1, 2, 3]), mask.split([1, 2, 3]), strict=True))
    reduced = explained_variance(
        torch.stack([moments(r, m) for r, _, m in parts]).sum(0),
        torch.stack([moments(r - v, m) for r, v, m in parts]).sum(0),
    )
    g, v = returns[mask].double().numpy(), values[mask].double().numpy()
    assert reduced.item() == pytest.approx(1 - (g - v).var() / g.var(), rel=1e-6)
