"""Triton kernels of attention in a decode step: each row's new token over the row's own keys.

M rows (slots), one new token each; Hq query heads, Hkv heads of keys and values, D channels a head, S positions of
room. Lengths and flags are read from device memory, so that one CUDA graph serves rows of any length, and a row that
has finished costs an exit. All arithmetic is fp32; what is stored has the tensors' own type.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend_one(
    qkv, keys, values, out, lengths, active, scale, q_offset, k_offset, v_offset, qkv_stride, row_stride, head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A query head with keys of its own: dot products as sums, one program a (row, head)."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(active + row) == 0:
        return
    length = tl.load(lengths + row)
    d = tl.arange(0, D_PAD)
    in_d = d < D
    at = row.to(tl.int64) * qkv_stride + head * D + d
    q = tl.load(qkv + at + q_offset, mask=in_d, other=0.0).to(tl.float32) * scale
    k_new = tl.load(qkv + at + k_offset, mask=in_d, other=0.0)
    v_new = tl.load(qkv + at + v_offset, mask=in_d, other=0.0)
    base = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    tl.store(keys + base + length * D + d, k_new, mask=in_d)
    tl.store(values + base + length * D + d, v_new, mask=in_d)
    highest = tl.sum(q * k_new.to(tl.float32))
    total = 1.0
    mixed = v_new.to(tl.float32)
    t = tl.arange(0, BLOCK)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        inside = start + t < length
        places = base + (start + t)[:, None] * D + d[None, :]
        mask = inside[:, None] & in_d[None, :]
        k = tl.load(keys + places, mask=mask, other=0.0)
        v = tl.load(values + places, mask=mask, other=0.0)
        scores = tl.sum(k.to(tl.float32) * q[None, :], 1)
        scores = tl.where(inside, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 0))
        shrink = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * v.to(tl.float32), 0)
        highest = new_highest
    at_out = row.to(tl.int64) * (HEADS * D) + head * D + d
    tl.store(out + at_out, (mixed / total).to(out.dtype.element_ty), mask=in_d)


@triton.jit
def _attend_group(
    qkv, keys, values, out, lengths, active, scale, q_offset, k_offset, v_offset, qkv_stride, row_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """GROUP query heads that share keys: matrix products, one program a (row, head of keys)."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(active + row) == 0:
        return
    length = tl.load(lengths + row)
    d, g = tl.arange(0, D_PAD), tl.arange(0, GROUP_PAD)
    in_d, in_g = d < D, g < GROUP
    start_of_row = row.to(tl.int64) * qkv_stride
    places_q = start_of_row + q_offset + (head * GROUP + g)[:, None] * D + d[None, :]
    in_q = in_g[:, None] & in_d[None, :]
    q = tl.load(qkv + places_q, mask=in_q, other=0.0)
    k_new = tl.load(qkv + start_of_row + k_offset + head * D + d, mask=in_d, other=0.0)
    v_new = tl.load(qkv + start_of_row + v_offset + head * D + d, mask=in_d, other=0.0)
    base = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    tl.store(keys + base + length * D + d, k_new, mask=in_d)
    tl.store(values + base + length * D + d, v_new, mask=in_d)
    highest = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    total = tl.full([GROUP_PAD], 1.0, tl.float32)
    mixed = tl.zeros([GROUP_PAD, D_PAD], tl.float32) + v_new.to(tl.float32)[None, :]
    t = tl.arange(0, BLOCK)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        inside = start + t < length
        places = base + (start + t)[:, None] * D + d[None, :]
        mask = inside[:, None] & in_d[None, :]
        k = tl.load(keys + places, mask=mask, other=0.0)
        v = tl.load(values + places, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    places_out = row.to(tl.int64) * (HEADS * D) + (head * GROUP + g)[:, None] * D + d[None, :]
    tl.store(out + places_out, (mixed / total[:, None]).to(out.dtype.element_ty), mask=in_q)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How q, k and v lie in a row of the joined projection.

    num_heads, num_kv_heads, head_dim: of this rank. q_offset, k_offset, v_offset: first column of each. scale: of the
    scores.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_offset: int
    k_offset: int
    v_offset: int
    scale: float


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, *, lengths: Tensor, active: Tensor, layout: HeadLayout, out: Tensor
) -> None:
    """Attention of each row's new token over its cache and itself; its key and value go into the cache.

    Args:
        qkv: (M, (Hq + 2 Hkv) D), rotated already where the model rotates.
        keys, values: (M, Hkv, S, D) contiguous; the new ones are written at position `lengths[m]`.
        lengths: (M,) int32, keys in the cache before this token. active: (M,) int32, 0 = row is left alone.
        out: (M, Hq D).
    """
    rows, head_dim, group = len(qkv), layout.head_dim, layout.num_heads // layout.num_kv_heads
    padded = triton.next_power_of_2(head_dim)
    common = (
        qkv, keys, values, out, lengths, active, layout.scale, layout.q_offset, layout.k_offset, layout.v_offset,
        qkv.stride(0), keys.stride(0), keys.stride(1),
    )  # fmt: skip
    grid = (rows, layout.num_kv_heads)
    if group == 1:
        _attend_one[grid](
            *common, HEADS=layout.num_heads, D=head_dim, D_PAD=padded, BLOCK=64 if padded <= 64 else 32, STAGES=1,
            num_warps=1,
        )  # fmt: skip
    else:
        _attend_group[grid](
            *common, HEADS=layout.num_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
            D=head_dim, D_PAD=max(16, padded), BLOCK=64, STAGES=3, num_warps=4,
        )  # fmt: skip


@triton.jit
def _store_prompts(
    qkv, keys, values, slots, source, k_offset, v_offset, qkv_stride, row_stride, head_stride, width,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(2)
    slot, prompt = tl.load(slots + index), tl.load(source + index)
    t, d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D_PAD)
    inside = (t < width)[:, None] & (d < D)[None, :]
    read = (prompt * width + t)[:, None] * qkv_stride + head * D + d[None, :]
    write = slot * row_stride + head.to(tl.int64) * head_stride + t[:, None] * D + d[None, :]
    tl.store(keys + write, tl.load(qkv + read + k_offset, mask=inside), mask=inside)
    tl.store(values + write, tl.load(qkv + read + v_offset, mask=inside), mask=inside)


def store_prompts(
    qkv: Tensor, keys: Tensor, values: Tensor, *, slots: Tensor, source: Tensor, layout: HeadLayout, width: int
) -> None:
    """Copy prompts' keys and values into the cache: row slots[i] gets prompt source[i], at positions 0 to `width`.

    Args:
        qkv: (N * width, columns), prompt after prompt. keys, values: (M, Hkv, S, D). slots, source: (R,) int64.
    """
    grid = (len(slots), triton.cdiv(width, 64), layout.num_kv_heads)
    _store_prompts[grid](
        qkv, keys, values, slots, source, layout.k_offset, layout.v_offset, qkv.stride(0),
        keys.stride(0), keys.stride(1), width,
        D=layout.head_dim, D_PAD=triton.next_power_of_2(layout.head_dim), BLOCK=64,
    )  # fmt: skip
