"""The metrics, samples and flags of a run, read back: for its last line, its model card, and plans.

Imports no torch.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.configuration.stage import Stage, StageConfig
from pipeline.files import read_object
from pipeline.run.layout import meaning_file

CUT = "eval_completions/truncated_fraction"
TINY = 1e-6  # below it a difference of two sums is rounding, and shown as 0
CUT_AT_FIRST = 0.5  # from this share on the limit is short for the model that training begins with


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that hold an evaluation, in order; null where a number was not finite."""
    # Most lines are of training steps: they are not parsed.
    return [json.loads(line) for line in metrics_lines(run_dir) if '"eval_' in line]


def comparable(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations of as many held-out rows as the last one: others, before other flags, are of other rows.

    One that does not say its number counts as one of these.
    """
    num_rows = lines[-1].get("eval_rows") if lines else None
    return [line for line in lines if line.get("eval_rows", num_rows) == num_rows]


def reached(run_dir: Path, stage: Stage, config: StageConfig) -> tuple[str, str]:
    """Return the first evaluation of a run and its last of as many rows in words; and by what it ends worse.

    `held-out perplexity 15.4 -> 5.1 (25 sequences)` and "", or two empty texts without an evaluation. A run that keeps
    its best model ends well.
    """
    lines, figures, worse = comparable(evaluations(run_dir)), list[str](), list[str]()
    titles = read_object(meaning_file(run_dir)).get("titles", {})
    for name, better in stage.reached.items():
        title = titles.get(name, name)
        if values := [math.nan if line[name] is None else line[name] for line in lines if name in line]:
            figures.append(f"{title} {without_rounding(values[0]):.4g} -> {without_rounding(values[-1]):.4g}")
            # NaN at the end is worse too.
            worse += [title] if better and values[0] == values[0] and not better * (values[-1] - values[0]) >= 0 else []
    if lines and lines[-1].get(CUT) == 1.0 and (lines[0].get(CUT) or 0.0) < CUT_AT_FIRST:
        worse.append("every answer is cut at --max_answer_seq_len")
    kind = stage.kind_of_rows(config).replace("prompts", "responses")  # of which a prompt may have several
    rows = f" ({lines[-1]['eval_rows']:g} {kind})" if figures and "eval_rows" in lines[-1] else ""
    return ", ".join(figures) + rows, "" if getattr(config, "keep_best", False) else ", ".join(worse)


def without_rounding(value: float) -> float:
    """Return 0 for a value as small as the rounding of a sum: a KL of a policy to itself, a margin of equal rewards."""
    return 0.0 if abs(value) < TINY else value


def all_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Return the samples of all evaluations, in order; [] where a stage writes none."""
    file = run_dir / "samples.jsonl"
    # Not splitlines: a sample may hold other characters that end a line to it. What has no end was cut short.
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of the last evaluation up to `step`, in order; [] where a stage writes none."""
    rows = [row for row in all_samples(run_dir) if row["step"] <= step]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def recorded_seconds(run_dir: Path) -> float:
    """Return the seconds from the first to the last metrics of the last run in a folder; 0 where there was none."""
    lines = metrics_lines(run_dir)
    with suppress(ValueError, LookupError):  # none, or a last one that was cut short
        return float(json.loads(lines[-1])["time"] - json.loads(lines[0])["time"])
    return 0.0


def memory_peaks(run_dir: Path) -> dict[str, float]:
    """Return the highest peaks of a run's steps in GiB: of each phase on a GPU, and `host_memory` of a process."""
    peaks: dict[str, float] = {}
    for line in metrics_lines(run_dir):
        for name, value in json.loads(line).items() if "_gib" in line else ():
            if name.startswith(("memory/", "host_memory")) and value is not None:
                phase = name.removeprefix("memory/").removesuffix("_gib")
                peaks[phase] = max(value, peaks.get(phase, 0.0))
    return peaks


def unfinished_answers(run_dir: Path) -> str:
    """Return how many answers of the last run's first rollout reached its limit, in words."""
    name, limit = CUT.removeprefix("eval_"), run_flags(run_dir).get("max_answer_seq_len")
    shares = (json.loads(line)[name] for line in metrics_lines(run_dir) if f'"{name}": ' in line)
    texts = (f"{one:.0%} of the last run's first ones reached its limit, {limit}" for one in shares if one is not None)
    return next(texts, "the first rollout logs how many reach that")


def run_flags(run_dir: Path) -> dict[str, Any]:
    """Return the flags of the last run in a folder; {} where there is none."""
    content = read_object(run_dir / "config.json")
    return {name: flag["value"] for name, flag in content.items() if isinstance(flag, dict) and "value" in flag}


def metrics_lines(run_dir: Path) -> list[str]:
    """Return the lines of a run's metrics.jsonl; none where it has not begun."""
    file = run_dir / "metrics.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
