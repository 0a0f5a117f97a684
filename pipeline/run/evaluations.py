"""The metrics and flags of a run, read back: evaluations for its last line and its model card, peaks for a plan.

Imports no torch.
"""

import json
from pathlib import Path
from typing import Any


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that hold an evaluation, in order; null where a number was not finite."""
    # Most lines are of training steps: they are not parsed.
    return [json.loads(line) for line in metrics_lines(run_dir) if '"eval_' in line]


def memory_peaks(run_dir: Path) -> dict[str, float]:
    """Return the highest peaks of a run's steps in GiB: of each phase on a GPU, and `host_memory` of a process."""
    peaks: dict[str, float] = {}
    for line in metrics_lines(run_dir):
        for name, value in json.loads(line).items() if "_gib" in line else ():
            if name.startswith(("memory/", "host_memory")) and value is not None:
                phase = name.removeprefix("memory/").removesuffix("_gib")
                peaks[phase] = max(value, peaks.get(phase, 0.0))
    return peaks


def run_flags(run_dir: Path) -> dict[str, Any]:
    """Return the flags of the last run in a folder; {} where there is none."""
    file = run_dir / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {name: flag["value"] for name, flag in content.items()}


def metrics_lines(run_dir: Path) -> list[str]:
    """Return the lines of a run's metrics.jsonl; none where it has not begun."""
    file = run_dir / "metrics.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
