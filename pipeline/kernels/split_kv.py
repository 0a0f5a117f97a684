"""Who works on which row in a decode step's attention: where few rows are active, several programs share one.

A program reads the keys of a row one block after another, so that a row takes as long when it is alone as in a full
batch. Rows that have finished leave their programs free: these take parts of the keys of the others (as in
Flash-Decoding, Dao et al. 2023, but only as many parts as programs are free). Where rows and heads are too few to keep
a large GPU busy there are more programs than rows from the start. M rows (slots), P programs a head.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

# Warps that keep a large GPU's memory busy; a layer with few heads or rows gets more programs than it has rows.
WARPS = 2_048
MOST_PARTS = 8
# Fewer keys than this are not worth a part of their own.
LEAST_KEYS = 32


@triton.jit
def _share_out(
    lengths, active, order, turns, live, rows, programs,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, ROWS)
    busy = tl.load(active + m, mask=m < rows, other=0)
    count = tl.sum(busy, 0)
    tl.store(order + tl.cumsum(busy, 0) - 1, m, mask=busy != 0)
    tl.store(live, count)
    tl.debug_barrier()  # other threads read what these have stored
    p = tl.arange(0, PROGRAMS)
    inside = p < programs
    any_row = tl.maximum(count, 1)
    some = p < programs * count  # false where no row is active
    row = tl.load(order + p % any_row, mask=inside & some, other=0)
    length = tl.load(lengths + row, mask=inside, other=0)
    parts = tl.minimum(tl.minimum(programs // any_row, MOST), tl.maximum(tl.cdiv(length, LEAST), 1))
    part = p // any_row
    parts = tl.where((part < parts) & some, parts, 0)
    at = turns + p * 4
    tl.store(at, row, mask=inside)
    tl.store(at + 1, part, mask=inside)
    tl.store(at + 2, parts, mask=inside)
    tl.store(at + 3, length, mask=inside)


@dataclass(frozen=True, slots=True)
class WorkShares:
    """The programs of one step, for all its layers, and room for what parts of a row leave to each other.

    turns: (P, 4) int32: row, part, parts of that row (0: nothing to do), keys of the row before this token. live: (1,)
    int32, the rows that are active. done: (M, Hkv) int32, 0 between kernels: parts that are ready. marks: highest score
    and sum of exponentials, (P, Hkv, 2, G), and sums: (P, Hkv, G, D), fp32, of G query heads that share keys.
    """

    turns: Tensor
    live: Tensor
    done: Tensor
    marks: Tensor
    sums: Tensor

    @classmethod
    def of(cls, lengths: Tensor, active: Tensor, *, heads: int, room: int, block: tuple[int, int], warps: int) -> Self:
        """Share the programs out, without a word from the host.

        Args:
            lengths, active: (M,) int32; rows with `active` 0 get none.
            heads: of keys. room: the longest row of the cache. block: (G, D) as padded. warps: of a program.
        """
        rows, device = len(lengths), lengths.device
        most = min(MOST_PARTS, triton.cdiv(room, LEAST_KEYS))
        programs = min(max(rows, WARPS // (warps * heads)), rows * most)
        turns = torch.empty(programs, 4, dtype=torch.int32, device=device)
        order, live = torch.empty_like(lengths), torch.empty(1, dtype=torch.int32, device=device)
        _share_out[(1,)](
            lengths, active, order, turns, live, rows, programs,
            ROWS=triton.next_power_of_2(rows), PROGRAMS=triton.next_power_of_2(programs), MOST=most, LEAST=LEAST_KEYS,
        )  # fmt: skip
        return cls(
            turns,
            live,
            torch.zeros(rows, heads, dtype=torch.int32, device=device),
            torch.empty(programs, heads, 2, block[0], device=device),
            torch.empty(programs, heads, *block, device=device),
        )
