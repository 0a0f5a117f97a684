import math

import pytest
import torch

from pipeline.tensor_ops import gather_log_probs, lengths_to_mask
from step1_sft.loss import token_sum_loss


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, S) and a ragged mask of trained tokens that skips each row's prompt."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(7, 12, generator=generator) * 5
    ends = torch.randint(4, 13, (7,), generator=generator)
    starts = torch.randint(0, 4, (7,), generator=generator)
    return log_probs, lengths_to_mask(ends, 12) & ~lengths_to_mask(starts, 12)


def test_loss_by_hand():
    # Trained: ln 1/2, ln 1/4, ln 1/8. The sum of the negatives is ln 2 + 2 ln 2 + 3 ln 2 = 6 ln 2.
    log_probs = torch.tensor([[0.5, 0.25, 0.125], [0.125, 1.0, 0.3]]).log()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert token_sum_loss(log_probs, mask).item() == pytest.approx(6 * math.log(2))


def test_loss_equals_torch_cross_entropy():
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(7, 12, 30, generator=generator), torch.randint(30, (7, 12), generator=generator)
    _, mask = random_batch()
    labels = torch.where(mask, targets, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(token_sum_loss(gather_log_probs(logits, targets), mask), expected, rtol=1e-6, atol=0)


def test_untrained_positions_change_nothing():
    log_probs, mask = random_batch()
    garbage = torch.where(mask, log_probs, math.nan).requires_grad_()
    loss = token_sum_loss(garbage, mask)
    assert loss.item() == token_sum_loss(log_probs, mask).item()
    assert torch.autograd.grad(loss, garbage)[0].equal(-mask.float())


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 4], [5, 1, 1], [2, 0, 5]])
@pytest.mark.parametrize("world_size", [1, 2])
def test_any_split_gives_the_mean_over_all_tokens(sizes, world_size):
    """Micro-batches dealt out to ranks; each rank sums its own, ranks are averaged as DeepSpeed does it."""
    log_probs, mask = random_batch()
    log_probs.requires_grad_()
    expected = -log_probs[mask].mean()
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    scale = world_size / mask.sum()
    micro_losses = [token_sum_loss(p, m) for p, m in zip(log_probs.split(sizes), mask.split(sizes), strict=True)]
    rank_losses = [scale * sum(micro_losses[rank::world_size]) for rank in range(world_size)]
    loss = sum(rank_losses) / world_size
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=0)


def test_half_precision_log_probs_are_refused():
    with pytest.raises(AssertionError):
        token_sum_loss(torch.zeros(1, 2, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bool))
