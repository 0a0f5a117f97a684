"""Split-KV scheduling of a decode step's attention, as in Flash-Decoding (Dao et al. 2023).

The keys of a row are divided into splits, and each Triton program (thread block) attends to one split. The schedule
assigns the P programs of a head to the active rows of the batch, so that the programs of finished rows are used too. A
batch of few rows and heads gets more programs than rows, to keep a large GPU busy. Shapes: M rows (slots), P programs a
head.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

# Warps of all programs together, up to which there are more programs than rows: as many as keep the memory of a large
# GPU busy. With more, two programs for each of 64 active rows, a step took 5 % longer, measured on an H200
# (benchmarks/reports/decode.md).
TARGET_WARPS = 2_048
# Warps of a program of grouped-query attention; measured on an H200 (benchmarks/reports/decode.md).
GROUP_WARPS = 4
# Most splits of one row; the split that ends last combines all. Chosen by hand.
MAX_SPLITS = 8
# Fewest keys of a split: fewer are not worth a program. Chosen by hand.
MIN_KEYS_PER_SPLIT = 32


@triton.jit
def _assign_programs(
    lengths, active, order, assignments, num_active, rows, programs,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr, MAX_SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, ROWS)
    busy = tl.load(active + m, mask=m < rows, other=0)
    count = tl.sum(busy, 0)
    tl.store(order + tl.cumsum(busy, 0) - 1, m, mask=busy != 0)
    tl.store(num_active, count)
    tl.debug_barrier()  # other threads read `order` next
    p = tl.arange(0, PROGRAMS)
    inside = p < programs
    divisor = tl.maximum(count, 1)
    any_active = p < programs * count  # False if no row is active
    row = tl.load(order + p % divisor, mask=inside & any_active, other=0)
    length = tl.load(lengths + row, mask=inside, other=0)
    splits = tl.minimum(tl.minimum(programs // divisor, MAX_SPLITS), tl.maximum(tl.cdiv(length, MIN_KEYS), 1))
    split = p // divisor
    splits = tl.where((split < splits) & any_active, splits, 0)
    at = assignments + p * 4
    tl.store(at, row, mask=inside)
    tl.store(at + 1, split, mask=inside)
    tl.store(at + 2, splits, mask=inside)
    tl.store(at + 3, length, mask=inside)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The columns of q, k and v in a row of the joined projection, for the heads of this rank.

    num_heads: query heads.
    num_kv_heads: heads of keys and values.
    head_dim: columns of a head.
    q_offset: first column of the queries.
    k_offset: first column of the keys.
    v_offset: first column of the values.
    scale: factor of the scores.
    window: number of tokens that a token attends to, itself included; 0: no limit.
    cap: limit of the scores, which become cap * tanh(scores / cap); 0: no limit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_offset: int
    k_offset: int
    v_offset: int
    scale: float
    window: int = 0
    cap: float = 0.0


def group_pad(group: int) -> int:
    """Return the number of query heads of a group, padded to a tile of matrix products."""
    return max(16, triton.next_power_of_2(group))


@dataclass(frozen=True, slots=True)
class SplitKVSchedule:
    """The assignment of programs in one decode step, for all layers, and buffers that combine the splits of a row.

    assignments: (P, 4) int32: row, split, number of splits of that row (0: the program is idle), keys of the row before
        this token.
    num_active: (1,) int32, number of active rows.
    num_done: (M, Hkv) int32, number of finished splits; 0 between kernels.
    softmax_state: (P, Hkv, 2, G) fp32, highest score and sum of exponentials, for G query heads that share keys.
    sums: (P, Hkv, G, D) fp32, sums of the weighted values.
    """

    assignments: Tensor
    num_active: Tensor
    num_done: Tensor
    softmax_state: Tensor
    sums: Tensor

    @classmethod
    def create(cls, lengths: Tensor, active: Tensor, *, layout: HeadLayout, cache_length: int) -> Self:
        """Assign the programs of `attend` to rows, without a wait for the device; called once a decode step and layout.

        Args:
            lengths: (M,) int32, keys in the cache before this token.
            active: (M,) int32, 1 for an active row, 0 for another, which gets no program.
            layout: heads of the layers.
            cache_length: number of positions of a row of the cache.
        """
        rows, device, heads = len(lengths), lengths.device, layout.num_kv_heads
        group, padded = layout.num_heads // heads, triton.next_power_of_2(layout.head_dim)
        block, warps = ((1, padded), 1) if group == 1 else ((group_pad(group), max(16, padded)), GROUP_WARPS)
        max_splits = min(MAX_SPLITS, triton.cdiv(cache_length, MIN_KEYS_PER_SPLIT))
        programs = min(max(rows, TARGET_WARPS // (warps * heads)), rows * max_splits)
        assignments = torch.empty(programs, 4, dtype=torch.int32, device=device)
        order, num_active = torch.empty_like(lengths), torch.empty(1, dtype=torch.int32, device=device)
        _assign_programs[(1,)](
            lengths, active, order, assignments, num_active, rows, programs,
            ROWS=triton.next_power_of_2(rows), PROGRAMS=triton.next_power_of_2(programs), MAX_SPLITS=max_splits,
            MIN_KEYS=MIN_KEYS_PER_SPLIT,
        )  # fmt: skip
        return cls(
            assignments,
            num_active,
            torch.zeros(rows, heads, dtype=torch.int32, device=device),
            torch.empty(programs, heads, 2, block[0], device=device),
            torch.empty(programs, heads, *block, device=device),
        )
