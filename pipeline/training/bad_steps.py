"""Steps that changed nothing because a number was not finite: said, written down with their rows, and limited."""

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pipeline.errors import DivergedError
from pipeline.files import tolerated

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
