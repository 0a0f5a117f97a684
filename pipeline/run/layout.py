"""Layout of a run folder: the paths of its files, for the stages and for `rlhf train`. It imports no torch."""

import re
from pathlib import Path

from pipeline.files import RUN_LOCK

CHECKPOINT = re.compile(r"step-[0-9]+|\.step-[0-9]+\.old")
# Names that a start creates in a run's folder before `environment_file`. It also creates hidden files.
START_NAMES = {
    RUN_LOCK, "heartbeat", "outcome", "log", "log.txt", "auto_measure", "autotuning", "reference.safetensors",
    "deepspeed",
}  # fmt: skip


def outcome_file(run_dir: Path, rank: int) -> Path:
    """Return the file with how a rank ended (pipeline/run/outcome.py)."""
    return run_dir / "outcome" / f"rank-{rank}.json"


def beat_file(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's last heartbeat (pipeline/heartbeat.py)."""
    return run_dir / "heartbeat" / f"rank-{rank}.json"


def rank_log_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "log" / f"rank-{rank}.txt"


def lock_file(run_dir: Path) -> Path:
    """Return the file that names the process that runs in this folder (pipeline/run/lock.py)."""
    return run_dir / RUN_LOCK


def output_lock(folder: Path) -> Path:
    """Return the file that names the process that writes a model folder; beside it, because saving replaces it."""
    return folder.resolve().parent / f".{folder.resolve().name}.lock"


def environment_file(run_dir: Path) -> Path:
    """Return the file of a run's stage, versions, hardware and command, which it writes when its models are loaded."""
    return run_dir / "env.json"


def rows_file(run_dir: Path) -> Path:
    """Return the file that describes the rows that a run trains on: counts, lengths, examples."""
    return run_dir / "rows.json"


def meaning_file(run_dir: Path) -> Path:
    """Return the file with what a run is and what its metrics mean; a run writes it when its loop begins."""
    return run_dir / "meaning.json"


def row_values_file(run_dir: Path) -> Path:
    """Return the file of the values of held-out rows, with a line for each evaluation, to compare evaluations.

    `{"step": 40, "rows": "1f0c...", "every": 1, "weight": [12, 9], "eval_loss": [1.25, null]}`: index n of a list has
    the value of held-out row n * every, null if it has none. The order is that of the rows, not of ranks. `rows` is a
    hash of the data: lines with the same hash have the same rows. Without `weight` all rows weigh the same in the mean.
    There are at most MOST_ROWS values of a metric (`pipeline/run/evaluations.py`).
    """
    return run_dir / "row_values.jsonl"


def plan_file(run_dir: Path) -> Path:
    """Return the file of the plan that chose flags for a run; a run without a plan, as on a CPU, does not write it."""
    return run_dir / "plan.json"


def task_file(output: Path) -> Path:
    """Return the trial of a task in an output folder, which `rlhf reward --model` writes and the report shows."""
    return output / "task_trial.json"


def stages_folder(run_dir: Path) -> Path:
    """Return the output folder in which all stages have their runs, this one included; else the run's own folder."""
    return run_dir.parent.parent if run_dir.parent.name == "runs" else run_dir


def done_file(run_dir: Path) -> Path:
    """Return the file that a stage writes last when it has finished."""
    return run_dir / "done.json"


def step_number(checkpoint: Path) -> int:
    """Return the optimizer step in the name of a checkpoint's folder."""
    return int(checkpoint.name.strip(".").split("-")[1].split(".")[0])


def candidates(checkpoints: Path) -> list[Path]:
    """Return the checkpoint folders, newest first; one that is being replaced comes after its replacement."""
    folders = [path for path in checkpoints.glob("*") if CHECKPOINT.fullmatch(path.name)]
    return sorted(folders, key=lambda path: (step_number(path), path.name.startswith("step-")), reverse=True)
