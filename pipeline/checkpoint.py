"""Resume checkpoints: `<run_dir>/checkpoints/step-<n>/`, complete only when its manifest is there.

A checkpoint holds the DeepSpeed shards of each engine, counters as JSON, and further tensors as safetensors. It is
written beside, renamed, and its manifest (SHA-256 and size of every file) comes last; shards are pickles, so they are
read only after the manifest has been checked.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline import dist
from pipeline.earlier_runs import check_same_settings
from pipeline.engine import TrainingEngine
from pipeline.errors import CheckpointError, InputError
from pipeline.saving import flush, write_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `load` found: the folder, the stage's counters, and this rank's own tensors."""

    folder: Path
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def save(
    run_dir: Path,
    *,
    step: int,
    engines: Mapping[str, TrainingEngine],
    state: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    keep: int,
) -> None:
    """Write a checkpoint of `step` and delete all but the newest `keep` (0: write none); a collective.

    Args:
        state: counters, as JSON.
        tensors: of this rank (each rank writes its own file).
    """
    if keep == 0:
        return
    final = run_dir / "checkpoints" / f"step-{step}"
    fresh = final.with_name(f".step-{step}.writing")
    dist.on_main(lambda: prepare(fresh))
    for name, engine in engines.items():
        engine.save(fresh / name)
    if tensors:
        rank_file = fresh / f"tensors-rank-{dist.rank()}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, rank_file)
    dist.barrier()
    dist.on_main(lambda: commit(fresh, final, {"step": step, "world_size": dist.world_size(), **state}, keep))


def prepare(fresh: Path) -> None:
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)


def commit(fresh: Path, final: Path, state: Mapping[str, Any], keep: int) -> None:
    """Flush, write the manifest, rename, and only then delete what is older."""
    write_json(fresh / "state.json", state)
    files = sorted(path for path in fresh.rglob("*") if path.is_file())
    for path in files:
        flush(path)
    entries = {str(path.relative_to(fresh)): {"sha256": digest(path), "bytes": path.stat().st_size} for path in files}
    write_json(fresh / MANIFEST, {"files": entries})
    shutil.rmtree(final, ignore_errors=True)
    fresh.rename(final)
    flush(final.parent)
    for old in step_folders(final.parent)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_folders(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [path for path in checkpoints.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def problem_with(folder: Path) -> str | None:
    """Why this checkpoint must not be read, naming the file; None where it is whole."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return f"{folder / MANIFEST}: missing or unreadable"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"] or digest(path) != entry["sha256"]:
            return f"{path}: missing, cut short or changed since it was written"
    return None


def find(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint folder to continue from: `resume` is auto, never, or a folder.

    Raises:
        CheckpointError: there are checkpoints, or one was named, and none is whole.
        InputError: the named folder does not exist.
    """
    if resume == "never":
        return None
    if resume != "auto" and not Path(resume).is_dir():
        raise InputError(f"--resume {resume}: no such folder; wanted auto, never, or a checkpoint folder")
    candidates = step_folders(run_dir / "checkpoints") if resume == "auto" else [Path(resume)]
    problems = []
    for folder in candidates:
        problem = problem_with(folder)
        if problem is None:
            return folder
        problems.append(problem)
        log.warning("checkpoint passed over: %s", problem)
    if problems:
        raise CheckpointError(f"no usable checkpoint: {problems[0]}; --resume never starts afresh")
    return None


def load(
    run_dir: Path, resume: str, engines: Mapping[str, TrainingEngine], *, settings: Mapping[str, Any]
) -> Resumed | None:
    """Restore the engines from the newest whole checkpoint (or the one named); None where there is none. A collective.

    Raises:
        CheckpointError: written by another number of ranks, or not usable.
        InputError: written under other settings.
    """
    folder = dist.on_main(lambda: find(run_dir, resume))
    if folder is None:
        return None
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state["world_size"] != dist.world_size():
        raise CheckpointError(
            f"{folder}: written by {state['world_size']} ranks, this run has {dist.world_size()}; start as many"
        )
    check_same_settings(folder, state["settings"], json.loads(json.dumps(settings)))
    log.info("resuming from %s (--overwrite starts over)", folder)
    for name, engine in engines.items():
        engine.load(folder / name)
    rank_file = folder / f"tensors-rank-{dist.rank()}.safetensors"
    tensors = load_file(rank_file) if rank_file.is_file() else {}
    return Resumed(folder, state, tensors)
