"""One optimizer step: its learning rate, its stop on request, and its update by all engines and ranks or by none."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from pipeline import dist
from pipeline.engine.engine import TrainingEngine
from pipeline.errors import DivergedError
from pipeline.files import tolerated


def step_together(engines: Sequence[TrainingEngine], rate_factor: float, *, loss: Tensor | float) -> bool:
    """Step all engines, or none: where a loss or any gradient of any rank is not finite, all gradients are dropped.

    Every rank decides alike: gradient norms are global, and the ranks' losses are looked at together. Each engine keeps
    its norm as `last_gradient_norm`. A collective.

    Args:
        loss: this rank's, of any shape; or a number that is the sum over all ranks already.
    """
    for engine in engines:
        engine.set_rate(rate_factor)  # also where the step is dropped: it is what is logged
        engine.last_gradient_norm = engine.gradient_norm()
    if isinstance(loss, Tensor):
        loss = dist.sum_over_ranks((loss * 0.0).sum()).item()  # NaN where any of them is not finite
    if not math.isfinite(loss) or not all(math.isfinite(engine.last_gradient_norm) for engine in engines):
        for engine in engines:
            engine.discard()
        return False
    for engine in engines:
        engine.step(rate_factor)
    return True


# Steps that take longer are looked into between their micro-batches, so that a stop does not wait for their end.
LONG_STEP_S = 2.0


class Interrupted(Exception):
    """The run is to stop, and what was half done is dropped: a rollout, or the gradients of a step."""


class Stopping:
    """When this run stops: asked after each step, and within steps that take long. All ranks get the same answer."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._long = False
        self._last = time.monotonic()

    def after_step(self) -> bool:
        """Whether any rank was asked to stop. A collective."""
        now = time.monotonic()
        self._long = dist.max_over_ranks(now - self._last, self._run.world.device) > LONG_STEP_S
        self._last = now
        return self._run.stop.anywhere(self._run.world)

    def check(self, engines: Iterable[Any] = ()) -> None:
        """Between two parts of a step; a collective where steps take long.

        Raises:
            Interrupted: the run is to stop; what `engines` had accumulated is dropped.
        """
        if self._long and self._run.stop.anywhere(self._run.world):
            for engine in engines:
                engine.drop_gradients()
            raise Interrupted


log = logging.getLogger(__name__)


ROWS_SHOWN = 16


MOST_BYTES = 1 << 24  # of the file with the batches


def note_bad_step(run: Any, *, step: int, rows: Sequence[int], input_ids: Iterable[torch.Tensor], cause: str) -> None:
    """Log a skipped step, and append this rank's batch to <run_dir>/log/bad-steps-rank-<r>.jsonl.

    Args:
        rows: numbers of this rank's training rows, in the order of the tokenised data.
        input_ids: (B, S) token ids of each micro-batch.
    """
    file = run.folder / "log" / f"bad-steps-rank-{run.world.rank}.jsonl"
    shown = ", ".join(map(str, rows[:ROWS_SHOWN])) + (", ..." if len(rows) > ROWS_SHOWN else "")
    log.warning("step %d skipped: %s; rank %d had rows %s (all: %s)", step, cause, run.world.rank, shown, file)
    with tolerated("bad steps"):
        if file.is_file() and file.stat().st_size > MOST_BYTES:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        ids = [batch.tolist() for batch in input_ids]
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({"step": step, "cause": cause, "rows": list(rows), "input_ids": ids}) + "\n")


def check_still_converging(run: Any, bad_in_a_row: int, *, limit: int, rate_flag: str) -> None:
    """Raise DivergedError after too many skipped steps in a row."""
    if bad_in_a_row >= limit:
        raise DivergedError(
            f"{bad_in_a_row} steps in a row were not finite; lower {rate_flag}, use --dtype bf16 instead of fp16, or "
            f"look at the rows in {run.folder / 'log' / 'bad-steps-rank-*.jsonl'}"
        )


def rate_factor(name: str, *, num_warmup_steps: int, num_training_steps: int, floor: float) -> Callable[[int], float]:
    """Step (0 is the first) -> share of the peak learning rate, never below `floor` after the warm-up.

    The shapes are transformers' own schedulers; they are asked for their factor, not stepped.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    warmup = min(num_warmup_steps, num_training_steps)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_training_steps)
    shape = scheduler.lr_lambdas[0]

    def factor(step: int) -> float:
        # Warm-up counts from 1: a first step at rate 0 would be a step lost.
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return floor + (1.0 - floor) * float(shape(step))

    return factor
