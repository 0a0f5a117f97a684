"""What a model card says of a run's results: evaluations with their errors, a curve of training, samples."""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from huggingface_hub import EvalResult

from pipeline.checkpoints.shared_names import code, data_name, fenced, table
from pipeline.run.evaluations import comparable, evaluations, metrics_lines, samples, standard_error, verdict
from pipeline.run.run import Run

MAX_POINTS = 10
BAR = 20  # characters of the longest bar
NUM_SAMPLES = 3


def evaluated(run: Run, step: int) -> list[dict[str, Any]]:
    """Return the first and the last evaluation up to `step` that are comparable; [] without any."""
    lines = comparable(evaluations(run.folder, step))
    return [lines[0], lines[-1]] if lines else []


def results(run: Run, step: int, task: str) -> list[EvalResult]:
    """Return the last evaluation up to `step` as the hub's metadata have it."""
    data = run.resolved.config.data
    names = ", ".join(map(data_name, data.eval_data_path or data.data_path))
    about: dict[str, Any] = {"task_type": task, "dataset_type": "held-out", "dataset_name": names}
    last = evaluated(run, step)[-1:]
    return [
        EvalResult(**about, metric_type=name.removeprefix("eval_"), metric_value=value, metric_name=name)
        for line in last
        for name, value in line.items()
        if is_result(name) and value is not None
    ]


def is_result(name: str) -> bool:
    return name.startswith("eval_") and not name.startswith("eval_rows")


def evaluation_table(run: Run, step: int) -> list[str]:
    """Return the paragraphs of the evaluations of held-out rows up to `step`; [] where there was none."""
    if not (lines := evaluated(run, step)):
        return []
    first, last = lines
    rows = []
    for name, value in last.items():
        if is_result(name) and value is not None:
            numbers = (first.get(name), value, standard_error(run.folder, last, name))
            shown = ["" if number is None or number != number else f"{number:.4g}" for number in numbers]
            rows.append([code(name), *shown])
    number = f"{last['eval_rows']:g} " if "eval_rows" in last else ""
    heading = ("metric", f"step {first['step']}", f"step {last['step']}", "standard error")
    said = f" From step to step: {words}." if (words := verdict(run.folder, step=step).words) else ""
    return [
        "## Evaluation",
        f"Measured on {number}held-out rows; the standard errors are those of the last column.{said}",
        table(heading, rows),
    ]


def curve(run: Run, step: int) -> list[str]:
    """Return the paragraphs of one metric of training up to `step`: its means over at most MAX_POINTS parts."""
    for name in (*(name.removeprefix("eval_") for name in run.stage.reached), "loss"):
        lines = [json.loads(line) for line in metrics_lines(run.folder) if f'"{name}": ' in line]
        points = [(line["step"], line[name]) for line in lines if line["step"] <= step and line[name] is not None]
        if points:
            size = math.ceil(len(points) / MAX_POINTS)
            parts = [points[at : at + size] for at in range(0, len(points), size)]
            means = [statistics.fmean(value for _, value in part) for part in parts]
            rows = [
                [f"{part[0][0]} to {part[-1][0]}", f"{mean:.4g}", bar(mean, means)]
                for part, mean in zip(parts, means, strict=True)
            ]
            return ["## Training", table(("steps", f"mean of {code(name)}", "from the lowest to the highest"), rows)]
    return []


def bar(value: float, values: Sequence[float]) -> str:
    """Return a bar for a value: one character for the lowest of `values`, BAR for the highest."""
    low, high = min(values), max(values)
    return "█" * (1 + round((BAR - 1) * (value - low) / (high - low or 1.0)))


def sample_blocks(run: Run, step: int) -> list[str]:
    """Return the paragraphs of the first samples of the last evaluation up to `step`; [] where a stage has none."""
    parts = []
    for row in samples(run.folder, step)[:NUM_SAMPLES]:
        end = "ended by itself" if row["finished"] else "cut at its limit"
        facts = "".join(
            f"{name} {row[name.lower()]:.4g}, " for name in ("score", "KL") if row.get(name.lower()) is not None
        )
        parts += ["Prompt:", fenced(row["prompt"]), f"Answer ({facts}{row['tokens']} tokens, {end}):"]
        parts.append(fenced(row["response"]))
    return ["## Samples", "Answers to the first held-out prompts, at the last evaluation.", *parts] if parts else []
