"""Variants and terms of the policy loss by slow loops: clips, sequence ratios, CISPO, weights, means, entropy, NLL."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.ragged import B, T, every_token, gradient, ragged_mask, random_tokens, sequences
from torch.nn import functional

from pipeline.tensor_ops import lengths_to_mask
from step3_ppo.mathematics.losses import (
    PolicyStats,
    cispo_loss,
    kl_loss,
    policy_loss,
    row_factors,
    weighted_sum,
)

NAN = math.nan
# Name -> arguments; those with `ratio_cap` are of CISPO.
VARIANTS: dict[str, dict[str, Any]] = {
    "clip above": {"policy_clip": 0.2, "policy_clip_high": 0.6},
    "dual clip": {"policy_clip": 0.2, "dual_clip": 1.5},
    "dual clip and clip above": {"policy_clip": 0.1, "policy_clip_high": 0.9, "dual_clip": 1.3},
    "sequence": {"policy_clip": 0.1, "policy_clip_high": 0.2, "importance_sampling_level": "sequence"},
    "sequence, dual clip": {"policy_clip": 0.1, "dual_clip": 1.2, "importance_sampling_level": "sequence"},
    "cispo": {"ratio_cap": 1.5},
    "cispo, sequence": {"ratio_cap": 1.1, "importance_sampling_level": "sequence"},
}


def loss_of(name: str) -> Callable[..., tuple[torch.Tensor, PolicyStats]]:
    arguments = VARIANTS[name]
    return lambda *tensors, **more: (cispo_loss if "ratio_cap" in arguments else policy_loss)(
        *tensors, **arguments, **more
    )


def batch_of(seed: int) -> list[torch.Tensor]:
    """Log-probabilities, old ones, advantages, weights, mask; ratios are some tenths to some times 1."""
    mask = ragged_mask(seed)
    log_probs, old, advantages, weights = random_tokens(seed, 4, mask)
    return [log_probs * 0.5, old * 0.5, advantages, weights.abs(), mask]


def slow_row(new: np.ndarray, old: np.ndarray, a: np.ndarray, w: np.ndarray, **given: Any) -> tuple[float, int, int]:
    """Loss of one sequence, its tokens clipped below and above."""
    total, low, high = 0.0, 0, 0
    differences = [float(n - o) for n, o in zip(new, old, strict=True)]
    for t, log_prob in enumerate(new):
        log_ratio = differences[t]
        if given.get("importance_sampling_level") == "sequence":
            log_ratio = sum(differences) / len(differences)
        ratio = math.exp(log_ratio)
        if "ratio_cap" in given:
            # The ratio of `frozen`: what is stopped is not differentiated.
            total -= w[t] * min(given["frozen"][t], given["ratio_cap"]) * a[t] * log_prob
            high += ratio > given["ratio_cap"]
            continue
        most = 1 + given.get("policy_clip_high", given["policy_clip"])
        least = 1 - given["policy_clip"]
        objective = min(ratio * a[t], min(max(ratio, least), most) * a[t])
        low += a[t] < 0 and ratio < least
        high += a[t] > 0 and ratio > most
        if a[t] < 0 and "dual_clip" in given and objective < given["dual_clip"] * a[t]:
            objective = given["dual_clip"] * a[t]
            high += 1
        total -= w[t] * objective
    return total, low, high


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_losses_gradients_and_counts_equal_a_slow_loop(seed, name):
    """Gradients by differences of the loop's loss, whose tokens are away from kinks."""
    *tensors, mask = batch_of(seed)
    arguments = VARIANTS[name]
    tensors[0].requires_grad_()
    loss, stats = loss_of(name)(*tensors[:3], mask, weights=tensors[3])
    total, counts, expected, step = 0.0, np.zeros(2), np.zeros((B, T)), 1e-5
    for row, (new, old, a, w) in enumerate(sequences(mask, *(tensor.detach() for tensor in tensors))):
        ratio = np.exp(new - old)
        if arguments.get("importance_sampling_level") == "sequence" and len(new):
            ratio = np.full(len(new), np.exp(np.mean(new - old)))
        one, low, high = slow_row(new, old, a, w, frozen=ratio, **arguments)
        total, counts = total + one, counts + [low, high]
        for t in range(len(new)):
            moved = [np.where(np.arange(len(new)) == t, new + sign * step, new) for sign in (1, -1)]
            above, below = (slow_row(each, old, a, w, frozen=ratio, **arguments)[0] for each in moved)
            expected[row, t] = (above - below) / (2 * step)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    np.testing.assert_allclose(gradient(loss, tensors[0]), expected, rtol=1e-4, atol=1e-5)
    assert (stats.clipped_low.item(), stats.clipped_high.item()) == tuple(counts)
    assert stats.clipped_count.item() == counts.sum() > 0


def test_clips_by_hand():
    # Clip 0.2 below, 0.5 above, dual clip 3. Ratios 1.4, 1.6, 0.7, 4, 2, 0.7 with A 1, 1, -1, -2, -2, 1:
    #   1.4 inside; 1.5 clipped above; -0.8 clipped below; max(-8, 3 * -2) = -6 by the dual clip; -4; 0.7. Sum -7.2.
    ratios = torch.tensor([[1.4, 1.6, 0.7, 4.0, 2.0, 0.7]])
    log_probs = ratios.log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -2.0, -2.0, 1.0]])
    clips = {"policy_clip": 0.2, "policy_clip_high": 0.5}
    loss, stats = policy_loss(log_probs, torch.zeros(1, 6), advantages, every_token(1, 6), dual_clip=3.0, **clips)
    assert loss.item() == pytest.approx(7.2)
    torch.testing.assert_close(gradient(loss, log_probs), torch.tensor([[-1.4, 0, 0, 0, 4, -0.7]]))
    assert (stats.clipped_low.item(), stats.clipped_high.item(), stats.clipped_count.item()) == (1, 2, 3)
    for off in (None, 0.0):
        loss, stats = policy_loss(log_probs, torch.zeros(1, 6), advantages, every_token(1, 6), dual_clip=off, **clips)
        assert (loss.item(), stats.clipped_count.item()) == (pytest.approx(9.2), 2)


def test_the_ratio_of_a_sequence_by_hand():
    # Ratios 2 and 8 of two tokens: s = sqrt(16) = 4, and its derivative by either log-probability is 4 / 2. A = 3 for
    # both tokens: loss -24, gradient -(3 + 3) * 2 for each. Row 1 has ratio 1/2: s = 1/2.
    log_probs = torch.tensor([[2.0, 8.0, NAN], [0.5, NAN, NAN]]).log().requires_grad_()
    mask = lengths_to_mask(torch.tensor([2, 1]), 3)
    old, advantages = torch.zeros(2, 3), torch.full((2, 3), 3.0)
    loss, stats = policy_loss(log_probs, old, advantages, mask, policy_clip=9.0, importance_sampling_level="sequence")
    assert loss.item() == pytest.approx(-24 - 1.5)
    torch.testing.assert_close(gradient(loss, log_probs), torch.tensor([[-12.0, -12.0, 0.0], [-1.5, 0.0, 0.0]]))
    assert (stats.ratio_sum.item(), stats.ratio_max.item()) == (pytest.approx(8.5), pytest.approx(4))
    assert stats.abs_log_ratio_max.item() == pytest.approx(math.log(8))  # of a token, whatever the level


def test_cispo_by_hand():
    # Ratios 2 (A = 1) and 6 (A = -1), cap 5: -(2 * 1 * ln 2) + 5 * ln 6; gradients -2 and 5, the capped one's.
    log_probs = torch.tensor([[2.0, 6.0]]).log().requires_grad_()
    loss, stats = cispo_loss(
        log_probs, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), every_token(1, 2), ratio_cap=5.0
    )
    assert loss.item() == pytest.approx(-2 * math.log(2) + 5 * math.log(6))
    torch.testing.assert_close(gradient(loss, log_probs), torch.tensor([[-2.0, 5.0]]))
    assert (stats.clipped_low.item(), stats.clipped_high.item()) == (0, 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_first_update_is_the_policy_gradient_in_every_variant(name):
    """Ratio 1: of each token with its weight, and of a sequence's the mean over its tokens, which is A for equal A."""
    _, old, advantages, weights, mask = batch_of(5)
    rows = torch.where(mask, advantages[:, :1], NAN)
    log_probs = old.clone().requires_grad_()
    loss, stats = loss_of(name)(log_probs, old, rows, mask)
    torch.testing.assert_close(gradient(loss, log_probs), torch.where(mask, -rows, 0), rtol=1e-5, atol=1e-6)
    assert (stats.clipped_count.item(), stats.ratio_sum.item()) == (0, mask.sum())
    if "sequence" not in name or "cispo" in name:
        loss, _ = loss_of(name)(log_probs, old, advantages, mask, weights=weights)
        torch.testing.assert_close(gradient(loss, log_probs), torch.where(mask, -advantages * weights, 0))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_ratio_stays_finite_in_every_variant(name, advantage):
    log_probs = torch.tensor([[1000.0, 1000.0], [-1000.0, -1000.0]], requires_grad=True)
    loss, stats = loss_of(name)(log_probs, torch.zeros(2, 2), torch.full((2, 2), advantage), every_token(2, 2))
    assert loss.isfinite() and gradient(loss, log_probs).isfinite().all()
    assert stats.ratio_max.item() == pytest.approx(math.exp(20), rel=1e-5)


# --- micro-batches, order of rows, padding ---

AGGREGATIONS = ["token_mean", "sequence_mean", "constant"]


def step_loss(name: str, tensors: list[torch.Tensor], aggregation: str, totals: dict[str, int]) -> torch.Tensor:
    """A micro-batch's part of the loss of a step, all its terms: what the caller divides is there already."""
    log_probs, old, advantages, weights, mask = tensors
    counts = {"num_tokens": totals["num_tokens"], "num_rows": totals["num_rows"]}
    factors = row_factors(mask, aggregation=aggregation, longest=T + 3, **counts)
    loss, _ = loss_of(name)(log_probs, old, advantages, mask, weights=weights * factors)
    loss = loss + 0.1 * kl_loss(log_probs, old, mask, estimator="k3", weights=factors)
    entropy = torch.where(mask, torch.where(mask, log_probs, 0).square(), NAN)
    loss = loss - 0.3 * weighted_sum(entropy, mask, factors)
    return loss / totals["num_tokens"]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_order_and_padding_change_nothing(name, aggregation):
    batch = batch_of(8)
    mask = batch[-1]
    leaf = batch[0].requires_grad_()
    totals = {"num_tokens": int(mask.sum()), "num_rows": int(mask.any(1).sum())}
    whole = step_loss(name, batch, aggregation, totals)
    expected = gradient(whole, leaf)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for sizes in ([6], [1] * 6, [2, 4], [3, 2, 1]):
        rows = [tensor[order] for tensor in batch]
        wider = [functional.pad(row, (0, 4), value=False if row.dtype == torch.bool else NAN) for row in rows]
        parts = zip(*(tensor.split(sizes) for tensor in wider), strict=True)
        summed = torch.stack([step_loss(name, list(part), aggregation, totals) for part in parts]).sum()
        torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(gradient(summed, leaf), expected, rtol=1e-5, atol=1e-8)
    assert expected.isfinite().all() and (expected[~mask] == 0).all() and (expected[mask] != 0).any()


# --- other means than that of tokens ---


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_row_factors_make_the_mean_that_they_name(aggregation):
    mask = ragged_mask(2)
    (losses,) = random_tokens(2, 1, mask)
    num_tokens, num_rows, longest = int(mask.sum()), int(mask.any(1).sum()), 50
    factors = row_factors(mask, aggregation=aggregation, num_tokens=num_tokens, num_rows=num_rows, longest=longest)
    assert factors.shape == (B, 1) and factors.dtype == torch.float32 and factors.isfinite().all()
    found = (torch.where(mask, losses, 0) * factors).sum().item() / num_tokens
    rows = [tokens for (tokens,) in sequences(mask, losses) if len(tokens)]
    expected = {
        "token_mean": np.concatenate(rows).mean(),
        "sequence_mean": np.mean([tokens.mean() for tokens in rows]),
        "constant": np.mean([tokens.sum() / longest for tokens in rows]),
    }
    assert found == pytest.approx(expected[aggregation], rel=1e-5)


def test_an_unknown_mean_is_refused():
    with pytest.raises(ValueError, match="'median'"):
        row_factors(every_token(1, 1), aggregation="median", num_tokens=1, num_rows=1, longest=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_weights_multiply_the_kl_of_a_token(estimator):
    log_probs, ref, _, weights, mask = batch_of(3)
    log_probs.requires_grad_()
    loss = kl_loss(log_probs, ref, mask, estimator=estimator, weights=weights)
    expected = 0.0
    for new, before, w in sequences(mask, log_probs.detach(), ref, weights):
        d = new - before
        expected += (w * (d**2 / 2 if estimator == "k2" else np.exp(-d) - 1 + d)).sum()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient(loss, log_probs), torch.where(mask, weights * (log_probs - ref), 0))


def test_weights_carry_no_gradient():
    log_probs, old, advantages, weights, mask = batch_of(4)
    leaf = weights.requires_grad_()
    loss, _ = policy_loss(log_probs.requires_grad_(), old, advantages, mask, policy_clip=0.2, weights=leaf)
    loss.backward()
    assert leaf.grad is None and log_probs.grad is not None


# --- entropy and right responses ---


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_entropy_bonus_is_the_mean_entropy_of_whole_distributions_by_a_slow_loop(aggregation):
    """-sum_v p_v log p_v of 5 words at each token; the gradient by differences of the loop's mean."""
    mask = ragged_mask(4)
    logits = torch.randn(B, T, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    num_tokens, num_rows = int(mask.sum()), int(mask.any(1).sum())

    def slow(logits: torch.Tensor) -> float:
        total = 0.0
        for row in range(B):
            found = []
            for t in range(int(mask[row].sum())):
                powers = [math.exp(one) for one in logits[row, t].tolist()]
                found.append(-sum(one / sum(powers) * math.log(one / sum(powers)) for one in powers))
            divisor = {
                "token_mean": num_tokens,
                "sequence_mean": num_rows * max(len(found), 1),
                "constant": 20 * num_rows,
            }
            total += sum(found) / divisor[aggregation]
        return total

    logits.requires_grad_()
    logs = logits.log_softmax(-1)
    entropy = torch.where(mask, -(logs.exp() * logs).sum(-1).float(), NAN)
    weights = row_factors(mask, aggregation=aggregation, num_tokens=num_tokens, num_rows=num_rows, longest=20)
    mean = weighted_sum(entropy, mask, weights) / num_tokens
    assert mean.item() == pytest.approx(slow(logits.detach()), rel=1e-5)
    found = gradient(mean, logits)
    for place in ((0, 0, 0), (0, T - 1, 4), (1, 0, 2), (3, 0, 1)):
        step = torch.zeros_like(found)
        step[place] = 1e-5
        expected = (slow(logits.detach() + step) - slow(logits.detach() - step)) / 2e-5
        assert found[place].item() == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert found.isfinite().all() and (found[~mask] == 0).all()
