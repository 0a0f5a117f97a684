"""The evaluations that a run has logged, read back for its last line and its model card. Imports no torch."""

import json
from pathlib import Path
from typing import Any


def evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that hold an evaluation, in order; null where a number was not finite."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    # Most lines are of training steps: they are not parsed.
    return [json.loads(line) for line in lines if '"eval_' in line]
