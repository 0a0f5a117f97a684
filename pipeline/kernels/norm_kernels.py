"""Triton kernels of norms and ReLU in training, forward and backward, each of which reads and writes memory once.

`models/forward/fused_layers.py` calls them. Shapes: T tokens, H channels. One kernel computes the gradient of the input
and sums the gradients of weight and bias, in fp32 and always in the same order. torch reads the gradient three times
for these.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.decode_layers import NormWeights, add_norm, num_warps
from pipeline.tensor_ops import linear_relu

# Programs of a norm's gradient, times channels. More programs keep a large GPU busy, fewer leave less to sum up
# afterwards. Chosen by hand, as are the programs and the tile (rows, columns) of a ReLU's gradient; times on an H200
# are in benchmarks/reports/kernels.md, "Norms and ReLUs in training".
NORM_PROGRAMS_TIMES_WIDTH = 2**20
RELU_PROGRAMS = 1_056
RELU_ROWS, RELU_COLUMNS = 32, 64


@triton.jit
def _norm_gradient(
    gradient, x, weight, x_gradient, sums, eps, rows, rows_each, width,
    WIDTH: tl.constexpr, RMS: tl.constexpr, HAS_WEIGHT: tl.constexpr, WITH_SUMS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x (rows, width), and partial sums (2, programs, width) of those of weight and bias."""
    part, c = tl.program_id(0), tl.arange(0, WIDTH)
    inside = c < width
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32) if HAS_WEIGHT else tl.full([WIDTH], 1.0, tl.float32)
    weight_sum, bias_sum = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    at = (part * rows_each).to(tl.int64) * width + c
    for _ in range(part * rows_each, tl.minimum((part + 1) * rows_each, rows)):
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if not RMS:
            normed = tl.where(inside, normed - tl.sum(normed, 0) / width, 0.0)
        factor = tl.rsqrt(tl.sum(normed * normed, 0) / width + eps)
        normed *= factor
        weighted = g * w
        centred = weighted - normed * (tl.sum(weighted * normed, 0) / width)
        if not RMS:
            centred -= tl.sum(weighted, 0) / width
        tl.store(x_gradient + at, (centred * factor).to(x_gradient.dtype.element_ty), mask=inside)
        if WITH_SUMS:
            weight_sum += g * normed
            bias_sum += g
        at += width
    if WITH_SUMS:
        tl.store(sums + part * width + c, weight_sum, mask=inside)
        tl.store(sums + (tl.num_programs(0) + part) * width + c, bias_sum, mask=inside)


class FusedNorm(torch.autograd.Function):
    """A norm over the last axis: with `rms` an RMSNorm (Zhang and Sennrich 2019, equation 4), else a LayerNorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: tuple[float, bool]) -> Tensor:
        """Norm x (..., H) with weight and bias (H,) or None, all of one floating type; `kind` is (eps, rms)."""
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.view(-1, x.shape[-1])
        if len(rows):
            add_norm(rows, None, NormWeights(weight, bias, *kind), keep_sum=False, out=out)
        ctx.save_for_backward(x, weight)
        ctx.kind = kind
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """Return the gradients of x, weight and bias from the gradient of the output, (..., H)."""
        (x, weight), (eps, rms) = ctx.saved_tensors, ctx.kind
        with_weight, with_bias = ctx.needs_input_grad[1:3]
        gradient, x_gradient, width = gradient.contiguous(), torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        rows_each = triton.cdiv(rows, max(1, NORM_PROGRAMS_TIMES_WIDTH // width)) or 1
        parts = triton.cdiv(rows, rows_each)
        sums = x.new_empty(2, parts, width, dtype=torch.float32) if with_weight or with_bias else None
        if rows:
            _norm_gradient[(parts,)](
                gradient, x, weight, x_gradient, sums, eps, rows, rows_each, width,
                WIDTH=triton.next_power_of_2(width), RMS=rms, HAS_WEIGHT=weight is not None,
                WITH_SUMS=sums is not None, num_warps=num_warps(width),
            )  # fmt: skip
        of_weight, of_bias = (None, None) if sums is None else sums.sum(1).to(x.dtype).unbind()
        return x_gradient, of_weight if with_weight else None, of_bias if with_bias else None, None


@triton.jit
def _relu_gradient(
    gradient, out, before, sums, rows, rows_each, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the gradient where out > 0, else 0, all (rows, width), and the sums (programs, width) of its columns."""
    c, part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(part * rows_each, tl.minimum((part + 1) * rows_each, rows), ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & (c < width)[None, :]
        at = r[:, None].to(tl.int64) * width + c[None, :]
        stopped = tl.load(out + at, mask=inside, other=0.0) <= 0  # False for a NaN, so that it shows in the gradient
        passed = tl.where(stopped, 0.0, tl.load(gradient + at, mask=inside, other=0.0))
        tl.store(before + at, passed.to(before.dtype.element_ty), mask=inside)
        total += passed.to(tl.float32)
    tl.store(sums + part * width + c, tl.sum(total, 0), mask=c < width)


def relu_gradient(gradient: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of y (T, H) from that of out = relu(y), and its sum over tokens (H,), computed in fp32."""
    gradient, (rows, width) = gradient.contiguous(), out.shape
    before = torch.empty_like(out)
    columns = triton.cdiv(width, RELU_COLUMNS)
    parts = max(1, min(RELU_PROGRAMS // columns, triton.cdiv(rows, RELU_ROWS)))
    rows_each = triton.cdiv(triton.cdiv(rows, parts), RELU_ROWS) * RELU_ROWS
    sums = out.new_empty(parts, width, dtype=torch.float32)
    _relu_gradient[(columns, parts)](
        gradient, out, before, sums, rows, rows_each, width, ROWS=RELU_ROWS, COLUMNS=RELU_COLUMNS
    )
    return before, sums.sum(0).to(out.dtype)


class FusedReluLinear(torch.autograd.Function):
    """A linear layer with ReLU, which is computed in the product's epilogue; one kernel computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return relu(x @ W.T + b) (T, F) of x (T, H), weight (F, H), bias (F,); all of one floating type."""
        out = linear_relu(x, weight, bias)
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias from the gradient of the output, (T, F)."""
        x, weight, out = ctx.saved_tensors
        before, bias_gradient = relu_gradient(gradient, out)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        x_gradient, weight_gradient = before @ weight if of_x else None, before.t() @ x if of_weight else None
        return x_gradient, weight_gradient, bias_gradient if of_bias else None
