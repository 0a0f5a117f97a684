"""The step as the unit: which rows make an optimizer step, cut into this rank's micro-batches.

A step is a function of (seed, epoch, step) alone; ranks take slices of it, so the number of ranks changes nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from pipeline.data.batching import num_steps, plan_step, rank_slices

B = TypeVar("B")
Unit = Sequence[int]  # the rows that share a sequence: one row, or several packed ones


@dataclass(frozen=True, slots=True)
class Step(Generic[B]):
    """One optimizer step: this rank's micro-batches, and counts over all ranks, known before the first backward.

    rows: numbers of this rank's rows.
    """

    micro_batches: list[B]
    rows: list[int]
    num_rows: int
    num_tokens: int
    num_trained: int


class StepLoader(Generic[B]):
    """Steps over a tokenised data set; `step(n)` is the n-th optimizer step of training, counted from 0."""

    def __init__(
        self,
        rows: Any,
        units: Sequence[Unit],
        collate: Callable[[list[Any]], B],
        *,
        micro_batch_size: int,
        accumulation: int,
        world_size: int,
        rank: int,
        seed: int,
    ) -> None:
        self.rows, self.units, self.collate = rows, units, collate
        self.micro_batch_size, self.world_size, self.rank, self.seed = micro_batch_size, world_size, rank, seed
        self.rows_per_step = micro_batch_size * accumulation * world_size
        self.steps_per_epoch = num_steps(len(units), self.rows_per_step)
        self._counts = {name: rows[name] for name in ("num_tokens", "num_trained") if name in rows.column_names}

    def total_steps(self, epochs: float, max_steps: int) -> int:
        """Optimizer steps of a run: `max_steps`, or as many as the epochs have."""
        return max_steps or max(1, math.ceil(epochs * self.steps_per_epoch))

    def epoch_of(self, step: int) -> float:
        """Passes over the rows after `step` steps."""
        return step / self.steps_per_epoch

    def step(self, number: int) -> Step[B]:
        """The `number`-th optimizer step of training."""
        epoch, within = divmod(number, self.steps_per_epoch)
        planned = plan_step(self.seed, epoch, within, len(self.units), self.rows_per_step)
        rows = [row for unit in planned if unit is not None for row in self.units[unit]]
        slices = rank_slices(planned, self.world_size, self.rank, self.micro_batch_size)
        return Step(
            micro_batches=[self.collate([self._unit(unit) for unit in part]) for part in slices],
            rows=[row for part in slices for unit in part if unit is not None for row in self.units[unit]],
            num_rows=len(rows),
            num_tokens=self._total("num_tokens", rows),
            num_trained=self._total("num_trained", rows),
        )

    def _unit(self, unit: int | None) -> list[Any] | None:
        return None if unit is None else [self.rows[row] for row in self.units[unit]]

    def _total(self, column: str, rows: list[int]) -> int:
        return sum(int(self._counts[column][row]) for row in rows) if column in self._counts else len(rows)


def evaluation_batches(
    rows: Any, collate: Callable[[list[Any]], B], *, batch_size: int, world_size: int, rank: int, max_batches: int
) -> list[Callable[[], B]]:
    """This rank's evaluation batches in order, as functions that collate; equally many on every rank.

    Args:
        collate: takes a list of lists of rows, None for padding.
        max_batches: at most this many per rank; 0: all rows.
    """
    slices = rank_slices(list(range(len(rows))), world_size, rank, batch_size)
    chosen = slices[:max_batches] if max_batches else slices

    def make(part: list[int | None]) -> B:
        return collate([None if row is None else [rows[row]] for row in part])

    return [partial(make, part) for part in chosen]


def each(batches: Sequence[Callable[[], B]], before: Callable[[], None]) -> Iterator[Callable[[], B]]:
    """The batches, with a call of `before` ahead of each."""
    for make in batches:
        before()
        yield make


def to_device(batch: B, device: torch.device) -> B:
    """A batch dataclass with its tensors on `device`."""
    moved = {
        field.name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for field in fields(batch)  # type: ignore[arg-type]
        for value in [getattr(batch, field.name)]
    }
    return type(batch)(**moved)
