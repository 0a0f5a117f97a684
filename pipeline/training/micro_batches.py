"""Micro-batches of a rollout: rows that pass through a model together, packed or of similar length.

The cuts follow from the lengths alone, which every rank knows of all rows: ranks get equally many micro-batches of
equally many rows, and nearly equally many tokens. N rows of a rollout.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch

from pipeline import dist
from pipeline.data.batching import SCORING_TOKENS, balanced_slices
from pipeline.tensor_ops import round_up

# Lengths of forward passes on a GPU are multiples of this: each new shape costs it some tenths of a second once, when
# attention kernels are planned and memory is laid out.
LENGTH_UNIT = 32
# The fixed cost of a forward pass in tokens: another pass must save more padding than this.
PASS_TOKENS = 1_024
# Padded rows are packed if that spares more than this share of a pass: attention of padded rows is the faster one.
PADDING_TO_PACK = 1 / 32
# Most positions of the padded rows into which hidden states are unpacked, per token of a packed pass.
MOST_SPREAD = 4


def length_unit(device: torch.device) -> int:
    """Return the multiple to which lengths of forward passes are rounded up."""
    return LENGTH_UNIT if device.type == "cuda" else 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """The numbers of tokens of N prompts and N responses, on the host.

    unit: what the length of a forward pass over padded rows is a multiple of. packs: whether the models take rows
    without their padding.
    """

    prompts: list[int]
    responses: list[int]
    unit: int = 1
    packs: bool = False

    @classmethod
    def of(cls, prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, *, packs: bool = False) -> Self:
        """Read (N,) int64 lengths from the device, which is waited for once."""
        prompts, answers = torch.stack([prompt_lengths, response_lengths]).tolist()
        return cls(prompts, answers, length_unit(prompt_lengths.device), packs)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def whole(self) -> list[int]:
        """Tokens of each row, prompt and response."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass, and its shape.

    rows: places in the rollout.
    length: tokens of the longest sequence, rounded up.
    width: tokens of the longest response.
    num_response_tokens: response tokens of all rows, those that only fill included.
    num_packed_tokens: tokens of the sequences, where they pass without padding; None: they pass as (rows, length).
    """

    rows: tuple[int, ...]
    length: int
    width: int
    num_response_tokens: int
    num_packed_tokens: int | None = None

    @classmethod
    def of(cls, rows: Iterable[int], lengths: Lengths) -> Self:
        """Make the micro-batch of these rows, with the shape that follows from their lengths."""
        rows = tuple(rows)
        responses = [lengths.responses[row] for row in rows]
        whole = [lengths.prompts[row] + lengths.responses[row] for row in rows]
        length = round_up(max(whole), lengths.unit)
        packs = lengths.packs and sum(whole) < len(rows) * length * (1 - PADDING_TO_PACK)
        return cls(rows, length, max(responses), sum(responses), sum(whole) if packs else None)

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through a model, padding included."""
        return self.num_packed_tokens or len(self.rows) * self.length


def micro_batches(
    rows: Sequence[int], lengths: Lengths, *, rows_per_step: int, world: dist.World, size: int
) -> list[list[MicroBatch]]:
    """Cut this rank's micro-batches of each optimizer step over `rows`; sizes must divide (checked at the start).

    A step holds the next `rows_per_step` rows, whatever their lengths. A micro-batch takes at most as many tokens as
    `size` rows of the step's longest length: then work follows the tokens, and short rows make fewer passes. The
    longest row is in the first.
    """
    steps = [rows[start : start + rows_per_step] for start in range(0, len(rows), rows_per_step)]
    return [by_tokens(step, lengths, world, longest_rows=size) for step in steps]


def by_tokens(
    rows: Sequence[int], lengths: Lengths, world: dist.World, *, longest_rows: int = 0, tokens: int = 0
) -> list[MicroBatch]:
    """Cut this rank's share of `rows` into micro-batches of at most so many tokens, padding counted where it passes.

    longest_rows: the limit is that many of the longest rows; 0: `tokens`, or one row. Packed rows that are nearly of
    one length may go beyond it by the little padding that PADDING_TO_PACK lets them have.
    """
    share = len(rows) // world.size
    (mine,) = dealt(rows, lengths, world, share)
    # Of the rows that the ranks hold at one place: all ranks must cut at the same places.
    whole = lengths.whole
    ordered = sorted((whole[row] for row in rows), reverse=True)[:: world.size]
    padded = [round_up(length, lengths.unit) for length in ordered]
    limit = longest_rows * padded[0] or tokens
    if lengths.packs:
        parts = even_parts(ordered, limit)
    else:
        parts = [list(range(*ends)) for ends in pairwise(best_cuts(padded, limit))]
    return [MicroBatch.of((mine[place] for place in part), lengths) for part in parts]


def even_parts(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Divide the places of N falling lengths into few parts of nearly even sums, at most `limit` or the longest length.

    Each length goes to the part that is least full (Graham 1969, "longest processing time first"); there are about as
    many parts as that needs. No part as padded rows takes more than MOST_SPREAD times the limit.
    """
    limit = max(limit, lengths[0])
    count = max(1, math.ceil(sum(lengths) / limit))
    while count < len(lengths):
        parts: list[list[int]] = [[] for _ in range(count)]
        sums = [(0, part) for part in range(count)]
        for place, length in enumerate(lengths):
            full, part = heapq.heappop(sums)
            heapq.heappush(sums, (full + length, part))
            parts[part].append(place)
        spread = max(len(part) * lengths[part[0]] for part in parts if part)
        if max(sums)[0] <= limit and spread <= MOST_SPREAD * limit:
            return parts
        count += 1 + count // 8
    return [[place] for place in range(len(lengths))]


def best_cuts(lengths: Sequence[int], limit: int) -> list[int]:
    """Return the cuts [0, ..., N] of N falling lengths at which padding and forward passes cost least.

    A part of n rows from row i on costs n * lengths[i], at most `limit` unless n is 1, and PASS_TOKENS. Found by
    dynamic programming over the ends of parts; among equals the cut that makes the last parts shortest.
    """
    costs, starts = [0], [0]
    for stop in range(1, len(lengths) + 1):
        best, found = math.inf, stop - 1
        for start in range(stop - 1, -1, -1):
            padded = (stop - start) * lengths[start]
            if padded > limit and stop - start > 1:
                break
            if (cost := costs[start] + padded + PASS_TOKENS) < best:
                best, found = cost, start
        costs.append(int(best))
        starts.append(found)
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(starts[cuts[-1]])
    return cuts[::-1]


def dealt(rows: Sequence[int], lengths: Lengths, world: dist.World, size: int) -> list[list[int]]:
    """This rank's share of rows whose number divides, longest first, `size` at a time."""
    slices = balanced_slices(rows, lengths.whole, world_size=world.size, rank=world.rank, micro_batch_size=size)
    return [[row for row in part if row is not None] for part in slices]


def scoring_batches(lengths: Lengths, *, world: dist.World, tokens: int | None = None) -> list[MicroBatch]:
    """This rank's share of all rows in forward passes of at most `tokens` (SCORING_TOKENS) tokens, or of one row."""
    return by_tokens(range(len(lengths)), lengths, world, tokens=tokens or SCORING_TOKENS)


def places(batches: Sequence[MicroBatch], device: torch.device) -> torch.Tensor:
    """(n,) int64: the rows of all micro-batches, one after another, in one transfer."""
    return torch.tensor([row for batch in batches for row in batch.rows], dtype=torch.int64, device=device)
