"""The step as the unit: which rows make an optimizer step, cut into this rank's micro-batches.

A step is a function of (seed, epoch, step) alone; ranks take slices of it, so the number of ranks changes nothing.
Within a step rows are grouped by length, so that little is computed for padding; sums over the step stay what they are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from pyarrow import compute

from pipeline.data.batching import balanced_slices, num_steps, rank_slices, rows_of_step

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
    """Steps over a tokenised data set; `step(n)` is the n-th optimizer step of training, counted from 0.

    lengths: tokens of each unit's longest sequence, by which rows are grouped; None: all tokens of the unit.
    """

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
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.rows, self.units, self.collate = rows, units, collate
        self.micro_batch_size, self.world_size, self.rank, self.seed = micro_batch_size, world_size, rank, seed
        self.rows_per_step = micro_batch_size * accumulation * world_size
        self.steps_per_epoch = num_steps(len(units), self.rows_per_step)
        counted = [name for name in ("num_tokens", "num_trained") if name in rows.column_names]
        self._counts = {name: np.asarray(rows[name][:]) for name in counted}
        self._lengths = [self._total("num_tokens", unit) for unit in units] if lengths is None else lengths

    def total_steps(self, epochs: float, max_steps: int) -> int:
        """Optimizer steps of a run: `max_steps`, or as many as the epochs have."""
        return max_steps or max(1, math.ceil(epochs * self.steps_per_epoch))

    def epoch_of(self, step: int) -> float:
        """Passes over the rows after `step` steps."""
        return step / self.steps_per_epoch

    def step(self, number: int) -> Step[B]:
        """The `number`-th optimizer step of training."""
        epoch, within = divmod(number, self.steps_per_epoch)
        planned = rows_of_step(self.seed, epoch, within, len(self.units), self.rows_per_step)
        rows = [row for unit in planned if unit is not None for row in self.units[unit]]
        slices = balanced_slices(
            planned,
            self._lengths,
            world_size=self.world_size,
            rank=self.rank,
            micro_batch_size=self.micro_batch_size,
        )
        return Step(
            micro_batches=[self.collate([self._unit(unit) for unit in part]) for part in slices],
            rows=[row for part in slices for unit in part if unit is not None for row in self.units[unit]],
            num_rows=len(rows),
            num_tokens=self._total("num_tokens", rows),
            num_trained=self._total("num_trained", rows),
        )

    def _unit(self, unit: int | None) -> list[Any] | None:
        return None if unit is None else [self.rows[row] for row in self.units[unit]]

    def _total(self, column: str, rows: Sequence[int]) -> int:
        return sum(int(self._counts[column][row]) for row in rows) if column in self._counts else len(rows)


class PrefetchedSteps(Generic[B]):
    """A loader whose next step is made in a background thread while the one before it is trained on.

    It gives the very steps of the loader. An error of the thread is raised where its step is asked for, as it is. To be
    used in a `with` block: leaving it waits for the thread, which has at most one step to finish.
    """

    def __init__(self, loader: StepLoader[B], *, end: int, device: torch.device) -> None:
        """`end`: steps of the run; none behind them is made. `device`: where the batches go."""
        self._loader, self._end, self._device = loader, end, device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="next step")
        self._next: tuple[int, Future[Step[B]]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def step(self, number: int) -> Step[B]:
        """`StepLoader.step(number)`; the one after it is begun."""
        number_made, made = self._next or (-1, None)
        if made is None or number_made != number:
            made = self._thread.submit(self._make, number)
        found = made.result()
        if number + 1 < self._end:
            self._next = (number + 1, self._thread.submit(self._make, number + 1))
        return found

    def _make(self, number: int) -> Step[B]:
        step = self._loader.step(number)
        if self._device.type != "cuda":
            return step
        torch.cuda.set_device(self._device)  # a thread starts at device 0, which may be another rank's
        # Only from page-locked memory does a copy to the device not hold up the loop.
        pinned = [_each_tensor(batch, torch.Tensor.pin_memory) for batch in step.micro_batches]
        return Step(pinned, step.rows, step.num_rows, step.num_tokens, step.num_trained)


def pair_lengths(rows: Any) -> list[int]:
    """Tokens of the longer side of each pair of a `datasets.Dataset` with chosen_ids and rejected_ids."""
    table = rows.with_format("arrow")[:]
    sides = (compute.list_value_length(table[name]).to_numpy() for name in ("chosen_ids", "rejected_ids"))
    return np.maximum(*sides).tolist()


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
    """A batch dataclass with its tensors on `device`; the host does not wait for copies from page-locked memory."""
    return _each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _each_tensor(batch: B, change: Callable[[torch.Tensor], torch.Tensor]) -> B:
    changed = {
        field.name: change(value) if isinstance(value, torch.Tensor) else value
        for field in fields(batch)  # type: ignore[arg-type]
        for value in [getattr(batch, field.name)]
    }
    return type(batch)(**changed)
