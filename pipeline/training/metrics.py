"""Metrics: their declarations, and their output to `metrics.jsonl` and, by flag, to monitors (sinks.py).

Each stage declares its own metrics in its metrics.py. A name that neither that file nor this one declares is an error.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pipeline.files import flush, tolerated, write_text
from pipeline.run.evaluations import row_values_line
from pipeline.run.layout import row_values_file
from pipeline.training.sinks import SINKS, Sink

log = logging.getLogger(__name__)

SAMPLES_SHOWN = 8  # samples of an evaluation that monitors show

Unit = Literal[
    "nats", "score", "squared score", "number", "share", "points", "tokens", "rows", "steps", "epochs",
    "s", "tokens/s", "rows/s", "GiB",
]  # fmt: skip
MetricGroup = Literal["objective", "policy", "value", "completions", "optimizer", "progress", "speed", "memory"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of a metric.

    meaning: definition, with the reduction over rows and ranks.
    unit: unit of the number.
    group: group of metrics that it is shown in.
    better: 1 if higher is better, -1 if lower is better, 0 if neither.
    title: name in words for users; empty: the name itself.
    """

    meaning: str
    unit: Unit = "nats"
    group: MetricGroup = "objective"
    better: Literal[-1, 0, 1] = -1
    title: str = ""


# Metrics of every stage. `eval_` in front of a name: the same on held-out rows.
SHARED: dict[str, Metric] = {
    "epoch": Metric("passes over the training rows so far", "epochs", "progress", better=0),
    "num_tokens": Metric("real tokens that went through training so far, all ranks", "tokens", "progress", better=0),
    "skipped_updates": Metric("steps so far that changed nothing: gradient or loss not finite", "steps", "progress"),
    "eval_rows": Metric(
        "held-out rows (stage 3: responses) of an evaluation", "rows", "progress", better=0, title="held-out rows"
    ),
    "micro_batch_size": Metric(
        "rows (stage 2: pairs) of a micro-batch on each rank in force at this step: that of the flags unless an "
        "out-of-memory error has halved it",
        "rows",
        "progress",
        better=0,
    ),
    "step_s": Metric("seconds of the step", "s", "speed", title="time of a step"),
    "tokens_per_s": Metric(
        "real tokens of the step (stage 3: with prompts and ptx), all ranks",
        "tokens/s",
        "speed",
        better=1,
        title="tokens per second",
    ),
    "samples_per_s": Metric(
        "rows of the step (stage 3: real responses), all ranks", "rows/s", "speed", better=1, title="rows per second"
    ),
    "mfu": Metric(
        "matrix work of the step's forward and backward passes on real tokens (stage 3: of the update's), without "
        "gradients of frozen weights, over what the devices could do; absent where unknown",
        "share",
        "speed",
        better=1,
        title="model FLOPs utilisation",
    ),
    "gpu_memory_gib": Metric(
        "peak memory allocated on rank 0's device since the last line", "GiB", "memory", title="peak GPU memory"
    ),
    "gpu_reserved_gib": Metric("peak memory that torch's allocator held there, in whole blocks", "GiB", "memory"),
    "host_memory_gib": Metric(
        "peak resident memory of rank 0's process since it was started", "GiB", "memory", title="peak host memory"
    ),
    "memory/train_gib": Metric("peak memory allocated there during the update; GPU only", "GiB", "memory"),
}
# Metrics of the stages that train one model on rows.
SUPERVISED: dict[str, Metric] = SHARED | {
    "loss": Metric(
        "training loss of the step: the mean over all trained tokens (stage 2: pairs) of all ranks",
        title="training loss",
    ),
    "eval_loss": Metric("mean loss over all held-out tokens (stage 2: pairs)", title="held-out loss"),
    "grad_norm": Metric(
        "L2 norm of the whole gradient before clipping", "number", "optimizer", better=0, title="gradient norm"
    ),
    "learning_rate": Metric(
        "rate of the first parameter group in this step", "number", "optimizer", better=0, title="learning rate"
    ),
}


def metric_of(name: str, metrics: Mapping[str, Metric]) -> Metric:
    """Return the metric of a name, which may begin with `eval_`. Raises KeyError if it is not declared."""
    metric = metrics.get(name) or metrics.get(name.removeprefix("eval_"))
    if metric is None:
        raise KeyError(f"metric {name!r} is declared neither in pipeline/training/metrics.py nor in its stage's")
    return metric


def title_of(name: str, metrics: Mapping[str, Metric]) -> str:
    """Return the title of a metric, with `held-out` in front for held-out rows; without a title, its name."""
    if name not in metrics and (base := metric_of(name, metrics).title):
        return f"held-out {base}"
    return metric_of(name, metrics).title or name


class MetricsWriter:
    """Appends metrics of one stage to its sinks; created on rank 0 only. A failing sink never ends the run."""

    def __init__(
        self, run_dir: Path, *, stage: str, metrics: Mapping[str, Metric], monitors: Iterable[str], start_step: int
    ) -> None:
        self.stage, self._metrics = stage, metrics
        self.path = run_dir / "metrics.jsonl"
        for file in (self.path, run_dir / "samples.jsonl", row_values_file(run_dir)):
            truncate_to_step(file, start_step, lambda line: json.loads(line)["step"])
        truncate_to_step(run_dir / "metrics.csv", start_step, lambda line: int(line.partition(",")[0]))
        self._jsonl = self.path.open("a", encoding="utf-8")
        self._samples = run_dir / "samples.jsonl"
        self._seen = self._samples.stat().st_size if self._samples.is_file() else 0  # bytes of it
        self._sinks: dict[str, Sink] = {}
        for name in dict.fromkeys(monitors):
            try:
                self._sinks[name] = SINKS[name](run_dir, stage, start_step)
                self._sinks[name].declare(charts_of(metrics))
            except Exception as error:
                log.warning("%s: not available, training continues without it: %s", name, error)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line for `step`. Names must be declared; numbers that are not finite become null."""
        for name in values:
            metric_of(name, self._metrics)
        clean = {name: finite(value) for name, value in values.items()}
        line = {"stage": self.stage, "step": step, "time": round(time.time(), 3), **clean}
        with tolerated("metrics"):
            self._jsonl.write(json.dumps(line) + "\n")
            self._jsonl.flush()
        samples = self._new_samples() if any(name.startswith("eval_") for name in values) else []
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(step, clean)
                sink.show(step, samples)
            except Exception as error:
                del self._sinks[name]
                log.warning("a metrics sink failed and is left out from here on: %s", error)

    def write_rows(self, step: int, values: Mapping[str, Sequence[float]], rows: str) -> None:
        """Append the values of an evaluation's rows to their file. Arguments: see `row_values_line`."""
        with tolerated("values of held-out rows"), row_values_file(self.path.parent).open("a") as file:
            file.write(row_values_line(step, values, rows))

    def _new_samples(self) -> list[dict[str, Any]]:
        """Return the first samples that the current evaluation has added to samples.jsonl, if any."""
        samples: list[dict[str, Any]] = []
        with tolerated("samples"), suppress(FileNotFoundError), self._samples.open("rb") as file:
            file.seek(self._seen)
            samples = [json.loads(line) for line in islice(file, SAMPLES_SHOWN)]
            self._seen = file.seek(0, os.SEEK_END)
        return samples

    def sync(self) -> None:
        """Flush everything written so far to the disk, before a checkpoint."""
        with tolerated("metrics"):
            os.fsync(self._jsonl.fileno())
            for sink in self._sinks.values():
                sink.sync()
            for file in filter(Path.is_file, (self._samples, row_values_file(self.path.parent))):
                flush(file)

    def close(self, exit_code: int) -> None:
        """Close the sinks. exit_code: the exit code of the run."""
        for name, sink in self._sinks.items():
            try:
                sink.close(exit_code)
            except Exception as error:
                log.warning("%s: the end of the run was not logged: %s", name, error)


def charts_of(metrics: Mapping[str, Metric]) -> dict[str, dict[str, list[str]]]:
    """Return group -> title of a chart -> its metrics, on training and on held-out rows."""
    charts: dict[str, dict[str, list[str]]] = {}
    for name, metric in metrics.items():
        if not (name.startswith("eval_") and name.removeprefix("eval_") in metrics):
            charts.setdefault(metric.group, {})[metric.title or name] = [name, f"eval_{name.removeprefix('eval_')}"]
    return charts


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def truncate_to_step(path: Path, step: int, step_of: Callable[[str], int]) -> None:
    """Drop the lines after `step` (-1: all lines) and an incomplete last line; the run writes them again."""
    if not path.exists():
        return
    # splitlines would also split at other characters, which a sample may contain.
    lines = [f"{line}\n" for line in path.read_bytes().decode(errors="replace").split("\n")]
    valid = [line for line in lines[:-1] if step >= 0 and is_up_to(line, step, step_of)]
    if len(valid) < len(lines):
        write_text(path, "".join(valid))


def is_up_to(line: str, step: int, step_of: Callable[[str], int]) -> bool:
    try:
        return step_of(line) <= step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
