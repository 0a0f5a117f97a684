import math

import numpy as np
import pytest
import torch

from pipeline.tensor_ops import (
    finish_moments,
    gather_log_probs,
    lengths_to_mask,
    masked_mean,
    masked_sum,
    moments,
    pad_rows,
    position_ids_from_mask,
    whiten,
)

NAN = math.nan


def ragged_batch(seed: int, num_rows: int = 7, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (N, T) with NaN wherever the mask is False; row 0 is empty and row 1 is full."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (num_rows,), generator=generator)
    lengths[0], lengths[1] = 0, width
    mask = lengths_to_mask(lengths, width)
    values = 3 * torch.randn(num_rows, width, generator=generator) + 2
    return torch.where(mask, values, NAN), mask


def counted(values: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    return values[mask].double().numpy()


def test_masked_statistics_by_hand():
    # Counted: 1, 5, 6. Sum 12, mean 4, population variance (9 + 1 + 4) / 3 = 14/3 (the sample variance would be 7).
    values = torch.tensor([[1.0, NAN], [5.0, 6.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert masked_sum(values, mask).item() == 12
    assert masked_mean(values, mask).item() == 4
    assert masked_sum(values, mask, dim=1).tolist() == [1, 11]
    assert masked_mean(values, mask, dim=1).tolist() == [1, 5.5]


@pytest.mark.parametrize("seed", range(4))
def test_masked_statistics_equal_numpy(seed):
    values, mask = ragged_batch(seed)
    expected = counted(values, mask)
    assert masked_sum(values, mask).item() == pytest.approx(expected.sum(), rel=1e-5)
    assert masked_mean(values, mask).item() == pytest.approx(expected.mean(), rel=1e-5)
    for row in range(1, len(values)):
        of_row = counted(values[row], mask[row])
        assert masked_mean(values, mask, dim=1)[row].item() == pytest.approx(of_row.mean(), rel=1e-5)


def test_masked_sum_keeps_nan_out_of_the_gradient():
    values = torch.tensor([2.0, NAN], requires_grad=True)
    (gradient,) = torch.autograd.grad(masked_sum(3 * values, torch.tensor([True, False])), values)
    assert gradient.tolist() == [3, 0]


def test_an_empty_mask_gives_zero():
    values, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(values, mask).item() == 0
    assert [m.item() for m in finish_moments(moments(values, mask))] == [0, 0]
    assert whiten(values, mask, mean=torch.tensor(0.0), var=torch.tensor(0.0)).tolist() == [[0.0] * 3] * 2


def test_masked_sum_refuses_a_mask_that_would_broadcast():
    with pytest.raises(AssertionError):
        masked_sum(torch.ones(2, 3), torch.ones(1, 3, dtype=torch.bool))


def test_moments_by_hand():
    values, mask = torch.tensor([[1.0, NAN], [5.0, 6.0]]), torch.tensor([[True, False], [True, True]])
    count, total, total_of_squares = moments(values, mask)
    assert (count.item(), total.item(), total_of_squares.item()) == (3, 12, 1 + 25 + 36)
    mean, var = finish_moments(moments(values, mask))
    assert (mean.item(), var.item()) == (4, pytest.approx(14 / 3))
    assert mean.dtype == var.dtype == torch.float64


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_moments_of_fake_ranks_add_up_to_the_global_ones(num_ranks):
    values, mask = ragged_batch(seed=5)
    parts = zip(values.tensor_split(num_ranks), mask.tensor_split(num_ranks), strict=True)
    mean, var = finish_moments(torch.stack([moments(v, m) for v, m in parts]).sum(0))
    assert mean.item() == pytest.approx(counted(values, mask).mean(), rel=1e-12)
    assert var.item() == pytest.approx(counted(values, mask).var(), rel=1e-12)


def test_moments_survive_a_large_offset():
    # In fp32, 1e4**2 + ... would lose the variance of 2/3 altogether.
    mean, var = finish_moments(moments(torch.tensor([9999.0, 10000.0, 10001.0]), torch.ones(3, dtype=torch.bool)))
    assert (mean.item(), var.item()) == (10000, pytest.approx(2 / 3, rel=1e-6))


def test_the_variance_of_a_constant_is_never_negative():
    # 0.1 is no binary fraction: for some counts, mean of squares minus square of mean rounds below zero.
    for count in range(1, 200):
        assert finish_moments(moments(torch.full((count,), 0.1), torch.ones(count, dtype=torch.bool)))[1] >= 0


def test_whitening_of_fake_ranks_equals_numpy_over_all_of_them():
    values, mask = ragged_batch(seed=6)
    everything = counted(values, mask)
    expected = (everything - everything.mean()) / np.sqrt(everything.var() + 1e-8)
    parts = list(zip(values.tensor_split(3), mask.tensor_split(3), strict=True))
    mean, var = finish_moments(torch.stack([moments(v, m) for v, m in parts]).sum(0))
    whitened = torch.cat([whiten(v, m, mean=mean, var=var) for v, m in parts])
    np.testing.assert_allclose(counted(whitened, mask), expected, rtol=1e-5, atol=1e-6)
    assert whitened.dtype == torch.float32
    assert (whitened[~mask] == 0).all()


def test_whitening_adds_eps_under_the_root():
    # A constant batch: (3 - 3) / sqrt(0 + eps) = 0; and 1 / sqrt(0 + 0.25) = 2.
    values, mask = torch.tensor([4.0]), torch.tensor([True])
    assert whiten(values, mask, mean=torch.tensor(3.0), var=torch.tensor(0.0), eps=0.25).item() == 2
    assert whiten(values, mask, mean=torch.tensor(4.0), var=torch.tensor(0.0)).item() == 0


def test_pad_rows_on_either_side():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]
    assert pad_rows(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert pad_rows(rows, 9, side="left").tolist() == [[1, 2, 3], [9, 9, 4], [9, 9, 9]]
    assert pad_rows(rows, 9, side="left", length=4).tolist() == [[9, 1, 2, 3], [9, 9, 9, 4], [9, 9, 9, 9]]
    assert pad_rows(rows, 0).dtype == torch.int64
    assert pad_rows([torch.tensor([0.5])], 0.25, length=2).tolist() == [[0.5, 0.25]]


def test_pad_rows_never_truncates():
    with pytest.raises(ValueError, match="a row has 3 entries"):
        pad_rows([torch.tensor([1, 2, 3])], 0, length=2)


def test_lengths_to_mask():
    assert lengths_to_mask(torch.tensor([0, 2, 3]), 3).tolist() == [[False] * 3, [True, True, False], [True] * 3]


def test_position_ids_count_real_tokens_only():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    positions = position_ids_from_mask(mask)
    assert positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 2], [0, 0, 0, 0]]
    assert positions.dtype == torch.int64


def test_gather_log_probs_by_hand():
    # softmax([0, ln 3]) = [1/4, 3/4].
    logits = torch.tensor([[[0.0, math.log(3)], [0.0, math.log(3)]]])
    expected = torch.tensor([[math.log(1 / 4), math.log(3 / 4)]])
    torch.testing.assert_close(gather_log_probs(logits, torch.tensor([[0, 1]])), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gather_log_probs_works_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(3, 5, 40, generator=generator)).to(dtype)
    targets = torch.randint(40, (3, 5), generator=generator)
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = np.take_along_axis(exact, targets.numpy()[..., None], -1)[..., 0]
    log_probs = gather_log_probs(logits, targets)
    assert log_probs.dtype == torch.float32
    np.testing.assert_allclose(log_probs.numpy(), expected, rtol=1e-6, atol=1e-5)


def test_gather_log_probs_is_stable_for_huge_logits():
    logits = torch.tensor([[10000.0, 0.0]], requires_grad=True)
    log_probs = gather_log_probs(logits, torch.tensor([1]))
    assert log_probs.item() == -10000
    assert torch.autograd.grad(log_probs.sum(), logits)[0].tolist() == [[-1.0, 1.0]]
