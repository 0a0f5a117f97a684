"""Pure functions of tensors: masked statistics, padding, position ids, log-probabilities, norms.

Shapes: N rows, T positions, V vocabulary. A mask is bool, has the shape of the values, and True means "counts".
Entries where a mask is False are never read into a result: NaN or Inf there changes neither values nor gradients.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def round_up(number: int, unit: int) -> int:
    """Round `number` up to a multiple of `unit`."""
    return -(-number // unit) * unit


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of the values that count, over everything or over `dim`; 0 where none counts."""
    assert mask.dtype == torch.bool and mask.shape == values.shape, (mask.dtype, mask.shape, values.shape)
    return torch.where(mask, values, 0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of the values that count; 0 where none counts, so that a padding row stays harmless."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return (count, sum, sum of squares) of the values that count, as one float64 tensor (3,).

    Moments of separate batches add up: sum them over micro-batches or ranks, then call `finish_moments`.
    """
    values = values.detach().double()
    return torch.stack([mask.sum().double(), masked_sum(values, mask), masked_sum(values.square(), mask)])


def finish_moments(summed: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population variance, float64 scalars, of everything whose `moments` are added in `summed`."""
    assert summed.shape == (3,) and summed.dtype == torch.float64, (summed.shape, summed.dtype)
    count, total, total_of_squares = summed.unbind()
    mean = total / count.clamp(min=1)
    variance = total_of_squares / count.clamp(min=1) - mean.square()
    return mean, variance.clamp(min=0)  # rounding can leave a constant batch a hair below zero


def whiten(values: Tensor, mask: Tensor, *, mean: Tensor, var: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (values - mean) / sqrt(var + eps) where the mask counts, else 0.

    `mean` and `var` are scalars from `finish_moments`, taken over all ranks: statistics of one rank would make the
    result depend on the number of ranks.
    """
    assert mask.dtype == torch.bool and mask.shape == values.shape, (mask.dtype, mask.shape, values.shape)
    assert mean.dim() == 0 and var.dim() == 0, (mean.shape, var.shape)
    return torch.where(mask, (values - mean) * torch.rsqrt(var + eps), 0)


def pad_rows(
    rows: list[Tensor], value: float, *, side: Literal["left", "right"] = "right", length: int | None = None
) -> Tensor:
    """Stack 1-D rows into (N, T), filled up with `value` on `side`; T is the longest row, or `length` if given."""
    assert rows and all(row.dim() == 1 and row.dtype == rows[0].dtype for row in rows), "rows: 1-D, of one dtype"
    longest = max(len(row) for row in rows)
    width = longest if length is None else length
    if longest > width:
        raise ValueError(f"a row has {longest} entries, more than the length {width} to pad to")
    filled = lengths_to_mask(torch.tensor([len(row) for row in rows], device=rows[0].device), width)
    padded = rows[0].new_full((len(rows), width), value)
    return padded.masked_scatter_(filled if side == "right" else filled.flip(1), torch.cat(rows))


def lengths_to_mask(lengths: Tensor, length: int) -> Tensor:
    """Return the (N, length) mask of right-padded rows: True at the first `lengths[i]` positions of row i."""
    assert lengths.dim() == 1 and lengths.dtype == torch.int64, (lengths.shape, lengths.dtype)
    return torch.arange(length, device=lengths.device) < lengths.unsqueeze(1)


def check_right_padded(mask: Tensor) -> None:
    """Raise ValueError for a row of an (N, T) mask in which padding precedes a real token; waits for a GPU's mask."""
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("rows must be padded on the right: a real token follows padding")


def position_ids_from_mask(mask: Tensor) -> Tensor:
    """Return (N, T) int64 positions that count real tokens only, for either padding side; 0 on padding at the left."""
    assert mask.dim() == 2 and mask.dtype == torch.bool, (mask.shape, mask.dtype)
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def gather_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-softmax of `logits` (..., V) at the ids `targets` (...), in fp32 for any dtype of the logits.

    The logits at position t predict the target at position t: the caller shifts. It also divides by the temperature.
    """
    assert logits.shape[:-1] == targets.shape and targets.dtype == torch.int64, (logits.shape, targets.shape)
    return logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norms of n tensors, (n,) fp32, computed in fp32 for any dtype."""
    if hasattr(torch, "_foreach_norm"):  # one kernel for many tensors
        return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x @ W.T + b), (M, F), of x (M, H), weight (F, H) and bias (F,); not differentiable."""
    if hasattr(torch, "_addmm_activation"):  # the ReLU is part of the product's kernel
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=False)
    return functional.linear(x, weight, bias).relu_()


def check_tokens(*tensors: Tensor, mask: Tensor | None = None) -> None:
    """Assert that all tensors are (B, T) fp32 of one shape, and that the mask is bool of that shape."""
    shape = tensors[0].shape
    assert len(shape) == 2, f"expected (B, T), got {tuple(shape)}"
    assert all(t.shape == shape and t.dtype == torch.float32 for t in tensors), [(t.shape, t.dtype) for t in tensors]
    assert mask is None or (mask.shape == shape and mask.dtype == torch.bool), (mask.shape, mask.dtype)


def zero_outside(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors, checked by `check_tokens`, with 0 where the mask is False."""
    check_tokens(*tensors, mask=mask)
    return [torch.where(mask, tensor, 0) for tensor in tensors]
