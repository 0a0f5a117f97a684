"""Where a run keeps its files. Imports no torch, so that train.py knows the same places as the stages."""

from pathlib import Path

from pipeline.configuration.groups import RunConfig


def run_folder(run: RunConfig, stage: str) -> Path:
    """<run_dir>, or by design: <parent of output>/runs/<name> for steps 1 and 2, <output>/runs/ppo for step 3."""
    if run.run_dir:
        return Path(run.run_dir)
    output = Path(run.output_dir)
    return output / "runs" / "ppo" if stage == "ppo" else output.parent / "runs" / output.name


def outcome_file(run_dir: Path, rank: int) -> Path:
    """What a rank says about its end (pipeline/run/outcome.py)."""
    return run_dir / "outcome" / f"rank-{rank}.json"


def beat_file(run_dir: Path, rank: int) -> Path:
    """A rank's last sign of life (pipeline/run/heartbeat.py)."""
    return run_dir / "heartbeat" / f"rank-{rank}.json"


def rank_log_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "log" / f"rank-{rank}.txt"


def lock_file(run_dir: Path) -> Path:
    """Names the process that runs in this folder (pipeline/run/lock.py)."""
    return run_dir / "run.lock"


def done_file(run_dir: Path) -> Path:
    """Written last by a stage that came to its end."""
    return run_dir / "done.json"
