"""Micro-batches of a rollout's N rows: rows that pass through a model together, packed or of similar length.

They follow from the lengths of all rows, which every rank knows. All ranks get the same number of micro-batches with
the same numbers of rows, and nearly the same numbers of tokens.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import torch

from pipeline import dist
from pipeline.data.batching import LEAST_SHARED, SCORING_TOKENS, balanced_slices
from pipeline.tensor_ops import round_up

# Lengths of forward passes on a GPU are multiples of this, in tokens. Each new shape costs tenths of a second,
# once: the choice of attention kernels and the layout of memory take them.
LENGTH_UNIT = 32
# Fixed cost of a forward pass in tokens: one more pass must save more padding than this.
PASS_TOKENS = 1_024
# Rows are packed if that saves more than this share of a pass; attention of padded rows is faster.
PADDING_TO_PACK = 1 / 32
# Largest number of positions of padded rows, per token of a packed pass, when hidden states are unpacked.
MOST_SPREAD = 4


def length_unit(device: torch.device) -> int:
    """Return the multiple to which lengths of forward passes are rounded up."""
    return LENGTH_UNIT if device.type == "cuda" else 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """The numbers of tokens of N rows, on the host.

    prompts: those of the rows' prompts.
    responses: those behind the prompts.
    unit: multiple to which the length of a forward pass over padded rows is rounded up.
    packs: whether the models accept packed rows, without padding.
    groups: a number for each row; rows of one number have the same prompt. Empty: all prompts differ.
    answered: of each row, tokens behind its prompt that are not the model's: answers of tools. Empty: there are none.
    """

    prompts: list[int]
    responses: list[int]
    unit: int = 1
    packs: bool = False
    groups: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        prompt_lengths: torch.Tensor,
        response_lengths: torch.Tensor,
        *,
        packs: bool = False,
        groups: torch.Tensor | None = None,
        trained: torch.Tensor | None = None,
    ) -> Self:
        """Read (N,) int64 lengths and groups from the device, with one synchronisation.

        trained: (N,) int64, tokens of each row that the model sampled; None: all of its response.
        """
        columns = {"prompts": prompt_lengths, "responses": response_lengths}
        columns |= {} if groups is None else {"groups": groups}
        columns |= {} if trained is None else {"answered": response_lengths - trained}
        read = dict(zip(columns, torch.stack(list(columns.values())).tolist(), strict=True))
        if not any(read.get("answered", ())):
            read.pop("answered", None)
        return cls(**read, unit=length_unit(prompt_lengths.device), packs=packs)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def whole(self) -> list[int]:
        """Tokens of each row, prompt and response."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    def shared(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths of prompts that a row before has too, among these rows; () if they are too few to share.

        The lengths are those of all rows after the first one with their prompt.
        """
        if not self.groups or not self.packs:
            return ()
        first = {self.groups[row]: row for row in reversed(rows)}
        shared = tuple(self.prompts[row] for row in rows if first[self.groups[row]] != row)
        num_tokens = sum(self.prompts[row] + self.responses[row] for row in rows)
        return shared if sum(shared) > LEAST_SHARED * num_tokens else ()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass, and its shape.

    rows: indices of rows in the rollout.
    length: tokens of the longest sequence, rounded up.
    width: sampled tokens of the response with the most.
    num_response_tokens: sampled tokens of all rows, including those that only fill a rollout up.
    num_packed_tokens: tokens of all sequences, if they pass packed; None: they pass as (rows, length).
    shared: lengths of prompts that do not pass, since a row before with the same prompt computes them.
    """

    rows: tuple[int, ...]
    length: int
    width: int
    num_response_tokens: int
    num_packed_tokens: int | None = None
    shared: tuple[int, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[int], lengths: Lengths) -> Self:
        """Return the micro-batch of these rows; its shape follows from their lengths."""
        rows = tuple(rows)
        sampled = [lengths.responses[row] - (lengths.answered[row] if lengths.answered else 0) for row in rows]
        whole = [lengths.prompts[row] + lengths.responses[row] for row in rows]
        length = round_up(max(whole), lengths.unit)
        shared = lengths.shared(rows)
        packs = lengths.packs and sum(whole) - sum(shared) < len(rows) * length * (1 - PADDING_TO_PACK)
        return cls(rows, length, max(sampled), sum(sampled), sum(whole) if packs else None, shared)

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through a model, padding included."""
        return (self.num_packed_tokens or len(self.rows) * self.length) - sum(self.shared)


def micro_batches(
    rows: Sequence[int], lengths: Lengths, *, rows_per_step: int, world: dist.World, size: int
) -> list[list[MicroBatch]]:
    """Return this rank's micro-batches of each optimizer step over `rows`.

    The ranks must divide `rows_per_step`, and that the number of rows; a run's start checks both. A step has the next
    `rows_per_step` rows. A micro-batch has at most as many tokens as `size` rows of the step's longest length, so that
    short rows take fewer passes. The longest row is in the first micro-batch.
    """
    steps = [rows[start : start + rows_per_step] for start in range(0, len(rows), rows_per_step)]
    return [by_tokens(step, lengths, world, longest_rows=size) for step in steps]


def by_tokens(
    rows: Sequence[int], lengths: Lengths, world: dist.World, *, longest_rows: int = 0, tokens: int = 0
) -> list[MicroBatch]:
    """Split this rank's share of `rows` into micro-batches with a limit of tokens, including padding of padded rows.

    Rows of nearly one length may exceed the limit by the padding that PADDING_TO_PACK allows. Packed rows with the same
    prompt stay together as far as the limit and the ranks allow. The limit counts their prompts each. There is another
    one, of the tokens that pass: those of as many of the longest rows as the limit has room for, with the longest
    prompt and the longest response. The plan counts memory for both.

    Args:
        longest_rows: the limit is this many times the longest row; 0: `tokens` is the limit.
        tokens: the limit, or one row if that is longer.
    """
    whole = lengths.whole
    longest = round_up(max(whole[row] for row in rows), lengths.unit)
    limit = longest_rows * longest or tokens
    units, at_once = [[row] for row in rows], max(1, limit // longest)
    if lengths.packs and lengths.groups:
        units = together(rows, lengths, world_size=world.size, most=at_once)
    totals = [sum(whole[row] for row in unit) for unit in units]
    if (size := len(units[0])) > 1:
        prompt, response = (max(column[row] for row in rows) for column in (lengths.prompts, lengths.responses))
        most_passing = -(-at_once // size) * prompt + at_once * response
        passing = [total - (size - 1) * lengths.prompts[unit[0]] for total, unit in zip(totals, units, strict=True)]
        totals = [max(total, n * limit // most_passing) for total, n in zip(totals, passing, strict=True)]
    (mine,) = balanced_slices(
        range(len(units)), totals, world_size=world.size, rank=world.rank, micro_batch_size=len(units) // world.size
    )
    # All ranks must split at the same indices, so take the longest of the units that the ranks have at each index.
    order = sorted(range(len(units)), key=totals.__getitem__, reverse=True)
    deals = [order[start : start + world.size] for start in range(0, len(order), world.size)]
    ordered = [totals[deal[0]] for deal in deals]
    padded = [
        max(len(units[unit]) * round_up(whole[row], lengths.unit) for unit in deal for row in units[unit])
        for deal in deals
    ]
    if lengths.packs:
        parts = even_parts(ordered, limit, padded)
    else:
        parts = [list(range(*ends)) for ends in pairwise(best_cuts(padded, limit))]
    of_rank = [units[unit] for unit in mine if unit is not None]
    return [MicroBatch.of((row for index in part for row in of_rank[index]), lengths) for part in parts]


def together(rows: Sequence[int], lengths: Lengths, *, world_size: int, most: int) -> list[list[int]]:
    """Divide rows into units of `unit_size` rows with one prompt."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(lengths.groups[row], []).append(row)
    size = unit_size(math.gcd(*map(len, groups.values())), len(rows), world_size=world_size, most=most)
    if size == 1:
        return [[row] for row in rows]
    whole = lengths.whole
    ordered = [sorted(group, key=lambda row: -whole[row]) for group in groups.values()]
    return [group[start : start + size] for group in ordered for start in range(0, len(group), size)]


def unit_size(group: int, rows: int, *, world_size: int, most: int) -> int:
    """Return how many rows with one prompt stay together: all of a `group`, or as many of it as divide evenly.

    At most `most`, and so many that the ranks get the same number of units of the step's rows.
    """
    sizes = (size for size in range(min(group, most), 1, -1) if group % size == 0)
    return next((size for size in sizes if rows // size % world_size == 0), 1)


def even_parts(lengths: Sequence[int], limit: int, padded: Sequence[int] | None = None) -> list[list[int]]:
    """Split the indices of N descending lengths into few parts with nearly equal sums, at most `limit` each.

    If the longest length is above the limit, it is the limit. Each length goes to the part with the smallest sum
    (Graham 1969, "longest processing time first"). No part takes more than MOST_SPREAD times the limit as padded rows:
    `padded` are these lengths if each belongs to several rows.
    """
    padded = padded or lengths
    limit = max(limit, lengths[0])
    count = max(1, math.ceil(sum(lengths) / limit))
    while count < len(lengths):
        parts: list[list[int]] = [[] for _ in range(count)]
        sums = [(0, part) for part in range(count)]
        for index, length in enumerate(lengths):
            full, part = heapq.heappop(sums)
            heapq.heappush(sums, (full + length, part))
            parts[part].append(index)
        spread = max(len(part) * max(padded[index] for index in part) for part in parts if part)
        if max(sums)[0] <= limit and spread <= MOST_SPREAD * limit:
            return parts
        count += 1 + count // 8
    return [[index] for index in range(len(lengths))]


def best_cuts(lengths: Sequence[int], limit: int) -> list[int]:
    """Return the boundaries [0, ..., N] of parts of N descending lengths with the least cost of padding and passes.

    A part of n rows from row i on costs n * lengths[i] + PASS_TOKENS, where n * lengths[i] is at most `limit` unless n
    is 1. The search is dynamic programming over the ends of parts. Among equal costs the last parts are the shortest.
    """
    costs, starts = [0], [0]
    for stop in range(1, len(lengths) + 1):
        best, first = math.inf, stop - 1
        for start in range(stop - 1, -1, -1):
            padded = (stop - start) * lengths[start]
            if padded > limit and stop - start > 1:
                break
            if (cost := costs[start] + padded + PASS_TOKENS) < best:
                best, first = cost, start
        costs.append(int(best))
        starts.append(first)
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(starts[cuts[-1]])
    return cuts[::-1]


def scoring_batches(lengths: Lengths, *, world: dist.World, tokens: int | None = None) -> list[MicroBatch]:
    """Return this rank's share of all rows in passes of at most `tokens` (default: SCORING_TOKENS) or of one row."""
    return by_tokens(range(len(lengths)), lengths, world, tokens=tokens or SCORING_TOKENS)


def row_indices(batches: Sequence[MicroBatch], device: torch.device) -> torch.Tensor:
    """Return the rows of all micro-batches, one after another, as an (n,) int64 tensor, copied in one transfer."""
    return torch.tensor([row for batch in batches for row in batch.rows], dtype=torch.int64, device=device)
