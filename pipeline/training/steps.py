"""One optimizer step: learning rate, counters, stop requests, the update by all engines or none, skipped steps.

The loops of all stages use it; each stage defines its loss.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import get_scheduler

from pipeline import dist
from pipeline.configuration.groups import OptimizerConfig
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.memory import gradient_bytes
from pipeline.errors import DivergedError, Interrupted, dashed
from pipeline.files import append_json_lines, tolerated
from pipeline.run.run import Run

log = logging.getLogger(__name__)

# Seconds of a step above which stop requests are checked between micro-batches too.
LONG_STEP_S = 2.0
ROWS_SHOWN = 16
# Bytes of the file of skipped batches above which nothing is appended.
MAX_SKIPPED_BYTES = 1 << 24


@dataclass(slots=True)
class Counters:
    """Counters in the checkpoints of every stage; a stage's own state extends them.

    step: optimizer steps, taken or skipped.
    num_tokens: tokens trained on.
    skipped_updates: steps that changed nothing, because a loss or gradient was not finite.
    bad_in_a_row: number of latest steps that were all skipped.
    evaluated: step of the last evaluation, -1 before the first.
    halved: phase -> [requested batch size, size since an out-of-memory error] (halving.py).
    """

    step: int = 0
    num_tokens: int = 0
    skipped_updates: int = 0
    bad_in_a_row: int = 0
    evaluated: int = -1
    halved: dict[str, list[int]] = field(default_factory=dict)

    def batch_size(self, phase: str, requested: int) -> int:
        """Return the batch size in force in a phase. requested: the size by flags; a changed flag ends halving."""
        before, size = self.halved.get(phase, (requested, requested))
        return size if before == requested else requested

    def count_step(self, *, stepped: bool, engines: Iterable[TrainingEngine], is_bad: bool = True) -> None:
        """Count a step. A step skipped while an fp16 loss scale still settles is no sign of divergence.

        Args:
            is_bad: whether this step, if skipped, is a sign of divergence.
        """
        self.step += 1
        self.skipped_updates += not stepped
        settling = False
        for engine in engines:
            engine.is_stepping = False
            settling |= engine.loss_scale_can_fall
        self.bad_in_a_row = 0 if stepped or settling else self.bad_in_a_row + is_bad


def rate_factor(optimizer: OptimizerConfig, *, total_steps: int) -> Callable[[int], float]:
    """Return a function from the step (0 is the first) to the share of the peak learning rate.

    After the warm-up it is never below `--min-learning-rate-ratio`. The shapes are those of transformers' schedulers.
    Their factor is computed from the step, so a resumed run needs no scheduler state.
    """
    warmup = min(optimizer.num_warmup_steps, total_steps)
    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(
        optimizer.lr_scheduler_type, unused, num_warmup_steps=warmup, num_training_steps=total_steps
    )
    shape, floor = scheduler.lr_lambdas[0], optimizer.min_learning_rate_ratio

    def factor(step: int) -> float:
        # Warm-up counts from 1: a first step at rate 0 would train nothing.
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return floor + (1.0 - floor) * float(shape(step))

    return factor


def step_together(engines: Sequence[TrainingEngine], rate_factor: float, *, loss: Tensor | float) -> bool:
    """Step all engines, or none: if a loss or gradient of any rank is not finite, drop all gradients.

    All ranks decide alike: gradient norms are global, and losses are summed over ranks. Each engine stores its norm as
    `last_gradient_norm`. A collective.

    Args:
        loss: this rank's loss, of any shape; or a number that is already the sum over all ranks.

    Returns:
        Whether the engines stepped.
    """
    for engine in engines:
        engine.set_rate(rate_factor)  # even if the step is dropped, since the rate is logged
        engine.gradient_bytes = engine.gradient_bytes or gradient_bytes(engine)
        engine.last_gradient_norm = engine.gradient_norm()
    if isinstance(loss, Tensor):
        loss = dist.sum_over_ranks((loss * 0.0).sum()).item()  # NaN if any loss is not finite
    if not math.isfinite(loss) or not all(math.isfinite(engine.last_gradient_norm) for engine in engines):
        for engine in engines:
            engine.discard()
        return False
    for engine in engines:
        engine.step(rate_factor)
    return True


class Stopping:
    """Checks for a request to stop this run, after each step and within long steps. All ranks decide alike."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._long = False
        self._last = time.monotonic()

    def between_steps(self) -> None:
        """Raise Interrupted on all ranks if any rank got a stop request. A collective."""
        now = time.monotonic()
        self._long = dist.max_over_ranks(now - self._last, self._run.world.device) > LONG_STEP_S
        self._last = now
        if self._run.stop.is_set_on_any_rank(self._run.world):
            raise Interrupted

    def within_step(self, engines: Iterable[TrainingEngine] = ()) -> None:
        """Raise Interrupted between parts of a long step if any rank got a stop request. A collective there.

        The accumulated gradients of `engines` are dropped.
        """
        if self._long and self._run.stop.is_set_on_any_rank(self._run.world):
            for engine in engines:
                engine.drop_gradients()
            raise Interrupted


def note_skipped_step(
    run: Run, state: Counters, *, rows: Sequence[int], input_ids: Iterable[Tensor], cause: str
) -> None:
    """Log a skipped step, and append this rank's batch to <run_dir>/log/bad-steps-rank-<r>.jsonl.

    Args:
        rows: indices of this rank's training rows in the tokenised data.
        input_ids: (B, S) token ids of each micro-batch.

    Raises:
        DivergedError: `--max-bad-steps` steps in a row were skipped.
    """
    file = run.folder / "log" / f"bad-steps-rank-{run.world.rank}.jsonl"
    shown = ", ".join(map(str, rows[:ROWS_SHOWN])) + (", ..." if len(rows) > ROWS_SHOWN else "")
    log.warning("step %d skipped: %s; rank %d had rows %s (all: %s)", state.step, cause, run.world.rank, shown, file)
    with tolerated("bad steps"):
        if not file.is_file() or file.stat().st_size <= MAX_SKIPPED_BYTES:
            file.parent.mkdir(parents=True, exist_ok=True)
            batch = {
                "step": state.step,
                "cause": cause,
                "rows": list(rows),
                "input_ids": [b.tolist() for b in input_ids],
            }
            append_json_lines(file, [batch])
    if state.bad_in_a_row >= run.resolved.config.optimizer.max_bad_steps:
        rate = dashed(run.stage.rate_flag(run.resolved.config))
        raise DivergedError(f"{state.bad_in_a_row} steps in a row were not finite; {divergence_advice(run, rate)}")


def divergence_advice(run: Run, rate: str) -> str:
    """Return advice after skipped steps, and the files with their causes. rate: the flag of the learning rate."""
    bf16 = ", or give --dtype bf16 instead of fp16" if run.resolved.config.deepspeed.dtype == "fp16" else ""
    causes = f"causes and rows are in {run.folder / 'log' / 'bad-steps-rank-*.jsonl'}"
    return f"lower {rate}{bf16} where a loss or gradient was not finite; {causes}"
