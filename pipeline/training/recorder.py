"""The metrics of a run as they are made: times, rates and memory are added, and progress lines are printed."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.configuration.groups import RunConfig
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.memory import Peaks, memory_table, model_memory
from pipeline.run.run import Run
from pipeline.training.metrics import MetricsWriter

log = logging.getLogger(__name__)


class Recorder:
    """Times and peak memory of the phases; metrics and progress lines are written by rank 0 only."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        *,
        start_step: int,
        total_steps: int,
        shown: Sequence[str] = ("loss",),
        models: Mapping[str, TrainingEngine | FrozenEngine] | None = None,
    ) -> None:
        """`models`: the engines of the run, whose memory the log tells after the first step."""
        self.shown = shown
        self.device = run.world.device
        self._models = dict(models or {})
        self._peaks = Peaks(self.device)
        self._phase = ""
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._writer: MetricsWriter | None = None
        if run.world.is_main:
            self._writer = MetricsWriter(
                run.folder,
                stage=run.stage,
                tensorboard=config.enable_tensorboard,
                csv_file=config.enable_csv,
                wandb=config.enable_wandb,
                start_step=start_step,
            )
            self._progress = Progress(
                run.stage, total_steps=total_steps, start_step=max(start_step, 0), every=config.print_steps
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics outside a training step: evaluations."""
        if self._writer is not None and values:
            self._writer.write(step, values)
            numbers = "  ".join(f"{name} {readable(value)}" for name, value in values.items())
            self._progress.note(f"[{self._writer.stage}] step {step}: {numbers}")

    def begin(self, phase: str) -> None:
        """Begin a phase of the step (memory.PHASES), and end the one before: times and peak memory are told apart."""
        now = self._peaks.begin(phase)
        self._ended[self._phase] = now
        self._begun[phase], self._phase = now, phase
        self._ended.pop(phase, None)

    def seconds(self, phase: str) -> float:
        """Return how long `phase` took when it was last made; until now, where it has not ended."""
        return self._ended.get(phase, time.monotonic()) - self._begun[phase]

    def write_training(
        self, step: int, values: Mapping[str, float], *, seconds: float, num_tokens: int, num_rows: int
    ) -> None:
        """Metrics of one optimizer step, with rates and peak memory added."""
        if self._writer is None:
            return
        rates = {"step_s": seconds, "tokens_per_s": num_tokens / seconds, "samples_per_s": num_rows / seconds}
        peaks = self._peaks.taken()
        self._writer.write(step, {**values, **rates, **peaks})
        if self._models:
            # Once, after a step: before it there are neither gradients nor moments.
            held = {name: model_memory(engine, self.device) for name, engine in self._models.items()}
            log.info("\n".join(memory_table(held, peaks)))
            self._models = {}
        self._progress.update(step, {name: values[name] for name in self.shown if name in values})

    def sync(self) -> None:
        """Before a checkpoint: no line of its past may be lost where it stays."""
        if self._writer is not None:
            self._writer.sync()


class Progress:
    """Progress on the terminal: a line that rewrites itself, or plain lines where the output is no terminal."""

    def __init__(self, label: str, *, total_steps: int, start_step: int, every: int, stream: Any = None) -> None:
        self.label, self.total, self.every = label, total_steps, every
        self.stream = stream or sys.stderr
        self._start = (start_step, time.monotonic())
        self._last_line = 0.0

    def update(self, step: int, shown: Mapping[str, float]) -> None:
        """Show `step` of the total, the given numbers, the rate and the time left."""
        if step % self.every and step != self.total:
            return
        start_step, start_time = self._start
        done, elapsed = step - start_step, time.monotonic() - start_time
        left = (self.total - step) * elapsed / done if done else 0.0
        numbers = "  ".join(f"{name} {readable(value)}" for name, value in shown.items())
        rate = f"{done / elapsed:.2f} steps/s" if elapsed else ""
        line = f"[{self.label}] {step}/{self.total}  {numbers}  {rate}  {duration(left)} left"
        if self.stream.isatty():
            self.stream.write(f"\r\x1b[2K{line}" + ("\n" if step == self.total else ""))
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def note(self, text: str) -> None:
        """A line of its own."""
        clear = "\r\x1b[2K" if self.stream.isatty() else ""
        self.stream.write(f"{clear}{text}\n")
        self.stream.flush()


def readable(value: float) -> str:
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"
