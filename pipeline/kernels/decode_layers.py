"""Triton kernels of a decode step other than attention: residual and norm, rotary positions, the gate of the MLP.

M rows, H hidden size, D channels a head. All arithmetic is fp32; results are stored in the tensors' own type.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.split_kv import HeadLayout

# Up to this many rows, all of them run on a GPU at a time, and twice the threads per row make each faster; measured on
# an H200 at 64 to 256 rows (docs/experiments.md, "Decode step on H200", third round).
MAX_ROWS_WITH_MORE_WARPS = 1024


@triton.jit
def _add_norm(
    residual, branch, branch_bias, weight, bias, out, eps, width, rows,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS_BRANCH_BIAS: tl.constexpr, KEEP_SUM: tl.constexpr,
    RMS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
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
    if RMS:
        x = x.to(out.dtype.element_ty).to(tl.float32)  # as transformers rounds it before the weight
    if HAS_WEIGHT:
        x = x * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x = x + tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + c, x.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of a LayerNorm, or with `rms` of an RMSNorm: weight and bias (H,) or None."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool


@dataclass(frozen=True, slots=True)
class Branch:
    """The output of attention or MLP before it is added to the residual: (M, H), or S summands (S, M, H); bias (H,)."""

    values: Tensor
    bias: Tensor | None = None


def num_warps(width: int) -> int:
    """Return the number of warps for a program that holds one row of `width` numbers."""
    return 1 if width <= 256 else 4 if width < 2048 else 8


def add_norm(residual: Tensor, branch: Branch | None, norm: NormWeights, *, keep_sum: bool, out: Tensor) -> Tensor:
    """Write norm(residual + branch) to `out`, all (M, H) contiguous; with `keep_sum` the sum replaces `residual`."""
    rows, width = residual.shape
    values, branch_bias = (None, None) if branch is None else (branch.values, branch.bias)
    num_parts = 0 if values is None else len(values) if values.dim() == 3 else 1
    _add_norm[(rows,)](
        residual, values, branch_bias, norm.weight, norm.bias, out, norm.eps, width, rows,
        WIDTH=triton.next_power_of_2(width), PARTS=num_parts, HAS_BRANCH_BIAS=branch_bias is not None,
        KEEP_SUM=keep_sum, RMS=norm.rms, HAS_WEIGHT=norm.weight is not None, HAS_BIAS=norm.bias is not None,
        num_warps=num_warps(width) * (2 if rows <= MAX_ROWS_WITH_MORE_WARPS else 1),
    )  # fmt: skip
    return out


@triton.jit
def _rotate(
    qkv, cos, sin, lengths, q_weight, k_weight, eps, q_offset, k_offset, qkv_stride,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(lengths + row)
    h = tl.arange(0, HALF)
    inside = h < D // 2
    is_key = head >= HEADS
    column = tl.where(is_key, k_offset + (head - HEADS) * D, q_offset + head * D)
    at = row.to(tl.int64) * qkv_stride + column + h
    low = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv + at + D // 2, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        if is_key:
            low_weight = tl.load(k_weight + h, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(k_weight + D // 2 + h, mask=inside, other=0.0).to(tl.float32)
        else:
            low_weight = tl.load(q_weight + h, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(q_weight + D // 2 + h, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
        dtype = qkv.dtype.element_ty
        low = ((low * factor).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        high = ((high * factor).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    c = tl.load(cos + position * (D // 2) + h, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + position * (D // 2) + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(qkv + at, (low * c - high * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(qkv + at + D // 2, (high * c + low * s).to(qkv.dtype.element_ty), mask=inside)


def rotate(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    *,
    lengths: Tensor,
    layout: HeadLayout,
    norms: tuple[NormWeights, NormWeights] | None,
) -> None:
    """Rotate q and k of each row in place to position `lengths[m]` (Su et al. 2021), after their norms if given.

    rotary: tables of cos and sin, (positions, D / 2) contiguous, in the model's type.
    """
    head_dim = layout.head_dim
    q_weight, k_weight, eps = (norms[0].weight, norms[1].weight, norms[0].eps) if norms else (qkv, qkv, 0.0)
    _rotate[(len(qkv), layout.num_heads + layout.num_kv_heads)](
        qkv, *rotary, lengths, q_weight, k_weight, eps, layout.q_offset, layout.k_offset, qkv.stride(0),
        HEADS=layout.num_heads, D=head_dim, HALF=triton.next_power_of_2(head_dim // 2), NORMED=norms is not None,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _gate(joined, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    gate = tl.load(joined + row * 2 * width + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * width + width + c, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + c, (silu * up).to(out.dtype.element_ty), mask=inside)


def silu_gate(joined: Tensor) -> Tensor:
    """Return silu(gate) * up (M, F) of gate and up joined, (M, 2 F) contiguous (Shazeer 2020, SwiGLU)."""
    rows, width = len(joined), joined.shape[1] // 2
    out = torch.empty(rows, width, dtype=joined.dtype, device=joined.device)
    _gate[(rows, triton.cdiv(width, 1024))](joined, out, width, BLOCK=1024)
    return out
