"""Record the metrics of a run: add times, rates and memory, write them, and print progress lines."""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeline.cache_memory import memory_of
from pipeline.configuration.run_flags import RunConfig
from pipeline.engine.build import weights_dtype
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.memory import Peaks, memory_table, model_memory
from pipeline.files import GIB
from pipeline.processes import peak_memory
from pipeline.run.evaluations import all_samples, metrics_of
from pipeline.run.run import Run
from pipeline.training.health import SAMPLER_ERROR, SAMPLER_ERROR_16_BITS, Health, History
from pipeline.training.meaning import write_meaning
from pipeline.training.metrics import Metric, MetricsWriter, metric_of, title_of
from pipeline.training.page import show_samples
from pipeline.training.progress import Progress, readable

log = logging.getLogger(__name__)


class Recorder:
    """Measures time and peak memory of phases on each rank; rank 0 writes metrics and progress lines."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        *,
        start_step: int,
        total_steps: int,
        metrics: Mapping[str, Metric],
        shown: Sequence[str] = ("loss",),
        models: Mapping[str, TrainingEngine | FrozenEngine] | None = None,
    ) -> None:
        """Open the files of metrics.

        Args:
            metrics: the declared metrics.
            shown: metrics in the progress line.
            models: engines whose memory is logged after the first step.

        Raises:
            KeyError: a metric of `shown` is not declared.
        """
        for name in shown:
            metric_of(name, metrics)
        self.shown, self._metrics = shown, metrics
        self.device, self._run = run.world.device, run
        self._models = dict(models or {})
        self._peaks = Peaks(self.device)
        self._phase = ""
        self._start_times: dict[str, float] = {}  # phase -> when it began last, by the monotonic clock
        self._end_times: dict[str, float] = {}  # phase -> when it ended; without the current phase
        self._writer: MetricsWriter | None = None
        if run.world.is_main:
            self._writer = MetricsWriter(
                run.folder,
                stage=run.stage.section,
                metrics=metrics,
                monitors=config.monitors,
                start_step=start_step,
            )
            every = config.print_steps if run.resolved.is_given("print_steps") else 0
            self._highest = 0.0  # GiB
            self._last_values: dict[str, float] = {}  # the last value of each metric
            self._spent = Counter[str]()  # seconds of each phase
            write_meaning(run, metrics, start_step=start_step, total_steps=total_steps)
            self._health = Health(history_of(run, total_steps=total_steps))
            self._progress = Progress(
                run.stage.section, total_steps=total_steps, start_step=max(start_step, 0), every=every
            )

    def write_evaluation(self, step: int, values: Mapping[str, float], rows: Mapping[str, Any] | None = None) -> None:
        """Write the metrics of an evaluation; rows: metric -> its value for each held-out row, for error bars."""
        if self._writer is not None and values:
            if rows:
                data = hashlib.sha256(json.dumps(self._run.contents, sort_keys=True).encode()).hexdigest()[:12]
                self._writer.write_rows(step, rows, data)
            self._note(step, values)
            titles = {name: title_of(name, self._metrics).removeprefix("held-out ") for name in values}
            named = {name: title for name, title in titles.items() if title != name} or titles
            parts = [f"{title} {readable(values[name])}" for name, title in named.items()]
            log.info("%s", f"[{self._writer.stage}] step {step}, held out: {'  '.join(parts)}")

    def show_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show samples of an evaluation (lines of samples.jsonl), and warn of problems that they show (health.py)."""
        if self._writer is not None:
            show_samples(self._writer.stage, step, rows)
            self._health.history.add_samples(rows)
            self._health.look()

    def _note(self, step: int, values: Mapping[str, float]) -> None:
        """Write metrics, and warn of problems that they show (health.py)."""
        if self._writer is not None:
            self._writer.write(step, values)
            if step > 0:  # in a progress line, a number from before training would look current
                self._last_values.update(values)
            self._health.history.add(step, values)
            self._health.look()

    def begin(self, phase: str) -> None:
        """End the current phase of the step and begin another (memory.PHASES), with its own time and peak memory."""
        now = self._peaks.begin(phase)
        self._end_times[self._phase] = now
        self._start_times[phase], self._phase = now, phase
        self._end_times.pop(phase, None)

    def seconds(self, phase: str) -> float:
        """Return the seconds of the last run of `phase`; if it has not ended, the seconds until now."""
        return self._end_times.get(phase, time.monotonic()) - self._start_times[phase]

    def write_training(
        self, step: int, values: Mapping[str, float], *, seconds: float, num_tokens: int, num_rows: int
    ) -> None:
        """Write metrics of one optimizer step, with rates and peak memory added."""
        if self._writer is None:
            return
        rates = {"step_s": seconds, "tokens_per_s": num_tokens / seconds, "samples_per_s": num_rows / seconds}
        peaks = self._peaks.taken()
        host = {"host_memory_gib": peak_memory() / GIB}
        self._note(step, {**values, **rates, **peaks, **host})
        if self._models and self.device.type == "cuda":
            # Once, after the first step: before it there are neither gradients nor moments.
            memory = {name: model_memory(engine, self.device) for name, engine in self._models.items()}
            log.info("\n".join(memory_table(memory, peaks)))
            self._models = {}
        numbers = {
            title_of(name, self._metrics): self._last_values[name] for name in self.shown if name in self._last_values
        }
        self._progress.update(step, numbers, peak=self._peak_memory(), split=self._split(values))

    def _peak_memory(self) -> str:
        """Return the highest peak so far: `31 of 80 GiB` for rank 0's GPU; on a CPU, the peak of the process."""
        if self.device.type != "cuda":
            return f"{self._last_values['host_memory_gib']:.3g} GiB"
        self._highest = max(self._highest, self._last_values["gpu_memory_gib"])
        return f"{self._highest:.3g} of {memory_of(self.device)[1] / GIB:.0f} GiB"

    def _split(self, values: Mapping[str, float]) -> str:
        """Return shares of the time so far, `sampling 62%, scoring 21%, updates 17%`, if steps have phases."""
        self._spent.update({name: value for name, value in values.items() if name.startswith("time/")})
        shares = ((title_of(name, self._metrics), spent / self._spent.total()) for name, spent in self._spent.items())
        return ", ".join(f"{title} {share:.0%}" for title, share in shares)

    def sync(self) -> None:
        """Flush all lines before a checkpoint, so that no line from before it can be lost."""
        if self._writer is not None:
            self._writer.sync()

    def close(self, exit_code: int) -> None:
        """Close the metric sinks after everything is saved. exit_code: the exit code of the run."""
        if self._writer is not None:
            self._writer.close(exit_code)

    def end_progress(self) -> None:
        """Remove the progress bar; metrics may still be written."""
        if self._writer is not None:
            self._progress.end()


def history_of(run: Run, *, total_steps: int) -> History:
    """Return the history of a run from its files, which end at the step that it resumes from."""
    bound = SAMPLER_ERROR if weights_dtype(run) == torch.float32 else SAMPLER_ERROR_16_BITS
    rate = run.stage.rate_flag(run.resolved.config)
    frozen = run.resolved.values.get("critic_warmup_steps", 0)
    history = History(total_steps, rate_flag=rate, frozen_steps=frozen, sampler_bound=bound)
    for line in metrics_of(run.folder):
        history.add(line["step"], line)
    if rows := all_samples(run.folder):
        history.add_samples([row for row in rows if row["step"] == rows[0]["step"]])
    return history
