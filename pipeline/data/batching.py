"""Rows of one optimizer step, and their collation into tensors. B rows, S tokens a row, all padded on the right.

Rows are mappings with the columns that `cache.load_or_build` gives; None stands for a padding row, which has weight 0,
one real token and no trained one, so that the last partial batch keeps its shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.tensor_ops import round_up

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SFTBatch:
    """input_ids (B,S) int64. attention_mask (B,S) bool, True = real token. position_ids (B,S) int64.

    trained_mask (B,S) bool, True = this token is a target of the loss; a sample's first token never is.
    segment_ids (B,S) int64: 0 on padding, 1, 2, ... for the samples packed into a row (1 only without packing).
    segment_bounds (N+1,) int32: where the samples and the paddings begin in the rows laid end to end, and B * S.
    weights (B,) fp32: 0 for padding rows.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    trained_mask: Tensor
    segment_ids: Tensor
    segment_bounds: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class PairBatch:
    """B pairs as 2B rows, all chosen first: row b and row B+b are one pair.

    input_ids (2B,S) int64. attention_mask (2B,S) bool, True = real token. position_ids (2B,S) int64.
    lengths (2B,) int64: real tokens a row, so the score is read at lengths - 1. prompt_lengths (B,) int64.
    margins, weights (B,) fp32.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    margins: Tensor
    weights: Tensor


def sft_batch(rows: Sequence[Row | None], *, pad_id: int, length: int | None = None, multiple_of: int = 1) -> SFTBatch:
    """Collate rows of `ids` and `trained`, one sample a row.

    S is `length` if given, else the longest row rounded up to `multiple_of`. Raises ValueError if a row is longer.
    """
    packs = [None if row is None else [row] for row in rows]
    return packed_sft_batch(packs, pad_id=pad_id, length=length, multiple_of=multiple_of)


def packed_sft_batch(
    packs: Sequence[Sequence[Row] | None], *, pad_id: int, length: int | None = None, multiple_of: int = 1
) -> SFTBatch:
    """Collate several samples into each row: position ids restart and segment ids count up with each sample.

    Attention must then be limited to one sample, by `block_diagonal_mask(segment_ids)` or by kernels that read
    `segment_bounds`. S as in `sft_batch`.
    """
    filler: Row = {"ids": [pad_id], "trained": [False]}
    samples = [[filler] if pack is None else pack for pack in packs]
    input_ids = _padded([[token for s in pack for token in s["ids"]] for pack in samples], pad_id, length, multiple_of)
    width = input_ids.shape[1]
    trained = _padded([[bool(flag) for s in pack for flag in s["trained"]] for pack in samples], 0, width)
    positions = _padded([[i for s in pack for i in range(len(s["ids"]))] for pack in samples], 0, width)
    segments = _padded([[n for n, s in enumerate(pack, 1) for _ in s["ids"]] for pack in samples], 0, width)
    return SFTBatch(
        input_ids=input_ids,
        attention_mask=segments > 0,
        position_ids=positions,
        trained_mask=trained.bool(),
        segment_ids=segments,
        segment_bounds=segment_bounds(segments),
        weights=_weights(packs),
    )


def pair_batch(
    rows: Sequence[Row | None], *, pad_id: int, length: int | None = None, multiple_of: int = 1
) -> PairBatch:
    """Collate rows of `chosen_ids`, `rejected_ids`, `prompt_length` and `margin`. S as in `sft_batch`."""
    filler: Row = {"chosen_ids": [pad_id], "rejected_ids": [pad_id], "prompt_length": 0, "margin": 0.0}
    pairs = [filler if row is None else row for row in rows]
    sides = [pair["chosen_ids"] for pair in pairs] + [pair["rejected_ids"] for pair in pairs]
    input_ids = _padded(sides, pad_id, length, multiple_of)
    lengths = torch.tensor([len(side) for side in sides])
    columns = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    attention_mask = columns < lengths[:, None]
    return PairBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=columns * attention_mask,
        lengths=lengths,
        prompt_lengths=torch.tensor([pair["prompt_length"] for pair in pairs]),
        margins=torch.tensor([pair["margin"] for pair in pairs], dtype=torch.float32),
        weights=_weights(rows),
    )


def block_diagonal_mask(segment_ids: Tensor) -> Tensor:
    """(B,S) int64 segment ids -> (B,1,S,S) bool, True = query (row) attends to key (column).

    Causal within one segment. A padding position (segment 0) attends to itself only, so that no softmax is empty.
    """
    queries, keys = segment_ids[:, :, None], segment_ids[:, None, :]
    size = segment_ids.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segment_ids.device).tril()
    itself = torch.eye(size, dtype=torch.bool, device=segment_ids.device)
    return (((queries == keys) & (queries > 0) & causal) | itself)[:, None]  # (B,1,S,S)


def segment_bounds(segment_ids: Tensor) -> Tensor:
    """(B,S) int64 segment ids -> (N+1,) int32: first places of the N runs of equal ids in the rows end to end, and B*S.

    A row's padding is a run of its own: attention that is causal within each run keeps all samples apart.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    end = torch.tensor([segment_ids.numel()])
    return torch.cat([begins.flatten().nonzero().squeeze(1), end]).int()


def pack_rows(num_tokens: Sequence[int], max_len: int, *, max_open: int = 64) -> list[list[int]]:
    """Greedy first-fit packing of whole samples: lists of sample indices, each list at most max_len tokens in sum.

    A sample goes into the oldest of the last `max_open` packs that has room. Raises ValueError for a sample longer than
    max_len.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index, size in enumerate(num_tokens):
        if size > max_len:
            raise ValueError(f"sample {index} has {size} tokens, more than max_len {max_len}")
        first = max(0, len(packs) - max_open)
        place = next((i for i in range(first, len(packs)) if room[i] >= size), None)
        if place is None:
            place = len(packs)
            packs.append([])
            room.append(max_len)
        packs[place].append(index)
        room[place] -= size
    return packs


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The epoch's permutation of range(num_rows), (num_rows,) int64: a function of (seed, epoch) only.

    Rows are sorted by raw Philox words, whose stream numpy keeps fixed over its versions (that of `permutation` it does
    not).
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")


def num_steps(num_rows: int, rows_per_step: int) -> int:
    """Optimizer steps in one epoch; the last one may be partial."""
    return -(-num_rows // rows_per_step)


def rows_of_step(seed: int, epoch: int, step: int, num_rows: int, rows_per_step: int) -> list[int | None]:
    """Row indices of optimizer step `step` (0-based in the epoch), `rows_per_step` long; None = padding row.

    Raises IndexError for a step beyond the epoch.
    """
    if not 0 <= step < num_steps(num_rows, rows_per_step):
        raise IndexError(f"step {step} of an epoch of {num_steps(num_rows, rows_per_step)} steps")
    rows = epoch_order(seed, epoch, num_rows)[step * rows_per_step : (step + 1) * rows_per_step].tolist()
    return rows + [None] * (rows_per_step - len(rows))


def rank_slices(
    rows: Sequence[int | None], world_size: int, rank: int, micro_batch_size: int
) -> list[list[int | None]]:
    """This rank's micro-batches of a step, each `micro_batch_size` long.

    All ranks get the same number of them, and their union is `rows`, padded with None to a multiple of
    world_size * micro_batch_size.
    """
    stride = world_size * micro_batch_size
    padded = [*rows, *[None] * (-len(rows) % stride)]
    starts = range(rank * micro_batch_size, len(padded), stride)
    return [padded[start : start + micro_batch_size] for start in starts]


def balanced_slices(
    rows: Sequence[int | None], lengths: Sequence[int], *, world_size: int, rank: int, micro_batch_size: int
) -> list[list[int | None]]:
    """`rank_slices` by length: this rank's micro-batches, longest rows first, each `micro_batch_size` rows long.

    Rows of a step are sorted by length and dealt to the ranks in snake order (0, 1, 1, 0, 0, ...), so that ranks get
    nearly the same number of tokens and the rows of a micro-batch nearly the same length. Padding rows come last.

    Args:
        rows: the rows of an optimizer step over all ranks.
        lengths: tokens of each row, as indexed by `rows`.
    """
    padded = [*rows, *[None] * (-len(rows) % (world_size * micro_batch_size))]
    ordered = sorted(padded, key=lambda row: 0 if row is None else -lengths[row])
    turns = (ordered[start : start + world_size] for start in range(0, len(ordered), world_size))
    mine = [turn[rank if number % 2 == 0 else world_size - 1 - rank] for number, turn in enumerate(turns)]
    return [mine[start : start + micro_batch_size] for start in range(0, len(mine), micro_batch_size)]


def _padded(rows: Sequence[Sequence[int]], fill: int, length: int | None = None, multiple_of: int = 1) -> Tensor:
    """Ragged rows -> (B,S) int64, filled on the right."""
    longest = max(len(row) for row in rows)
    width = length if length is not None else round_up(longest, multiple_of)
    if longest > width:
        raise ValueError(f"a row has {longest} tokens, more than the batch's length {width}")
    filled = torch.full((len(rows), width), fill, dtype=torch.int64)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = torch.from_numpy(np.asarray(row, dtype=np.int64))
    return filled


def _weights(rows: Sequence[object]) -> Tensor:
    return torch.tensor([0.0 if row is None else 1.0 for row in rows])  # (B,)
