import math
from collections.abc import Callable

import pytest
import torch
from support.ragged import every_token, gradient, ragged_mask, random_tokens, sequences

from pipeline.tensor_ops import lengths_to_mask
from step3_ppo.mathematics.losses import kl_loss, policy_loss, value_loss

NAN = math.nan
SPLITS = [[6], [1] * 6, [2, 4], [3, 2, 1]]


def test_policy_loss_by_hand():
    # Clip 0.2, ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 1, -1, 1, -1, 2:
    #   min(1.5, 1.2) = 1.2 clipped; min(-1.5, -1.2) = -1.5; min(0.5, 0.8) = 0.5; min(-0.5, -0.8) = -0.8 clipped; 2.2
    # Sum 1.6, loss -1.6. A clipped token has no gradient, any other one -ratio * A.
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1, 9.0]])
    log_probs = ratios.log().requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0, 7.0]])
    mask = lengths_to_mask(torch.tensor([5]), 6)
    loss, stats = policy_loss(log_probs, torch.zeros(1, 6), advantages, mask, policy_clip=0.2)
    assert loss.item() == pytest.approx(-1.6)
    torch.testing.assert_close(gradient(loss, log_probs), torch.tensor([[0.0, 1.5, -0.5, 0.0, -2.2, 0.0]]))
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
    for new_row, old_row, advantage_row in sequences(mask, log_probs, old, advantages):
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
    assert loss.item() == pytest.approx(-advantages[mask].sum().item(), rel=1e-5)
    assert gradient(loss, log_probs).equal(torch.where(mask, -advantages, 0))
    assert stats.ratio_sum.item() == mask.sum()
    assert (stats.ratio_max.item(), stats.abs_log_ratio_max.item(), stats.clipped_count.item()) == (1, 0, 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_ratio_stays_finite(advantage):
    log_probs = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    loss, stats = policy_loss(
        log_probs, torch.zeros(1, 2), torch.full((1, 2), advantage), every_token(1, 2), policy_clip=0.2
    )
    assert loss.isfinite()
    assert gradient(loss, log_probs).isfinite().all()
    assert stats.ratio_max.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert stats.abs_log_ratio_max.item() == 1000


def test_statistics_carry_no_graph():
    one = torch.ones(1, 1)
    _, stats = policy_loss(one.clone().requires_grad_(), one, one, every_token(1, 1), policy_clip=0.2)
    assert not any(stat.requires_grad for stat in stats)


def test_a_batch_without_tokens_has_zero_loss_and_statistics():
    nothing, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    loss, stats = policy_loss(nothing, nothing, nothing, mask, policy_clip=0.2)
    assert [loss.item(), *(stat.item() for stat in stats)] == [0] * 7
    assert [tensor.item() for tensor in value_loss(nothing, nothing, nothing, mask, value_clip=0.2)] == [0, 0]


def test_a_nan_inside_the_response_is_not_hidden():
    bad, mask = torch.tensor([[0.0, NAN]]), every_token(1, 2)
    good = torch.zeros(1, 2)
    assert policy_loss(bad, good, good, mask, policy_clip=0.2)[0].isnan()
    assert value_loss(bad, good, good, mask, value_clip=0.2)[0].isnan()
    assert kl_loss(bad, good, mask, estimator="k3").isnan()


# --- value loss ---


def test_value_loss_by_hand():
    # Clip 1, old values 0. V = 3, R = 4: errors 1 and, clipped to 1, 9: the larger counts, 4.5, clipped.
    # V = 3, R = 0: errors 9 and 1: 4.5, not clipped. V = 0.5, R = 2: both 2.25: 1.125, not clipped.
    values = torch.tensor([[3.0, 3.0, 0.5, 9.0]], requires_grad=True)
    returns = torch.tensor([[4.0, 0.0, 2.0, 5.0]])
    mask = lengths_to_mask(torch.tensor([3]), 4)
    loss, clipped_count = value_loss(values, torch.zeros(1, 4), returns, mask, value_clip=1.0)
    assert loss.item() == 4.5 + 4.5 + 1.125
    assert clipped_count.item() == 1
    assert gradient(loss, values).tolist() == [[0, 3, -1.5, 0]]


def test_values_inside_the_clip_range_never_count_as_clipped():
    """Rounding must not: old + (new - old) is not exactly new where the two differ in sign."""
    generator = torch.Generator().manual_seed(0)
    old = 0.1 * torch.rand(64, 8, generator=generator)
    values = 0.03 * torch.rand(64, 8, generator=generator) - old
    returns = 0.01 * torch.randn(64, 8, generator=generator)
    _, clipped_count = value_loss(values, old, returns, every_token(64, 8), value_clip=0.2)
    assert clipped_count.item() == 0


def test_value_loss_without_a_clip_is_half_the_squared_error():
    # (1 + 9 + 2.25) / 2 for the same numbers.
    values, returns = torch.tensor([[3.0, 3.0, 0.5]]), torch.tensor([[4.0, 0.0, 2.0]])
    loss, clipped_count = value_loss(values, torch.zeros(1, 3), returns, every_token(1, 3), value_clip=None)
    assert (loss.item(), clipped_count.item()) == (6.125, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value_clip", [0.2, None])
def test_value_loss_equals_a_slow_loop(seed, value_clip):
    mask = ragged_mask(seed)
    values, old_values, returns = random_tokens(seed, 3, mask)
    total, count = 0.0, 0
    for v_row, old_row, r_row in sequences(mask, values, old_values, returns):
        for v, old, r in zip(v_row, old_row, r_row, strict=True):
            bounded = v if value_clip is None else old + min(max(v - old, -value_clip), value_clip)
            total += 0.5 * max((v - r) ** 2, (bounded - r) ** 2)
            count += (bounded - r) ** 2 > (v - r) ** 2
    loss, clipped_count = value_loss(values, old_values, returns, mask, value_clip=value_clip)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert clipped_count.item() == count


# --- all of the losses ---

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
    summed = torch.stack([LOSSES[name](*part) / mask.sum() for part in parts]).sum()
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-7)
    gradients = [gradient(loss, leaf) for loss in (summed, whole)]
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
    mask = every_token(1, 2)
    good = torch.zeros(1, 2)
    for wrong in (torch.zeros(1, 1), good.double(), good.bfloat16(), torch.zeros(2)):
        with pytest.raises(AssertionError):
            LOSSES[name](good, wrong, good, mask)
    with pytest.raises(AssertionError):
        LOSSES[name](good, good, good, mask.float())
