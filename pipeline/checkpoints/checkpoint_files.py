"""Checkpoint folders on disk: list, check, choose and delete them. Other modules read their content."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.files import GIB, digest, read_object, write_json
from pipeline.run.earlier_runs import check_resume
from pipeline.run.layout import candidates, step_number

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 2  # increased when the meaning of the files changes
HASHING_THREADS = 8


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """Return `content` with the hash of itself, so that a changed manifest is detected as well."""
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def manifest_entry(path: Path) -> dict[str, Any]:
    return {"sha256": digest(path), "bytes": path.stat().st_size}


def write_manifest(folder: Path, step: int, files: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, with_checksum({"format": FORMAT, "step": step, "files": files}))


def delete_older(checkpoints: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; the next save completes a deletion that was interrupted."""
    for number, folder in enumerate(candidates(checkpoints)):
        if number >= keep or folder.name.endswith(".old"):
            shutil.rmtree(folder, ignore_errors=True)


def held_line(checkpoints: Path) -> str:
    """Return a line on the checkpoints of a finished run: names, size and purpose; "" if there are none."""
    if not (names := ", ".join(folder.name for folder in candidates(checkpoints))):
        return ""
    size = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    purpose = "a larger --max-steps continues from the newest; --keep-checkpoints 0 holds none"
    return f"{checkpoints} holds {names}, {size / GIB:.3g} GiB: {purpose}"


def set_aside_newer(checkpoints: Path, step: int) -> None:
    """Rename checkpoints after `step`, so that they are not resumed later: the run now continues from `step`."""
    for folder in candidates(checkpoints):
        if step_number(folder) > step:
            aside = folder.with_name(f"set-aside-{time.time_ns()}-{folder.name.strip('.')}")
            folder.rename(aside)
            log.warning("%s: newer than what is resumed; kept as %s", folder, aside.name)


def problem_with(folder: Path) -> str | None:
    """Return why this checkpoint must not be read, with the file's name; None if it is whole."""
    try:
        manifest = read_object(folder / MANIFEST)
        checksum = manifest.pop("sha256")
        if with_checksum(manifest)["sha256"] != checksum:
            return f"{folder / MANIFEST}: changed since it was written"
        if manifest["format"] != FORMAT:
            return f"{folder}: has format {manifest['format']}, this version reads {FORMAT}"
        entries = {name: {key: entry[key] for key in ("sha256", "bytes")} for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return f"{folder / MANIFEST}: missing or unreadable"
    # Readers open files by name, so the folder must have exactly the files of the manifest.
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    if odd := sorted(present.symmetric_difference(entries)):
        return f"{folder / odd[0]}: missing, or not in the manifest"

    def problem_of_file(name: str) -> str | None:
        path = folder / name
        try:
            whole = path.is_file() and manifest_entry(path) == entries[name]
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror}"
        return None if whole else f"{path}: missing, cut short or changed since it was written"

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return next((problem for problem in pool.map(problem_of_file, entries) if problem), None)


def find(run_dir: Path, resume: str) -> Path | None:
    """Return the checkpoint folder to resume from; `resume` is auto, never, or a folder.

    Raises:
        CheckpointError: checkpoints exist, or one was named, and none is whole.
        InputError: the named folder does not exist.
    """
    if resume == "never":
        return None
    check_resume(resume)
    for left in (run_dir / "checkpoints").glob(".step-*.writing"):
        log.warning("checkpoint skipped: %s: was never finished", left)
    folders = candidates(run_dir / "checkpoints") if resume == "auto" else [Path(resume)]
    return first_whole(folders, hint="; --resume never starts afresh")


def first_whole(folders: Iterable[Path], *, hint: str = "") -> Path | None:
    """Return the first checkpoint that is whole; None if there are no folders.

    Raises:
        CheckpointError: none is whole; the message names the first damage and ends in `hint`.
    """
    problems = []
    for folder in folders:
        problem = problem_with(folder)
        if problem is None:
            return folder
        problems.append(problem)
        log.warning("checkpoint skipped: %s", problem)
    if problems:
        raise CheckpointError(f"no usable checkpoint: {problems[0]}{hint}")
    return None
