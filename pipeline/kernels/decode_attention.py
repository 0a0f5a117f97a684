"""Triton kernels of attention in a decode step: the new token of each slot attends to the slot's own keys.

Shapes: M rows (slots), Hq query heads, Hkv heads of keys and values, D channels a head, S cache length. Lengths and
flags are in device memory, so that one CUDA graph serves rows of any length. Arithmetic is fp32; results have the type
of the tensors.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.split_kv import GROUP_WARPS, MAX_SPLITS, HeadLayout, SplitKVSchedule, group_pad

# Rows from which the keys of a query head are evicted from the L2 cache first, so that the weights of the next products
# stay in it. Measured on an H200: a step of 256 rows is 1 % faster, one of 64 rows 1 % slower
# (benchmarks/reports/decode.md, third round).
EVICT_FROM_ROWS = 129


@triton.jit
def _store_or_combine(
    highest, total, mixed, out, out_offsets, out_mask, program, row, head, split, splits,
    num_active, num_done, softmax_state, sums, heads,
    G: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the output of (G,) highest and total and (G, D) mixed; the split of a row that ends last combines all."""
    if splits == 1:
        tl.store(out + out_offsets, (mixed / total[:, None]).to(out.dtype.element_ty), mask=out_mask)
    else:
        g, d = tl.arange(0, G), tl.arange(0, D)
        block = g[:, None] * D + d[None, :]
        mine = (program * heads + head).to(tl.int64)
        tl.store(softmax_state + mine * 2 * G + g, highest)
        tl.store(softmax_state + (mine * 2 + 1) * G + g, total)
        tl.store(sums + mine * G * D + block, mixed)
        tl.debug_barrier()
        counter = num_done + row * heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            tl.store(counter, 0)
            step = tl.load(num_active)
            first_program = program - split * step
            # Other multiprocessors wrote these numbers, so the loads bypass this one's L1 cache (.cg).
            combined = tl.full([G], float("-inf"), tl.float32)
            for i in tl.static_range(MAX_SPLITS):
                other = ((first_program + i * step) * heads + head).to(tl.int64)
                exists = tl.full([G], i, tl.int32) < splits
                split_highest = tl.load(
                    softmax_state + other * 2 * G + g, mask=exists, other=float("-inf"), cache_modifier=".cg"
                )
                combined = tl.maximum(combined, split_highest)
            total, mixed = tl.zeros([G], tl.float32), tl.zeros([G, D], tl.float32)
            for i in tl.static_range(MAX_SPLITS):
                other = ((first_program + i * step) * heads + head).to(tl.int64)
                exists = tl.full([G], i, tl.int32) < splits
                split_highest = tl.load(
                    softmax_state + other * 2 * G + g, mask=exists, other=float("-inf"), cache_modifier=".cg"
                )
                weight = tl.exp(split_highest - combined)
                total += weight * tl.load(
                    softmax_state + (other * 2 + 1) * G + g, mask=exists, other=0.0, cache_modifier=".cg"
                )
                added = tl.load(sums + other * G * D + block, mask=exists[:, None], other=0.0, cache_modifier=".cg")
                mixed += weight[:, None] * added
            tl.store(out + out_offsets, (mixed / total[:, None]).to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def _capped(scores, CAP: tl.constexpr):
    """Return CAP * tanh(scores / CAP), or the scores if CAP is 0."""
    if CAP > 0:
        scores = CAP * (2.0 * tl.sigmoid(scores * (2.0 / CAP)) - 1.0)
    return scores


@triton.jit
def _first_key(length, WINDOW: tl.constexpr):
    """Return the position of the first key that the token at `length` sees."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length + 1 - WINDOW, 0)
    return first


@triton.jit
def _accumulate_keys(
    keys, values, start, stop, q, highest, total, mixed,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr, CAP: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Add BLOCK keys from `start` to highest score, sum and (D_PAD,) mixed values; FULL: all are before `stop`."""
    t, d = start + tl.arange(0, BLOCK), tl.arange(0, D_PAD)
    offsets = t[:, None] * D + d[None, :]
    if FULL and D == D_PAD:
        k = tl.load(keys + offsets, eviction_policy=EVICTION)
        v = tl.load(values + offsets, eviction_policy=EVICTION)
    else:
        mask = (t < stop)[:, None] & (d < D)[None, :]
        k = tl.load(keys + offsets, mask=mask, other=0.0, eviction_policy=EVICTION)
        v = tl.load(values + offsets, mask=mask, other=0.0, eviction_policy=EVICTION)
    scores = _capped(tl.sum(k.to(tl.float32) * q[None, :], 1), CAP)
    if not FULL:
        scores = tl.where(t < stop, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 0))
    shrink, weights = tl.exp(highest - new_highest), tl.exp(scores - new_highest)
    mixed = mixed * shrink + tl.sum(weights[:, None] * v.to(tl.float32), 0)
    return new_highest, total * shrink + tl.sum(weights, 0), mixed


@triton.jit
def _attend_single(
    qkv, keys, values, out, assignments, num_active, num_done, softmax_state, sums,
    scale, q_offset, k_offset, v_offset, qkv_stride, row_stride, head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend with one query head per key head: dot products as sums, one program per (split of a row, head)."""
    program, head = tl.program_id(0), tl.program_id(1)
    row, split = tl.load(assignments + program * 4), tl.load(assignments + program * 4 + 1)
    splits, length = tl.load(assignments + program * 4 + 2), tl.load(assignments + program * 4 + 3)
    if splits == 0:
        return
    first = _first_key(length, WINDOW)
    share = tl.cdiv(length - first, splits)
    d = tl.arange(0, D_PAD)
    in_d = d < D
    at = row.to(tl.int64) * qkv_stride + head * D + d
    q = tl.load(qkv + at + q_offset, mask=in_d, other=0.0).to(tl.float32) * scale
    base = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    if split == 0:
        k_new = tl.load(qkv + at + k_offset, mask=in_d, other=0.0)
        v_new = tl.load(qkv + at + v_offset, mask=in_d, other=0.0)
        tl.store(keys + base + length * D + d, k_new, mask=in_d)
        tl.store(values + base + length * D + d, v_new, mask=in_d)
        highest, total, mixed = _capped(tl.sum(q * k_new.to(tl.float32)), CAP), 1.0, v_new.to(tl.float32)
    else:
        highest, total, mixed = float("-inf"), 0.0, tl.zeros([D_PAD], tl.float32)
    begin = tl.minimum(first + split * share, length)
    stop = tl.minimum(begin + share, length)
    blocks = (stop - begin) // BLOCK * BLOCK
    # The remainder, which is shorter than a block, comes first: its loads overlap those of the query.
    if begin + blocks < stop:
        highest, total, mixed = _accumulate_keys(
            keys + base, values + base, begin + blocks, stop, q, highest, total, mixed,
            D, D_PAD, BLOCK, EVICTION, CAP, False,
        )  # fmt: skip
    for start in tl.range(begin, begin + blocks, BLOCK, num_stages=1):
        highest, total, mixed = _accumulate_keys(
            keys + base, values + base, start, stop, q, highest, total, mixed, D, D_PAD, BLOCK, EVICTION, CAP, True
        )
    one = tl.zeros([1], tl.float32)
    out_offsets = row.to(tl.int64) * (HEADS * D) + head * D + d[None, :]
    _store_or_combine(
        highest + one, total + one, mixed[None, :], out, out_offsets, in_d[None, :], program, row, head, split, splits,
        num_active, num_done, softmax_state, sums, HEADS, 1, D_PAD, MAX_SPLITS,
    )  # fmt: skip


@triton.jit
def _attend_group(
    qkv, keys, values, out, assignments, num_active, num_done, softmax_state, sums,
    scale, q_offset, k_offset, v_offset, qkv_stride, row_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Attend with GROUP query heads that share keys: matrix products, one program per (split of a row, key head)."""
    program, head = tl.program_id(0), tl.program_id(1)
    row, split = tl.load(assignments + program * 4), tl.load(assignments + program * 4 + 1)
    splits, length = tl.load(assignments + program * 4 + 2), tl.load(assignments + program * 4 + 3)
    if splits == 0:
        return
    first = _first_key(length, WINDOW)
    share = tl.cdiv(length - first, splits)
    d, g = tl.arange(0, D_PAD), tl.arange(0, GROUP_PAD)
    in_d, in_g = d < D, g < GROUP
    start_of_row = row.to(tl.int64) * qkv_stride
    q_offsets = start_of_row + q_offset + (head * GROUP + g)[:, None] * D + d[None, :]
    in_q = in_g[:, None] & in_d[None, :]
    q = tl.load(qkv + q_offsets, mask=in_q, other=0.0)
    base = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    highest, total = tl.full([GROUP_PAD], float("-inf"), tl.float32), tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    if split == 0:
        k_new = tl.load(qkv + start_of_row + k_offset + head * D + d, mask=in_d, other=0.0)
        v_new = tl.load(qkv + start_of_row + v_offset + head * D + d, mask=in_d, other=0.0)
        tl.store(keys + base + length * D + d, k_new, mask=in_d)
        tl.store(values + base + length * D + d, v_new, mask=in_d)
        highest = _capped(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale, CAP)
        total += 1.0
        mixed += v_new.to(tl.float32)[None, :]
    t = tl.arange(0, BLOCK)
    stop = tl.minimum(first + (split + 1) * share, length)
    for start in tl.range(first + split * share, stop, BLOCK, num_stages=STAGES):
        inside = start + t < stop
        offsets = base + (start + t)[:, None] * D + d[None, :]
        mask = inside[:, None] & in_d[None, :]
        k = tl.load(keys + offsets, mask=mask, other=0.0)
        v = tl.load(values + offsets, mask=mask, other=0.0)
        scores = _capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, CAP)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest
    out_offsets = row.to(tl.int64) * (HEADS * D) + (head * GROUP + g)[:, None] * D + d[None, :]
    _store_or_combine(
        highest, total, mixed, out, out_offsets, in_q, program, row, head, split, splits,
        num_active, num_done, softmax_state, sums, HEADS // GROUP, GROUP_PAD, D_PAD, MAX_SPLITS,
    )  # fmt: skip


def attend(
    qkv: Tensor, keys: Tensor, values: Tensor, *, schedule: SplitKVSchedule, layout: HeadLayout, out: Tensor
) -> None:
    """Compute the attention of each row's new token over its cache and itself; append its key and value to the cache.

    Args:
        qkv: (M, (Hq + 2 Hkv) D), with rotary positions applied if the model has them.
        keys, values: (M, Hkv, S, D) contiguous; the new key and value are written after the row's others.
        schedule: the programs of this step and layout.
        out: (M, Hq D); only active rows are written.
    """
    head_dim, group = layout.head_dim, layout.num_heads // layout.num_kv_heads
    padded = triton.next_power_of_2(head_dim)
    common = (
        qkv, keys, values, out, schedule.assignments, schedule.num_active, schedule.num_done,
        schedule.softmax_state, schedule.sums,
        layout.scale, layout.q_offset, layout.k_offset, layout.v_offset,
        qkv.stride(0), keys.stride(0), keys.stride(1),
    )  # fmt: skip
    grid = (len(schedule.assignments), layout.num_kv_heads)
    if group == 1:
        _attend_single[grid](
            *common, HEADS=layout.num_heads, D=head_dim, D_PAD=padded, BLOCK=64 if padded <= 64 else 32,
            EVICTION="evict_first" if len(qkv) >= EVICT_FROM_ROWS else "", WINDOW=layout.window, CAP=layout.cap,
            MAX_SPLITS=MAX_SPLITS, num_warps=1,
        )  # fmt: skip
    else:
        _attend_group[grid](
            *common, HEADS=layout.num_heads, GROUP=group, GROUP_PAD=group_pad(group),
            D=head_dim, D_PAD=max(16, padded), BLOCK=64, STAGES=3, WINDOW=layout.window, CAP=layout.cap,
            MAX_SPLITS=MAX_SPLITS, num_warps=GROUP_WARPS,
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
    """Copy prompts' keys and values into the cache: row slots[i] gets prompt source[i], at positions below `width`.

    Args:
        qkv: (N * width, columns), prompt after prompt. keys, values: (M, Hkv, S, D). slots, source: (R,) int64.
    """
    grid = (len(slots), triton.cdiv(width, 64), layout.num_kv_heads)
    _store_prompts[grid](
        qkv, keys, values, slots, source, layout.k_offset, layout.v_offset, qkv.stride(0),
        keys.stride(0), keys.stride(1), width,
        D=layout.head_dim, D_PAD=triton.next_power_of_2(layout.head_dim), BLOCK=64,
    )  # fmt: skip
