import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.tensor_ops import lengths_to_mask, moments
from step3_ppo.ppo_math import (
    explained_variance,
    gae,
    kl_estimate,
    kl_loss,
    next_kl_coef,
    policy_loss,
    shape_scores,
    token_rewards,
    value_loss,
)

NAN = math.nan
B, T = 6, 9
SPLITS = [[6], [1] * 6, [2, 4], [3, 2, 1]]


def ragged_mask(seed: int) -> torch.Tensor:
    """(B, T) prefix mask: row 0 is full, row 1 has one token, row 2 has none and only fills the batch."""
    lengths = torch.randint(1, T + 1, (B,), generator=torch.Generator().manual_seed(seed))
    lengths[:3] = torch.tensor([T, 1, 0])
    return lengths_to_mask(lengths, T)


def random_tokens(seed: int, count: int, mask: torch.Tensor) -> list[torch.Tensor]:
    """`count` tensors (B, T) of fp32 normals, NaN where the mask is False."""
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.where(mask, torch.randn(B, T, generator=generator), NAN) for _ in range(count)]


def full(rows: list[list[float]]) -> torch.Tensor:
    return torch.ones(len(rows), len(rows[0]), dtype=torch.bool)


def slow_rows(mask: torch.Tensor, *tensors: torch.Tensor):
    """For each sequence, its real tokens of every tensor as float64 numpy."""
    for row in range(len(mask)):
        yield [tensor[row][mask[row]].double().numpy() for tensor in tensors]


# ---------------------------------------------------------------------------------------------------- KL divergence


def categorical(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy over 5 tokens, to be differentiated, and log-probabilities of a reference."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, generator=generator).requires_grad_()
    return logits, torch.randn(5, generator=generator).log_softmax(0)


def exact_kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum()


def expected_gradient(logits: torch.Tensor, loss_of_token: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """E_{a ~ policy}[grad loss(a)], by enumeration: the sampling itself is not differentiated."""
    total = torch.zeros_like(logits)
    for token in range(len(logits)):
        log_probs = logits.log_softmax(0)
        (gradient,) = torch.autograd.grad(loss_of_token(log_probs[token].view(1, 1), token), logits)
        total += log_probs[token].exp().detach() * gradient
    return total


def test_kl_estimators_by_hand():
    # d = log p - log ref = ln 2: k1 = ln 2, k2 = (ln 2)**2 / 2, k3 = 1/2 - 1 + ln 2; and with d = -ln 2 the mirror.
    log_probs, ref = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    ln2 = math.log(2)
    for estimator, expected in {"k1": [ln2, -ln2], "k2": [ln2**2 / 2] * 2, "k3": [-0.5 + ln2, 1 - ln2]}.items():
        estimate = kl_estimate(log_probs, ref, estimator=estimator)
        torch.testing.assert_close(estimate, torch.tensor([expected]), rtol=1e-6, atol=0)


def test_kl_estimators_equal_numpy():
    log_probs, ref = random_tokens(0, 2, torch.ones(B, T, dtype=torch.bool))
    d = log_probs.double().numpy() - ref.double().numpy()
    for estimator, expected in {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}.items():
        np.testing.assert_allclose(kl_estimate(log_probs, ref, estimator=estimator), expected, rtol=1e-5, atol=1e-6)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    logits, ref = categorical()
    log_probs = logits.detach().log_softmax(0)
    means = {
        estimator: (log_probs.exp() * kl_estimate(log_probs[None], ref[None], estimator=estimator)).sum().item()
        for estimator in ("k1", "k2", "k3")
    }
    exact = exact_kl(log_probs, ref).item()
    assert means["k1"] == pytest.approx(exact, rel=1e-5)
    assert means["k3"] == pytest.approx(exact, rel=1e-5)
    assert means["k2"] != pytest.approx(exact, rel=0.05)


def test_k3_of_a_tiny_difference_keeps_its_digits():
    # k3 = d**2 / 2 - d**3 / 6 + ...: with d = 2**-10, exp(-d) - 1 + d in fp32 would be off by 20 %.
    d = 2.0**-10
    estimate = kl_estimate(torch.tensor([[d]]), torch.zeros(1, 1), estimator="k3").item()
    assert estimate == pytest.approx(d**2 / 2 - d**3 / 6, rel=1e-3)


def test_k3_of_an_extreme_ratio_stays_finite():
    log_probs = torch.tensor([[-1000.0, 0.0]], requires_grad=True)
    estimate = kl_estimate(log_probs, torch.tensor([[0.0, -1000.0]]), estimator="k3")
    estimate.sum().backward()
    assert estimate[0, 0].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert estimate[0, 1].item() == 999
    assert log_probs.grad.tolist() == [[0, 1]]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_gradient_is_the_gradient_of_the_divergence(estimator):
    logits, ref = categorical()

    def loss_of_token(log_prob: torch.Tensor, token: int) -> torch.Tensor:
        return kl_loss(log_prob, ref[token].view(1, 1), full([[1]]), estimator=estimator)

    (expected,) = torch.autograd.grad(exact_kl(logits.log_softmax(0), ref), logits)
    torch.testing.assert_close(expected_gradient(logits, loss_of_token), expected, rtol=1e-5, atol=1e-6)


def test_why_plain_k1_and_k3_are_no_losses():
    """What the docstring of `kl_loss` says of them: k1 has no gradient, k3 has that of KL(ref || policy)."""
    logits, ref = categorical()

    def of_estimator(estimator: str) -> torch.Tensor:
        return expected_gradient(logits, lambda lp, a: kl_estimate(lp, ref[a].view(1, 1), estimator=estimator).sum())

    (reverse,) = torch.autograd.grad(exact_kl(ref, logits.log_softmax(0)), logits)
    torch.testing.assert_close(of_estimator("k1"), torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(of_estimator("k3"), reverse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_value_is_the_estimator_over_the_response(estimator):
    mask = ragged_mask(0)
    log_probs, ref = random_tokens(0, 2, mask)
    log_probs.requires_grad_()
    loss = kl_loss(log_probs, ref, mask, estimator=estimator)
    loss.backward()
    expected = kl_estimate(log_probs[mask][None], ref[mask][None], estimator=estimator).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(log_probs.grad, torch.where(mask, log_probs - ref, 0))


def test_kl_loss_of_an_extreme_ratio_has_a_finite_gradient():
    log_probs = torch.tensor([[-1000.0, 0.0]], requires_grad=True)
    loss = kl_loss(log_probs, torch.tensor([[0.0, -1000.0]]), full([[1, 1]]), estimator="k3")
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad.tolist() == [[-1000, 1000]]


def test_estimators_that_cannot_be_used_are_refused():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="k1 has no gradient"):
        kl_loss(one, one, full([[1]]), estimator="k1")
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(one, one, estimator="k4")
    with pytest.raises(ValueError, match="'k4'"):
        kl_loss(one, one, full([[1]]), estimator="k4")


@pytest.mark.parametrize(
    ("observed_kl", "expected"),
    [
        (6.6, 0.1 * (1 + 0.1 * 64 / 1000)),  # 10 % above the target
        (5.4, 0.1 * (1 - 0.1 * 64 / 1000)),  # 10 % below
        (600.0, 0.1 * (1 + 0.2 * 64 / 1000)),  # far above: the error is clipped to 20 %
        (-3.0, 0.1 * (1 - 0.2 * 64 / 1000)),
        (6.0, 0.1),
    ],
)
def test_adaptive_kl_by_hand(observed_kl, expected):
    assert next_kl_coef(0.1, observed_kl, target=6.0, horizon=1000, num_sequences=64) == pytest.approx(expected)


def test_adaptive_kl_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        next_kl_coef(0.1, NAN, target=6.0, horizon=1000, num_sequences=64)


# ---------------------------------------------------------------------------------------------------------- rewards


def shaped(scores: list[float], finished: list[bool], **changes) -> list[float]:
    settings = {"score_mean": 2.0, "score_std": 4.0, "reward_clip": 5.0, "missing_eos_penalty": 1.0}
    return shape_scores(torch.tensor(scores), torch.tensor(finished), **(settings | changes)).tolist()


def test_scores_are_normalised_then_clipped_then_penalised():
    # 4: (4 - 2) / 4 = 0.5. 102: 25, clipped to 5; cut off: 5 - 1 = 4, a penalty before the clip would leave 5.
    # -98: -25, clipped to -5; cut off: -6, below the clip.
    assert shaped([4.0, 4.0, 102.0, 102.0, -98.0], [True, False, True, False, False]) == [0.5, -0.5, 5, 4, -6]


def test_the_clip_acts_on_normalised_scores():
    # Raw 10 is beyond the clip of 5, normalised it is 2.
    assert shaped([10.0], [True]) == [2]


def test_the_clip_can_be_off():
    assert shaped([402.0], [True], reward_clip=None) == [100]


def test_a_reward_model_without_spread_is_refused():
    with pytest.raises(AssertionError):
        shaped([1.0], [True], score_std=0.0)


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
    for row, (of_row,) in enumerate(slow_rows(mask, kl)):
        for t, value in enumerate(of_row):
            expected[row, t] = -0.3 * value + (scores[row].item() if t == len(of_row) - 1 else 0)
    np.testing.assert_allclose(token_rewards(scores, kl, mask, kl_coef=0.3), expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- advantages


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
    advantages, returns = gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [[-21 / 8, 3 / 2, 2], [1 / 2, -2, 0]]
    assert returns.tolist() == [[11 / 8, 7 / 2, 8], [5 / 2, 2, 0]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_a_slow_loop(seed, gamma, gae_lambda):
    mask = ragged_mask(seed)
    rewards, values = random_tokens(seed, 2, mask)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    expected = np.zeros((B, T))
    for row, (r, v) in enumerate(slow_rows(mask, rewards, values)):
        expected[row, : len(r)] = slow_gae(r, v, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
    expected_returns = expected + torch.where(mask, values, 0).numpy()
    np.testing.assert_allclose(returns, expected_returns, rtol=1e-5, atol=1e-5)
    assert advantages.dtype == returns.dtype == torch.float32


def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value():
    mask = ragged_mask(4)
    rewards, values = random_tokens(4, 2, mask)
    advantages, returns = gae(rewards, values, mask, gamma=0.9, gae_lambda=1.0)
    for a, g, r, v in slow_rows(mask, advantages, returns, rewards, values):
        discounted = [sum(0.9 ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
        np.testing.assert_allclose(a, discounted - v, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(g, discounted, rtol=1e-5, atol=1e-5)


def test_gae_with_lambda_zero_is_the_td_error():
    mask = ragged_mask(5)
    rewards, values = random_tokens(5, 2, mask)
    advantages, _ = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.0)
    for a, r, v in slow_rows(mask, advantages, rewards, values):
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
    reduced = explained_variance(sum(moments(r, m) for r, _, m in parts), sum(moments(r - v, m) for r, v, m in parts))
    g, v = returns[mask].double().numpy(), values[mask].double().numpy()
    assert reduced.item() == pytest.approx(1 - (g - v).var() / g.var(), rel=1e-6)


# ------------------------------------------------------------------------------------------------------ policy loss


def test_policy_loss_by_hand():
    # Clip 0.2, ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 1, -1, 1, -1, 2:
    #   min(1.5, 1.2) = 1.2 clipped; min(-1.5, -1.2) = -1.5; min(0.5, 0.8) = 0.5; min(-0.5, -0.8) = -0.8 clipped; 2.2
    # Sum 1.6, loss -1.6. A clipped token has no gradient, any other one -ratio * A.
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    log_probs = ratios.log().requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 7.0]])
    mask = lengths_to_mask(torch.tensor([5]), 6)
    loss, stats = policy_loss(log_probs, torch.zeros(1, 6), advantages, mask, policy_clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-1.6)
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, 1.5, -0.5, 0.0, -2.2, 0.0]]))
    assert stats.ratio_sum.item() == pytest.approx(5.1)
    assert stats.ratio_max.item() == pytest.approx(1.5)
    assert stats.abs_log_ratio_max.item() == pytest.approx(math.log(2))
    assert stats.clipped_count.item() == 2
    # k3 of KL(old || new): ratio - 1 - log ratio.
    assert stats.approx_kl_sum.item() == pytest.approx(sum(r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 0.5, 1.1)))


@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_equals_a_slow_loop(seed):
    mask = ragged_mask(seed)
    log_probs, old, advantages = random_tokens(seed, 3, mask)
    total, clipped = 0.0, 0
    ratios = []
    for new_row, old_row, advantage_row in slow_rows(mask, log_probs, old, advantages):
        for new, before, advantage in zip(new_row, old_row, advantage_row, strict=True):
            ratio = math.exp(new - before)
            bounded = min(max(ratio, 0.7), 1.3)
            total -= min(ratio * advantage, bounded * advantage)
            clipped += bounded * advantage < ratio * advantage
            ratios.append(ratio)
    loss, stats = policy_loss(log_probs, old, advantages, mask, policy_clip=0.3)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert stats.clipped_count.item() == clipped > 0
    assert stats.ratio_sum.item() == pytest.approx(sum(ratios), rel=1e-5)
    assert stats.ratio_max.item() == pytest.approx(max(ratios), rel=1e-5)
    assert stats.approx_kl_sum.item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios), rel=1e-5)


def test_the_first_update_is_the_policy_gradient():
    mask = ragged_mask(7)
    old, advantages = random_tokens(7, 2, mask)
    log_probs = old.clone().requires_grad_()
    loss, stats = policy_loss(log_probs, old, advantages, mask, policy_clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-advantages[mask].sum().item(), rel=1e-5)
    assert log_probs.grad.equal(torch.where(mask, -advantages, 0))
    assert stats.ratio_sum.item() == mask.sum()
    assert (stats.ratio_max.item(), stats.abs_log_ratio_max.item(), stats.clipped_count.item()) == (1, 0, 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_ratio_stays_finite(advantage):
    log_probs = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    loss, stats = policy_loss(
        log_probs, torch.zeros(1, 2), torch.full((1, 2), advantage), full([[1, 1]]), policy_clip=0.2
    )
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad.isfinite().all()
    assert stats.ratio_max.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert stats.abs_log_ratio_max.item() == 1000


def test_statistics_carry_no_graph():
    one = torch.ones(1, 1)
    _, stats = policy_loss(one.clone().requires_grad_(), one, one, full([[1]]), policy_clip=0.2)
    assert not any(stat.requires_grad for stat in stats)


def test_a_batch_without_tokens_has_zero_loss_and_statistics():
    nothing, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    loss, stats = policy_loss(nothing, nothing, nothing, mask, policy_clip=0.2)
    assert [loss.item(), *(stat.item() for stat in stats)] == [0] * 6
    assert [tensor.item() for tensor in value_loss(nothing, nothing, nothing, mask, value_clip=0.2)] == [0, 0]


def test_a_nan_inside_the_response_is_not_hidden():
    bad, mask = torch.tensor([[0.0, NAN]]), full([[1, 1]])
    good = torch.zeros(1, 2)
    assert policy_loss(bad, good, good, mask, policy_clip=0.2)[0].isnan()
    assert value_loss(bad, good, good, mask, value_clip=0.2)[0].isnan()
    assert kl_loss(bad, good, mask, estimator="k3").isnan()


# ------------------------------------------------------------------------------------------------------- value loss


def test_value_loss_by_hand():
    # Clip 1, old values 0. V = 3, R = 4: errors 1 and, clipped to 1, 9: the larger counts, 4.5, clipped.
    # V = 3, R = 0: errors 9 and 1: 4.5, not clipped. V = 0.5, R = 2: both 2.25: 1.125, not clipped.
    values = torch.tensor([[3.0, 3.0, 0.5, 9.0]], requires_grad=True)
    returns = torch.tensor([[4.0, 0.0, 2.0, 5.0]])
    mask = lengths_to_mask(torch.tensor([3]), 4)
    loss, clipped_count = value_loss(values, torch.zeros(1, 4), returns, mask, value_clip=1.0)
    loss.backward()
    assert loss.item() == 4.5 + 4.5 + 1.125
    assert clipped_count.item() == 1
    assert values.grad.tolist() == [[0, 3, -1.5, 0]]


def test_value_loss_without_a_clip_is_half_the_squared_error():
    # (1 + 9 + 2.25) / 2 for the same numbers.
    values, returns = torch.tensor([[3.0, 3.0, 0.5]]), torch.tensor([[4.0, 0.0, 2.0]])
    loss, clipped_count = value_loss(values, torch.zeros(1, 3), returns, full([[1, 1, 1]]), value_clip=None)
    assert (loss.item(), clipped_count.item()) == (6.125, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value_clip", [0.2, None])
def test_value_loss_equals_a_slow_loop(seed, value_clip):
    mask = ragged_mask(seed)
    values, old_values, returns = random_tokens(seed, 3, mask)
    total, count = 0.0, 0
    for v_row, old_row, r_row in slow_rows(mask, values, old_values, returns):
        for v, old, r in zip(v_row, old_row, r_row, strict=True):
            bounded = v if value_clip is None else old + min(max(v - old, -value_clip), value_clip)
            total += 0.5 * max((v - r) ** 2, (bounded - r) ** 2)
            count += (bounded - r) ** 2 > (v - r) ** 2
    loss, clipped_count = value_loss(values, old_values, returns, mask, value_clip=value_clip)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert clipped_count.item() == count


# ------------------------------------------------------------------------------------------------- all of the losses

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "policy": lambda lp, old, adv, mask: policy_loss(lp, old, adv, mask, policy_clip=0.2)[0],
    "value": lambda v, old, returns, mask: value_loss(v, old, returns, mask, value_clip=0.2)[0],
    "kl k2": lambda lp, ref, _, mask: kl_loss(lp, ref, mask, estimator="k2"),
    "kl k3": lambda lp, ref, _, mask: kl_loss(lp, ref, mask, estimator="k3"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", SPLITS)
def test_micro_batches_over_the_global_count_equal_the_full_batch(name, sizes):
    mask = ragged_mask(8)
    batch = [*random_tokens(8, 3, mask), mask]
    leaf = batch[0].requires_grad_()
    whole = LOSSES[name](*batch) / mask.sum()
    parts = zip(*(tensor.split(sizes) for tensor in batch), strict=True)
    summed = sum(LOSSES[name](*part) / mask.sum() for part in parts)
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (summed, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-8)
    assert gradients[0].isfinite().all()
    assert (gradients[0][~mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_padding_columns_change_nothing(name):
    mask = ragged_mask(9)
    batch = [*random_tokens(9, 3, mask), mask]
    wider = [torch.nn.functional.pad(tensor, (0, 4), value=False if tensor is mask else 7.0) for tensor in batch]
    torch.testing.assert_close(LOSSES[name](*wider), LOSSES[name](*batch), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_wrong_shapes_and_dtypes_are_refused(name):
    mask = full([[1, 1]])
    good = torch.zeros(1, 2)
    for wrong in (torch.zeros(1, 1), good.double(), good.bfloat16(), torch.zeros(2)):
        with pytest.raises(AssertionError):
            LOSSES[name](good, wrong, good, mask)
    with pytest.raises(AssertionError):
        LOSSES[name](good, good, good, mask.float())
