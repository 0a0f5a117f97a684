"""Choose the rows of an optimizer step and collate them into tensors: B rows, S tokens per row, padded on the right.

Rows are mappings with the columns of `cache.load_or_build`. In place of a row, None stands for a padding row, which
fills the last batch to its full shape: weight 0, one real token, no trained token. `loader.py` prefetches batches and
copies them to a device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pipeline.tensor_ops import check_right_padded, lengths_to_mask, pad_rows

Row = Mapping[str, Any]
# Label of a position that is no target, as in transformers and torch.
IGNORED = -100
# Tokens of a forward pass without gradients: enough to keep a device busy, and so few that rows of very different
# lengths are not padded together. Chosen by hand.
SCORING_TOKENS = 16_384
# Rows share their first tokens if these are more than this share of all: copies of them take time. Chosen by hand.
LEAST_SHARED = 1 / 32


@dataclass(frozen=True, slots=True)
class SFTBatch:
    """A batch of sequences for a language-model loss, one sequence per row or several packed into a row.

    input_ids: (B,S) int64.
    attention_mask: (B,S) bool, True = real token.
    position_ids: (B,S) int64.
    trained_mask: (B,S) bool, True = this token is a target of the loss; a sequence's first token never is.
    segment_ids: (B,S) int64: 0 on padding, 1, 2, ... for the sequences packed into a row (only 1 without packing).
    segment_bounds: (N+1,) int32: first positions of sequences and paddings in the rows laid end to end, and B * S.
    weights: (B,) fp32: 0 for padding rows.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    trained_mask: Tensor
    segment_ids: Tensor
    segment_bounds: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        _check_on_host(self.attention_mask)


@dataclass(frozen=True, slots=True)
class Seq2SeqBatch:
    """A batch of B rows for an encoder-decoder model, each split before its first trained token.

    input_ids: (B,S) int64, input of the encoder.
    attention_mask: (B,S) bool, True = real token of the encoder's input.
    labels: (B,T) int64, targets of the decoder; IGNORED on padding.
    weights: (B,) fp32: 0 for padding rows.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class PairBatch:
    """A batch of B preference pairs as 2B rows, all chosen first: row b and row B+b are one pair.

    input_ids: (2B,S) int64.
    attention_mask: (2B,S) bool, True = real token.
    position_ids: (2B,S) int64.
    lengths: (2B,) int64, real tokens of each row; its score is read at lengths - 1.
    prompt_lengths: (B,) int64.
    margins: (B,) fp32.
    weights: (B,) fp32.
    shared: what the rows of a pair have in common.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    margins: Tensor
    weights: Tensor
    shared: "SharedTokens"

    def __post_init__(self) -> None:
        _check_on_host(self.attention_mask)


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The first tokens that the last B of 2B rows have in common with the first B, which they are pairs with.

    lengths: (2B,) int64, first tokens of a row that the other row of its pair begins with too, fewer than it has; 0 for
        the first B rows.
    num_tokens: tokens of all rows.
    num_shared: the sum of `lengths`; 0 if they are not worth it: then rows share none.
    """

    lengths: Tensor
    num_tokens: int
    num_shared: int

    @classmethod
    def of_pairs(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Compare 2B rows of tokens."""
        pairs = len(rows) // 2
        lengths = [0] * pairs + [_same(*pair) for pair in zip(rows[:pairs], rows[pairs:], strict=True)]
        num_tokens, num_shared = sum(map(len, rows)), sum(lengths)
        is_worth_it = num_shared > LEAST_SHARED * num_tokens
        return cls(torch.tensor(lengths) * is_worth_it, num_tokens, num_shared * is_worth_it)


def _same(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of first tokens that two rows have in common, fewer than the second row has."""
    end = min(len(first), len(second) - 1)
    differ = np.flatnonzero(np.asarray(first[:end]) != np.asarray(second[:end]))
    return int(differ[0]) if len(differ) else end


def packed_sft_batch(packs: Sequence[Sequence[Row] | None], *, pad_id: int) -> SFTBatch:
    """Collate rows of `ids` and `trained`, one or several to a row of the batch; S is its longest row.

    Position ids restart and segment ids count up with each sequence. Attention must be limited to one sequence, by
    `block_diagonal_mask(segment_ids)` or by kernels that read `segment_bounds`.
    """
    padding_row: Row = {"ids": [pad_id], "trained": [False]}
    filled = [[padding_row] if pack is None else pack for pack in packs]
    segments = _padded([[n for n, row in enumerate(pack, 1) for _ in row["ids"]] for pack in filled], 0)
    return SFTBatch(
        input_ids=_padded([[token for row in pack for token in row["ids"]] for pack in filled], pad_id),
        attention_mask=segments > 0,
        position_ids=_padded([[i for row in pack for i in range(len(row["ids"]))] for pack in filled], 0),
        trained_mask=_padded([[bool(flag) for row in pack for flag in row["trained"]] for pack in filled], 0).bool(),
        segment_ids=segments,
        segment_bounds=segment_bounds(segments),
        weights=_weights(packs),
    )


def seq2seq_batch(units: Sequence[Sequence[Row] | None], *, pad_id: int) -> Seq2SeqBatch:
    """Collate rows of `ids` and `trained`, one to a unit, for an encoder-decoder model."""
    sources, labels = [], []
    for unit in units:
        ids, trained = ([pad_id], [False]) if unit is None else (list(unit[0][name]) for name in ("ids", "trained"))
        start = trained.index(True) if True in trained else len(ids)
        sources.append(ids[:start])
        targets = zip(ids[start:], trained[start:], strict=True)
        labels.append([token if is_trained else IGNORED for token, is_trained in targets] or [IGNORED])
    input_ids = _padded(sources, pad_id)
    lengths = torch.tensor([len(source) for source in sources])
    return Seq2SeqBatch(
        input_ids=input_ids,
        attention_mask=lengths_to_mask(lengths, input_ids.shape[1]),
        labels=_padded(labels, IGNORED),
        weights=_weights(units),
    )


def pair_batch(rows: Sequence[Row | None], *, pad_id: int) -> PairBatch:
    """Collate rows of `chosen_ids`, `rejected_ids`, `prompt_length` and `margin`; S is the longest side."""
    padding_row: Row = {"chosen_ids": [pad_id], "rejected_ids": [pad_id], "prompt_length": 0, "margin": 0.0}
    pairs = [padding_row if row is None else row for row in rows]
    sides = [pair["chosen_ids"] for pair in pairs] + [pair["rejected_ids"] for pair in pairs]
    return PairBatch(
        **right_padded(sides, pad_id),
        prompt_lengths=torch.tensor([pair["prompt_length"] for pair in pairs]),
        margins=torch.tensor([pair["margin"] for pair in pairs], dtype=torch.float32),
        weights=_weights(rows),
        shared=SharedTokens.of_pairs(sides),
    )


def right_padded(sequences: Sequence[Sequence[int]], pad_id: int) -> dict[str, Tensor]:
    """Return `input_ids`, `attention_mask`, `position_ids`, (N,S) each, and `lengths` (N,) of sequences of tokens."""
    input_ids = _padded(sequences, pad_id)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    attention_mask = lengths_to_mask(lengths, input_ids.shape[1])
    position_ids = torch.arange(input_ids.shape[1]) * attention_mask
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "lengths": lengths,
    }


def block_diagonal_mask(segment_ids: Tensor) -> Tensor:
    """Return the dense mask of packed rows: (B,S) int64 segment ids -> (B,1,S,S) bool, True = query attends to key.

    Causal within one segment. A padding position (segment 0) attends to itself only, so that no softmax is empty.
    """
    queries, keys = segment_ids[:, :, None], segment_ids[:, None, :]
    size = segment_ids.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segment_ids.device).tril()
    itself = torch.eye(size, dtype=torch.bool, device=segment_ids.device)
    return (((queries == keys) & (queries > 0) & causal) | itself)[:, None]  # (B,1,S,S)


def segment_bounds(segment_ids: Tensor) -> Tensor:
    """Return the first positions of segments in the concatenated rows, and B*S: (B,S) int64 ids -> (N+1,) int32.

    A row's padding is its own segment. Attention that is causal within each segment keeps all sequences separate.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    end = torch.tensor([segment_ids.numel()])
    return torch.cat([begins.flatten().nonzero().squeeze(1), end]).int()


def pack_rows(num_tokens: Sequence[int], max_len: int, *, max_open: int = 64) -> list[list[int]]:
    """Pack whole sequences by greedy first fit; returns lists of sequence indices, each of at most max_len tokens.

    A sequence is added to the oldest of the last `max_open` packs that it fits into. Raises ValueError for a sequence
    longer than max_len.
    """
    packs: list[list[int]] = []
    free: list[int] = []  # tokens that each pack can still take
    for index, size in enumerate(num_tokens):
        if size > max_len:
            raise ValueError(f"sequence {index} has {size} tokens, more than max_len {max_len}")
        first = max(0, len(packs) - max_open)
        pack = next((i for i in range(first, len(packs)) if free[i] >= size), len(packs))
        if pack == len(packs):
            packs.append([])
            free.append(max_len)
        packs[pack].append(index)
        free[pack] -= size
    return packs


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Return the epoch's permutation of range(num_rows), (num_rows,) int64, a function of (seed, epoch) only.

    Rows are sorted by raw Philox words: numpy guarantees their stream for all versions, but not that of `permutation`.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")


def num_steps(num_rows: int, rows_per_step: int) -> int:
    """Return the number of optimizer steps in one epoch; the last one may be partial."""
    return -(-num_rows // rows_per_step)


def total_steps(num_rows: int, rows_per_step: int, *, epochs: float, max_steps: int) -> int:
    """Return the optimizer steps of a run: `max_steps`, or as many as the epochs have."""
    return max_steps or max(1, math.ceil(epochs * num_steps(num_rows, rows_per_step)))


def rows_of_step(seed: int, epoch: int, step: int, num_rows: int, rows_per_step: int) -> list[int | None]:
    """Return the `rows_per_step` row indices of optimizer step `step` (0-based in the epoch); None = padding row.

    Raises IndexError for a step beyond the epoch.
    """
    if not 0 <= step < num_steps(num_rows, rows_per_step):
        raise IndexError(f"step {step} of an epoch of {num_steps(num_rows, rows_per_step)} steps")
    rows = epoch_order(seed, epoch, num_rows)[step * rows_per_step : (step + 1) * rows_per_step].tolist()
    return rows + [None] * (rows_per_step - len(rows))


def rank_slices(
    rows: Sequence[int | None], world_size: int, rank: int, micro_batch_size: int
) -> list[list[int | None]]:
    """Return this rank's micro-batches of a step as lists of `micro_batch_size` row indices.

    All ranks get the same number of micro-batches. Their union is `rows`, padded with None to a multiple of
    world_size * micro_batch_size.
    """
    stride = world_size * micro_batch_size
    padded = [*rows, *[None] * (-len(rows) % stride)]
    starts = range(rank * micro_batch_size, len(padded), stride)
    return [padded[start : start + micro_batch_size] for start in starts]


def balanced_slices(
    rows: Sequence[int | None], lengths: Sequence[int], *, world_size: int, rank: int, micro_batch_size: int
) -> list[list[int | None]]:
    """Return this rank's micro-batches as `rank_slices` does, but balanced by length and longest rows first.

    The rows of a step are sorted by length and dealt to ranks in snake order (0, 1, 1, 0, 0, ...). So ranks get nearly
    the same number of tokens, and the rows of a micro-batch have nearly the same length. Padding rows come last.

    Args:
        rows: the rows of an optimizer step over all ranks.
        lengths: tokens of each row, as indexed by `rows`.
    """
    padded = [*rows, *[None] * (-len(rows) % (world_size * micro_batch_size))]
    ordered = sorted(padded, key=lambda row: 0 if row is None else -lengths[row])
    deals = (ordered[start : start + world_size] for start in range(0, len(ordered), world_size))
    mine = [deal[rank if number % 2 == 0 else world_size - 1 - rank] for number, deal in enumerate(deals)]
    return [mine[start : start + micro_batch_size] for start in range(0, len(mine), micro_batch_size)]


def _padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Pad ragged rows on the right to (B,S) int64."""
    return pad_rows([torch.from_numpy(np.asarray(row, dtype=np.int64)) for row in rows], fill)


def _check_on_host(mask: Tensor) -> None:
    """Check a batch's padding when it is collated; a copy on a GPU was checked on the host before."""
    if mask.device.type == "cpu":
        check_right_padded(mask)


def _weights(rows: Sequence[object]) -> Tensor:
    return torch.tensor([0.0 if row is None else 1.0 for row in rows])  # (B,)
