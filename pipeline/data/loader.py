"""Load the rows of an optimizer step as this rank's micro-batches.

The rows of a step are a function of (seed, epoch, step) only. Each rank takes a slice, so the number of ranks changes
nothing. Within a step, rows are grouped by length, so that there is little padding. `batching.py` collates them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from pyarrow import compute

from pipeline.data.batching import balanced_slices, num_steps, rank_slices, rows_of_step, total_steps

B = TypeVar("B")
Collate = Callable[[list[Any]], B]
Unit = Sequence[int]  # indices of the rows that become one sequence: a single row, or several packed rows


@dataclass(frozen=True, slots=True)
class Step(Generic[B]):
    """The data of one optimizer step.

    number: number of the step.
    micro_batch_size: rows of a micro-batch.
    micro_batches: this rank's micro-batches.
    rows: indices of this rank's rows.
    num_rows: rows of all ranks; like the counts below, it is known before the first backward pass.
    num_tokens: tokens of all ranks.
    num_trained: trained tokens of all ranks.
    num_squares: sum of the squared lengths of all ranks' sequences, for the cost of attention.
    """

    number: int
    micro_batch_size: int
    micro_batches: list[B]
    rows: list[int]
    num_rows: int
    num_tokens: int
    num_trained: int
    num_squares: int


class StepLoader(Generic[B]):
    """A loader of optimizer steps over a tokenised data set; `step(n)` is the n-th step of training, counted from 0.

    lengths: tokens of each unit's longest sequence, by which units are grouped; None: all tokens of the unit.
    """

    def __init__(
        self,
        rows: Any,
        units: Sequence[Unit],
        collate: Collate[B],
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
        self._counts["num_squares"] = (sequence_lengths(rows) ** 2).sum(1)
        self._lengths = [self._total("num_tokens", unit) for unit in units] if lengths is None else lengths

    def total_steps(self, epochs: float, max_steps: int) -> int:
        """Return the optimizer steps of a run: `max_steps`, or as many as the epochs have."""
        return total_steps(len(self.units), self.rows_per_step, epochs=epochs, max_steps=max_steps)

    def step(self, number: int) -> Step[B]:
        """Return the `number`-th optimizer step of training."""
        epoch, within = divmod(number, self.steps_per_epoch)
        units = rows_of_step(self.seed, epoch, within, len(self.units), self.rows_per_step)
        rows = [row for unit in units if unit is not None for row in self.units[unit]]
        world = {"world_size": self.world_size, "rank": self.rank}
        size = self.micro_batch_size  # another thread may change it
        slices = balanced_slices(units, self._lengths, **world, micro_batch_size=size)
        units_here = [[None if unit is None else self.units[unit] for unit in part] for part in slices]
        packs = [[None if unit is None else [self.rows[row] for row in unit] for unit in part] for part in units_here]
        return Step(
            number=number,
            micro_batch_size=size,
            micro_batches=[self.collate(part) for part in packs],
            rows=[row for part in units_here for unit in part for row in unit or ()],
            num_rows=len(rows),
            num_tokens=self._total("num_tokens", rows),
            num_trained=self._total("num_trained", rows),
            num_squares=self._total("num_squares", rows),
        )

    def resized(self, step: Step[B], micro_batch_size: int) -> Step[B]:
        """Return the same step in micro-batches of `micro_batch_size` units; later steps get this size too."""
        if step.micro_batch_size == micro_batch_size:
            return step
        self.micro_batch_size = micro_batch_size
        return self.step(step.number)

    def _total(self, column: str, rows: Sequence[int]) -> int:
        return sum(int(self._counts[column][row]) for row in rows) if column in self._counts else len(rows)


class PrefetchedSteps(Generic[B]):
    """The steps of a loader, the next one prefetched by a background thread while the current one is trained on.

    An error of the thread is raised unchanged by the call of `step` that needs its result. Use it in a `with` block:
    leaving the block waits for the thread, which has at most one step to finish.
    """

    def __init__(self, loader: StepLoader[B], *, end: int, device: torch.device) -> None:
        """Prefetch up to step `end` - 1, with batches in pinned memory if `device` is a GPU."""
        self._loader, self._end, self._device = loader, end, device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="next step")
        self._next: dict[int, Future[Step[B]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def step(self, number: int) -> Step[B]:
        """Return `StepLoader.step(number)` and start to prefetch the next step."""
        step = (self._next.pop(number, None) or self._thread.submit(self._make, number)).result()
        if number + 1 < self._end:
            self._next = {number + 1: self._thread.submit(self._make, number + 1)}
        return step

    def _make(self, number: int) -> Step[B]:
        step = self._loader.step(number)
        if self._device.type != "cuda":
            return step
        torch.cuda.set_device(self._device)  # a thread starts on device 0, which may be another rank's
        # Copies to the device are asynchronous only from pinned memory.
        pinned = [_each_tensor(batch, torch.Tensor.pin_memory) for batch in step.micro_batches]
        return replace(step, micro_batches=pinned)


def sequence_lengths(rows: Any) -> np.ndarray:
    """Return the tokens of each row's sequences, (N, 1), or (N, 2) for pairs, of a `datasets.Dataset`."""
    if "chosen_ids" not in rows.column_names:
        return np.asarray(rows["num_tokens"][:], dtype=np.int64)[:, None]
    table = rows.select_columns(["chosen_ids", "rejected_ids"]).with_format("arrow")[:]
    sides = [compute.list_value_length(column).to_numpy() for column in table.columns]
    return np.stack(sides, axis=1).astype(np.int64)


def evaluation_batches(
    rows: Any, collate: Collate[B], *, batch_size: int, world_size: int = 1, rank: int = 0, max_rows: int = 0
) -> list[Callable[[], B]]:
    """Return this rank's evaluation batches in order, as functions that collate them; equally many on every rank.

    Args:
        collate: takes a list of lists of rows, None for padding.
        max_rows: number of first rows to take, over all ranks; 0: all rows.
    """

    def make(part: list[int | None]) -> B:
        return collate([None if row is None else [rows[row]] for row in part])

    slices = rank_slices(range(len(rows))[: max_rows or None], world_size, rank, batch_size)
    return [partial(make, part) for part in slices]


def to_device(batch: B, device: torch.device) -> B:
    """Copy a batch dataclass to `device`, asynchronously from pinned memory."""
    return _each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _each_tensor(batch: B, change: Callable[[torch.Tensor], torch.Tensor]) -> B:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}  # type: ignore[arg-type]
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            values[name] = change(value)
        elif is_dataclass(value):
            values[name] = _each_tensor(value, change)
    return type(batch)(**values)
