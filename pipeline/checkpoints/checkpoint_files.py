"""Checkpoint folders on disk: which are there, which are whole, which go. Imports no torch."""

import hashlib
import json
import logging
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, InputError
from pipeline.files import digest

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 2  # raised when what is in the files changes its meaning
HASHING_THREADS = 8
NAME = re.compile(r"step-[0-9]+|\.step-[0-9]+\.old")


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with the hash of itself, so that a changed manifest is found as well."""
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def drop_older(final: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints. One that is killed halfway through is deleted by the next save."""
    for number, folder in enumerate(candidates(final.parent)):
        if number >= keep or folder.name.endswith(".old"):
            shutil.rmtree(folder, ignore_errors=True)


def set_aside_newer(checkpoints: Path, step: int) -> None:
    """Rename checkpoints behind `step` that an earlier course of the run left, so that none is taken for this one's."""
    for folder in candidates(checkpoints):
        if step_number(folder) > step:
            aside = folder.with_name(f"set-aside-{time.time_ns()}-{folder.name.strip('.')}")
            folder.rename(aside)
            log.warning("%s: newer than what is resumed; kept as %s", folder, aside.name)


def step_number(folder: Path) -> int:
    return int(folder.name.strip(".").split("-")[1].split(".")[0])


def candidates(checkpoints: Path) -> list[Path]:
    """Checkpoint folders, newest first; one that was about to be replaced comes behind its successor."""
    paths = [*checkpoints.glob("step-*"), *checkpoints.glob(".step-*.old")]
    found = [path for path in paths if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (step_number(path), path.name.startswith("step-")), reverse=True)


def problem_with(folder: Path) -> str | None:
    """Why this checkpoint must not be read, naming the file; None where it is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        seal = manifest.pop("sha256")
        if sealed(manifest)["sha256"] != seal:
            return f"{folder / MANIFEST}: changed since it was written"
        if manifest["format"] != FORMAT:
            return f"{folder}: has format {manifest['format']}, this version reads {FORMAT}"
        entries = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return f"{folder / MANIFEST}: missing or unreadable"
    # Readers take files by their names: none may be there that was not checked, and none is looked for elsewhere.
    there = {path.name for path in folder.iterdir()} - {MANIFEST}
    if odd := sorted(there.symmetric_difference(entries)):
        return f"{folder / odd[0]}: missing, or not in the manifest"

    def wrong(name: str) -> str | None:
        path, (size, sha256) = folder / name, entries[name]
        try:
            whole = path.is_file() and path.stat().st_size == size and digest(path) == sha256
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror}"
        return None if whole else f"{path}: missing, cut short or changed since it was written"

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return next((problem for problem in pool.map(wrong, entries) if problem), None)


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
    for left in (run_dir / "checkpoints").glob(".step-*.writing"):
        log.warning("checkpoint passed over: %s: was never finished", left)
    problems = []
    for folder in candidates(run_dir / "checkpoints") if resume == "auto" else [Path(resume)]:
        problem = problem_with(folder)
        if problem is None:
            return folder
        problems.append(problem)
        log.warning("checkpoint passed over: %s", problem)
    if problems:
        raise CheckpointError(f"no usable checkpoint: {problems[0]}; --resume never starts afresh")
    return None
