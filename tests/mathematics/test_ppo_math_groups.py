"""Advantages of methods without a critic, lambdas of their own, and the scale of rewards, by slow loops."""

import math
import statistics

import numpy as np
import pytest
import torch
from support.ragged import ragged_mask, random_tokens, sequences

from step3_ppo.mathematics.estimators import (
    equal_groups,
    estimate_advantages,
    group_advantages,
    leave_one_out_advantages,
    spread_deviation,
    updated_spread,
)

NAN = math.nan
K = 4


def scored(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of 6 groups of 4 and whether each counts, NaN where not: a group has 4, 3, 2, 1, 0 or 4 equal ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, K, generator=generator)
    valid = torch.ones(6, K, dtype=torch.bool)
    for group, missing in enumerate([[], [0], [1, 3], [0, 1, 2], [0, 1, 2, 3], []]):
        valid[group, missing] = False
    scores[5] = 0.1
    return torch.where(valid, scores, NAN).flatten(), valid.flatten()


def slow(scores: torch.Tensor, valid: torch.Tensor, kind: str) -> list[float]:
    found = []
    for start in range(0, len(scores), K):
        group = range(start, start + K)
        for row in group:
            known = [scores[other].item() for other in group if valid[other]]
            others = [scores[other].item() for other in group if valid[other] and other != row]
            if not valid[row] or not others:
                found.append(0.0)
            elif kind == "leave one out":
                found.append(scores[row].item() - statistics.mean(others))
            else:
                divisor = statistics.stdev(known) + 1e-4 if kind == "scaled" else 1
                found.append((scores[row].item() - statistics.mean(known)) / divisor)
    return found


def estimated(scores: torch.Tensor, valid: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "leave one out":
        return leave_one_out_advantages(scores, valid, group_size=K)
    return group_advantages(scores, valid, group_size=K, scale=kind == "scaled")


KINDS = ["scaled", "not scaled", "leave one out"]


def test_advantages_of_a_group_by_hand():
    # Scores 1, 2, 6, the fourth does not count: mean 3, deviation sqrt((4 + 1 + 9) / 2) = sqrt(7); means of the others
    # 4, 3.5 and 1.5.
    scores, valid = torch.tensor([1.0, 2.0, 6.0, NAN]), torch.tensor([True, True, True, False])
    scale = math.sqrt(7) + 1e-4
    by_hand = {
        "scaled": [-2 / scale, -1 / scale, 3 / scale, 0],
        "not scaled": [-2, -1, 3, 0],
        "leave one out": [-3, -1.5, 4.5, 0],
    }
    for kind, expected in by_hand.items():
        assert estimated(scores, valid, kind).tolist() == pytest.approx(expected, rel=1e-6), kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_groups_equal_a_slow_loop(seed, kind):
    scores, valid = scored(seed)
    advantages = estimated(scores, valid, kind)
    np.testing.assert_allclose(advantages, slow(scores, valid, kind), rtol=1e-5, atol=1e-6)
    assert advantages.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_have_no_advantage_at_all(kind):
    """Also where the mean of their fp32 numbers would be another number."""
    for value in (0.1, 1 / 3, 1e6 / 7):
        advantages = estimated(torch.full((12,), value), torch.ones(12, dtype=torch.bool), kind)
        assert advantages.tolist() == [0] * 12
        seven = group_advantages(torch.full((7,), value), torch.ones(7, dtype=torch.bool), group_size=7, scale=True)
        assert seven.tolist() == [0] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_does_not_count_changes_no_other_and_the_order_of_groups_nothing(kind):
    scores, valid = scored(3)
    advantages = estimated(scores, valid, kind)
    assert estimated(torch.where(valid, scores, 1e9), valid, kind).equal(advantages)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    rows = (order.unsqueeze(1) * K + torch.tensor([2, 0, 3, 1])).flatten()
    torch.testing.assert_close(estimated(scores[rows], valid[rows], kind), advantages[rows], rtol=1e-6, atol=1e-7)


def test_a_nan_that_counts_is_not_hidden():
    scores, valid = torch.tensor([1.0, NAN, 2.0, 3.0]), torch.ones(4, dtype=torch.bool)
    for kind in KINDS:
        assert estimated(scores, valid, kind).isnan().any()
    assert not equal_groups(scores, valid, group_size=K).item()


def test_rows_that_make_no_whole_groups_are_refused():
    with pytest.raises(RuntimeError):
        group_advantages(torch.zeros(5), torch.ones(5, dtype=torch.bool), group_size=2, scale=False)
    with pytest.raises(AssertionError):
        leave_one_out_advantages(torch.zeros(4), torch.ones(4), group_size=2)


def test_equal_groups_by_hand():
    scores = torch.tensor([1, 1, 1, 2, NAN, 1, NAN, NAN, 0.5, NAN, -1, 1.0])
    valid = torch.tensor([1, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert equal_groups(scores, valid, group_size=2).tolist() == [True, False, True, True, True, False]
    assert equal_groups(scores, valid, group_size=4).tolist() == [False, True, False]


# --- lambdas ---


def slow_sums(errors: np.ndarray, decay: float) -> np.ndarray:
    sums, later = np.zeros(len(errors)), 0.0
    for t in reversed(range(len(errors))):
        later = sums[t] = errors[t] + decay * later
    return sums


@pytest.mark.parametrize("seed", range(3))
def test_gae_with_another_lambda_for_returns_equals_a_slow_loop(seed):
    mask = ragged_mask(seed)
    rewards, values = random_tokens(seed, 2, mask)
    for chosen in (0.7, 0.0, 1.0):
        advantages, returns = estimate_advantages(
            rewards, values, mask, gamma=0.9, gae_lambda=chosen, returns_lambda=0.8
        )
        for r, v, a, g in sequences(mask, rewards, values, advantages, returns):
            errors = r + 0.9 * np.append(v[1:], 0)[: len(v)] - v
            np.testing.assert_allclose(a, slow_sums(errors, 0.9 * chosen), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(g, slow_sums(errors, 0.9 * 0.8) + v, rtol=1e-5, atol=1e-5)
        assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()
        assert advantages.dtype == returns.dtype == torch.float32


def test_returns_of_lambda_one_are_the_rewards_to_come():
    mask = ragged_mask(8)
    rewards, values = random_tokens(8, 2, mask)
    _, returns = estimate_advantages(rewards, values, mask, gamma=1.0, gae_lambda=0.3, returns_lambda=1.0)
    for r, g in sequences(mask, rewards, returns):
        np.testing.assert_allclose(g, np.cumsum(r[::-1])[::-1], rtol=1e-5, atol=1e-5)


# --- scale of rewards ---


def reward_deviation(scores, valid):
    """That of one whole rollout."""
    return spread_deviation(updated_spread(torch.zeros(3, dtype=torch.float64), scores, valid))


def test_the_deviation_of_rewards_is_numpys():
    scores, valid = scored(4)
    scores[0] = NAN  # counts, but has no score
    known = scores[valid & ~scores.isnan()].double().numpy()
    assert reward_deviation(scores, valid).item() == pytest.approx(np.std(known, ddof=1), rel=1e-12)
    assert reward_deviation(torch.where(valid, scores, 1e9), valid).equal(reward_deviation(scores, valid))
    for few in (torch.tensor([3.0, NAN]), torch.tensor([NAN, NAN])):
        assert reward_deviation(few, torch.ones(2, dtype=torch.bool)).item() == 0


def test_the_running_spread_is_that_of_all_rollouts_at_once():
    """Far from 0, where a sum of squares in fp64 would have lost the deviation's digits."""
    random = np.random.default_rng(0)
    spread, seen = torch.zeros(3, dtype=torch.float64), []
    for size in (5, 1, 0, 7, 64):
        scores = torch.tensor(random.normal(1e7, 3.0, size=size), dtype=torch.float32)
        valid = torch.tensor(random.random(size) < 0.8, dtype=torch.bool)
        scores[torch.tensor(random.random(size) < 0.1, dtype=torch.bool)] = NAN
        spread = updated_spread(spread, scores, valid)
        seen += scores[valid & ~scores.isnan()].double().tolist()
        count, mean, squares = spread.tolist()
        assert (count, mean) == (len(seen), pytest.approx(np.mean(seen), rel=1e-14))
        assert squares == pytest.approx(np.square(np.array(seen) - np.mean(seen)).sum(), rel=1e-9)
    assert spread_deviation(spread).item() == pytest.approx(np.std(seen, ddof=1), rel=1e-9)
    assert len(seen) > 40
