"""The results of a run for its model card: evaluations with their errors, and a curve of training."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult

from pipeline.checkpoints.shared_names import code, data_name
from pipeline.run.evaluations import comparable, evaluations, metrics_of, standard_error
from pipeline.run.run import Run

MAX_POINTS = 10
BAR = 20  # characters of the longest bar


def evaluated(run: Run, step: int) -> list[dict[str, Any]]:
    """Return the first and the last evaluation up to `step`, of those on the same rows; [] without any."""
    lines = comparable(evaluations(run.folder, step))
    return [lines[0], lines[-1]] if lines else []


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the results of an evaluation, by their names."""
    names = (name for name in line if name.startswith("eval_") and not name.startswith("eval_rows"))
    return {name: line[name] for name in names if line[name] is not None}


def results(run: Run, step: int, task: str) -> list[EvalResult]:
    """Return the last evaluation up to `step` in the format of the hub's metadata."""
    data = run.resolved.config.data
    names = ", ".join(map(data_name, data.eval_data_path or data.data_path))
    about: dict[str, Any] = {"task_type": task, "dataset_type": "held-out", "dataset_name": names}
    return [
        EvalResult(**about, metric_type=name.removeprefix("eval_"), metric_value=value, metric_name=name)
        for line in evaluated(run, step)[1:]
        for name, value in numbers_of(line).items()
    ]


def evaluation_rows(run: Run, ends: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield each result of the last evaluation, beside that of the first one, with its standard error."""
    for name, value in numbers_of(ends[-1]).items():
        numbers = (ends[0].get(name), value, standard_error(run.folder, ends[-1], name))
        yield [code(name), *("" if number is None or number != number else f"{number:.4g}" for number in numbers)]


def curve(run: Run, step: int) -> tuple[str, list[list[str]]]:
    """Return a metric of training up to `step` and its means over at most MAX_POINTS parts, with bars; else "", []."""
    for name in (*(name.removeprefix("eval_") for name in run.stage.reached), "loss"):
        lines = metrics_of(run.folder, having=f'"{name}": '.encode())
        points = [(line["step"], line[name]) for line in lines if line["step"] <= step and line[name] is not None]
        if points:
            size = math.ceil(len(points) / MAX_POINTS)
            parts = [points[at : at + size] for at in range(0, len(points), size)]
            means = [statistics.fmean(value for _, value in part) for part in parts]
            low, extent = min(means), max(means) - min(means) or 1.0
            return name, [
                [f"{part[0][0]} to {part[-1][0]}", f"{mean:.4g}", "█" * (1 + round((BAR - 1) * (mean - low) / extent))]
                for part, mean in zip(parts, means, strict=True)
            ]
    return "", []
