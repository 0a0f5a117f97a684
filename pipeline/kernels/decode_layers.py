"""Triton kernels of a decode step other than attention: residual and norm, rotary positions, the gate of the MLP.

M rows, H hidden size, D channels a head. All arithmetic is fp32; results are stored in the tensors' own type.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.split_kv import HeadLayout

# Rows up to which a norm uses twice the threads per row: all rows run on the GPU at once, and each is faster. Measured
# on an H200 at 64 to 256 rows (benchmarks/reports/decode.md, third round).
MAX_ROWS_WITH_MORE_WARPS = 1024


@triton.jit
def _add_norm(
    residual, branch, branch_bias, weight, bias, out, eps, offset, width, rows,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS_BRANCH_BIAS: tl.constexpr, KEEP_SUM: tl.constexpr,
    RMS: tl.constexpr, ROUNDS_FIRST: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, WIDTH)
    inside = c < width
    total = tl.load(residual + row * width + c, mask=inside, other=0.0)
    if PARTS > 0:
        added = tl.load(branch + row * width + c, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(branch + (part * rows + row) * width + c, mask=inside, other=0.0).to(tl.float32)
        if HAS_BRANCH_BIAS:
            added += tl.load(branch_bias + c, mask=inside, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + added).to(residual.dtype.element_ty)
    if KEEP_SUM:
        tl.store(residual + row * width + c, total, mask=inside)
    x = total.to(tl.float32)
    if not RMS:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if RMS and ROUNDS_FIRST:
        x = x.to(out.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        x = x * (tl.load(weight + c, mask=inside, other=0.0).to(tl.float32) + offset)
    if HAS_BIAS:
        x = x + tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + c, x.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of a LayerNorm, or of an RMSNorm.

    weight: (H,), or None.
    bias: (H,), or None.
    eps: number added to the variance.
    rms: the norm is an RMSNorm.
    offset: number added to the weight.
    rounds_first: the normed values are rounded before their product with the weight.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool
    offset: float = 0.0
    rounds_first: bool = True

    def rounds_to(self, dtype: torch.dtype) -> bool:
        """Return True if normed values are rounded to `dtype` before the product, which needs a weight of that type."""
        return self.rounds_first and self.weight is not None and self.weight.dtype == dtype


@dataclass(frozen=True, slots=True)
class Branch:
    """The output of attention or MLP before it is added to the residual.

    values: (M, H), or S summands (S, M, H).
    bias: (H,), or None.
    """

    values: Tensor
    bias: Tensor | None = None


def num_warps(width: int) -> int:
    """Return the number of warps for a program that holds one row of `width` numbers."""
    return 1 if width <= 256 else 4 if width < 2048 else 8


def add_norm(residual: Tensor, branch: Branch | None, norm: NormWeights, *, keep_sum: bool, out: Tensor) -> Tensor:
    """Write norm(residual + branch) to `out` and return it; all are (M, H) contiguous.

    keep_sum: the sum replaces `residual`.
    """
    rows, width = residual.shape
    values, branch_bias = (None, None) if branch is None else (branch.values, branch.bias)
    num_parts = 0 if values is None else len(values) if values.dim() == 3 else 1
    _add_norm[(rows,)](
        residual, values, branch_bias, norm.weight, norm.bias, out, norm.eps, norm.offset, width, rows,
        WIDTH=triton.next_power_of_2(width), PARTS=num_parts, HAS_BRANCH_BIAS=branch_bias is not None,
        KEEP_SUM=keep_sum, RMS=norm.rms, ROUNDS_FIRST=norm.rounds_to(out.dtype), HAS_WEIGHT=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        num_warps=num_warps(width) * (2 if rows <= MAX_ROWS_WITH_MORE_WARPS else 1),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    qkv, cos, sin, lengths, q_weight, k_weight, eps, norm_offset, q_offset, k_offset, qkv_stride,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(lengths + row)
    h = tl.arange(0, HALF)
    inside = h < R // 2
    is_key = head >= HEADS
    column = tl.where(is_key, k_offset + (head - HEADS) * D, q_offset + head * D)
    at = row.to(tl.int64) * qkv_stride + column + h
    low = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv + at + R // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        if is_key:
            low_weight = tl.load(k_weight + h, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(k_weight + D // 2 + h, mask=inside, other=0.0).to(tl.float32)
        else:
            low_weight = tl.load(q_weight + h, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(q_weight + D // 2 + h, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
        dtype = qkv.dtype.element_ty
        low, high = low * factor, high * factor
        if ROUNDS_FIRST:
            low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        low = (low * (low_weight + norm_offset)).to(dtype).to(tl.float32)
        high = (high * (high_weight + norm_offset)).to(dtype).to(tl.float32)
    c = tl.load(cos + position * (R // 2) + h, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + position * (R // 2) + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(qkv + at, (low * c - high * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(qkv + at + R // 2, (high * c + low * s).to(qkv.dtype.element_ty), mask=inside)


def rotate(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    *,
    lengths: Tensor,
    layout: HeadLayout,
    norms: tuple[NormWeights, NormWeights] | None,
) -> None:
    """Rotate q and k of each row in place to position `lengths[m]` (Su et al. 2021).

    rotary: tables of cos and sin, (positions, R / 2) contiguous, in the model's type; the first R channels of a head
    rotate.
    norms: RMSNorms of q and k that come before the rotation; with them R is D.
    """
    half = rotary[0].shape[1]
    q_norm, k_norm = norms or (NormWeights(qkv, None, 0.0, True),) * 2
    _rotate[(len(qkv), layout.num_heads + layout.num_kv_heads)](
        qkv, *rotary, lengths, q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset,
        layout.q_offset, layout.k_offset, qkv.stride(0),
        HEADS=layout.num_heads, D=layout.head_dim, R=2 * half, HALF=triton.next_power_of_2(half),
        NORMED=norms is not None, ROUNDS_FIRST=q_norm.rounds_to(qkv.dtype), num_warps=1,
    )  # fmt: skip


@triton.jit
def tanh_gelu_exponent(x):
    """Return y and dy/dx of the approximate GELU x (1 + tanh(y / 2)) / 2, which is x sigmoid(y)."""
    square = 0.044715 * x * x
    return 1.5957691216057308 * x * (1.0 + square), 1.5957691216057308 * (1.0 + 3.0 * square)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return activation(x) in fp32; ACTIVATION is silu, gelu_tanh, gelu, or else relu."""
    if ACTIVATION == "silu":
        active = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        active = x * tl.sigmoid(tanh_gelu_exponent(x)[0])
    elif ACTIVATION == "gelu":
        active = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        active = tl.maximum(x, 0.0)
    return active


@triton.jit
def _gate(joined, out, width, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    gate = tl.load(joined + row * 2 * width + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * width + width + c, mask=inside, other=0.0).to(tl.float32)
    active = activated(gate, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + c, (active * up).to(out.dtype.element_ty), mask=inside)


def gated(joined: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up (M, F) (Shazeer 2020, SwiGLU, GEGLU).

    joined: gate and up side by side, (M, 2 F) contiguous.
    activation: relu, silu, gelu or gelu_tanh.
    """
    rows, width = len(joined), joined.shape[1] // 2
    out = torch.empty(rows, width, dtype=joined.dtype, device=joined.device)
    _gate[(rows, triton.cdiv(width, 1024))](joined, out, width, BLOCK=1024, ACTIVATION=activation)
    return out
