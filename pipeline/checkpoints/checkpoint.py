"""Resume checkpoints, written to and read from `<run_dir>/checkpoints/step-<n>/`.

A checkpoint is safetensors (fragments.py) and JSON, no pickle. Every rank writes its files to a temporary folder. Then
rank 0 adds the manifest (SHA-256 and size of every file) and renames the folder. So a run that is killed at any moment
keeps its earlier checkpoints, and damage is detected before anything is read.
"""

import json
import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline import dist
from pipeline.checkpoints.checkpoint_files import (
    delete_older,
    find,
    manifest_entry,
    problem_with,
    set_aside_newer,
    write_manifest,
)
from pipeline.checkpoints.fingerprint import RunFingerprint
from pipeline.configuration.rank_rules import BATCHES, ROLLOUT
from pipeline.configuration.resume_rules import check_resumed, defaults_of
from pipeline.configuration.stage import StageConfig
from pipeline.engine.build import compute_dtype
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.fragments import Fragment, FragmentReader, write_fragments
from pipeline.engine.state import counters, engine_fragments, restore_counters, restore_fragments
from pipeline.errors import CheckpointError, EnvironmentFault, InputError
from pipeline.files import GIB, cannot_write, flush, free_bytes, is_disk_trouble, replacing, write_json
from pipeline.heartbeat import result_of
from pipeline.run.host_storage import on_each_storage, unite
from pipeline.run.run import Run

log = logging.getLogger(__name__)

SHARED = "shared.safetensors"  # tensors that are the same on every rank
PACKAGES = ("torch", "deepspeed", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Content:
    """The state of a run, to be written to a checkpoint.

    state: counters, as JSON.
    engines: engines by role.
    fragments: further fragments of this rank, by name.
    tensors: tensors that are equal on all ranks.
    """

    state: Mapping[str, Any]
    engines: Mapping[str, TrainingEngine]
    fragments: Mapping[str, Iterable[Fragment]] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The content of a checkpoint besides its engines.

    state: counters.
    fragments: readers of further fragments, by name.
    tensors: tensors that are equal on all ranks.
    """

    state: dict[str, Any]
    fragments: dict[str, FragmentReader]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pending:
    """A checkpoint that is being written.

    step: optimizer step of the checkpoint.
    started: `time.monotonic()` when saving began.
    fresh: temporary folder that is written; it is renamed when it is complete.
    tensors: tensors that are equal on all ranks, in host memory.
    description: content of state.json.
    num_bytes: bytes of all ranks' files.
    written: future of the result of `write_rank_files`.
    """

    step: int
    started: float
    fresh: Path
    tensors: dict[str, torch.Tensor]
    description: dict[str, Any]
    num_bytes: int
    written: Future[tuple[dict[str, Any], str]]


class Saver:
    """The writer of a run's checkpoints; all methods are collectives.

    With `background`, training continues while files are written: their content is copied to host memory first. A later
    `poll` adds the manifest and renames the folder, once every rank has written its files.
    """

    def __init__(self, run: Run, fingerprint: RunFingerprint, *, keep: int, background: bool) -> None:
        self.run, self.fingerprint, self.keep, self.background = run, fingerprint, keep, background
        self._pool = ThreadPoolExecutor(1)
        self._pending: Pending | None = None

    def save(self, content: Content, *, step: int) -> None:
        """Write a checkpoint of `step` and delete all but the newest `keep` (0: write none).

        Raises:
            EnvironmentFault: a rank could not write; raised on every rank. Earlier checkpoints stay.
        """
        if self.keep == 0:
            return
        attempt(self.finish)
        started, device = time.monotonic(), self.run.world.device
        fresh = self.run.folder / "checkpoints" / f".step-{step}.writing"
        parts = {name: list(engine_fragments(engine)) for name, engine in content.engines.items()}
        parts |= {name: list(fragments) for name, fragments in content.fragments.items()}
        rank_bytes = float(sum(fragment.values.nbytes for fragments in parts.values() for fragment in fragments))
        needed = int(dist.sum_over_ranks(torch.tensor(rank_bytes, dtype=torch.float64, device=device)).item())
        needed += sum(tensor.nbytes for tensor in content.tensors.values())
        on_each_storage(lambda: make_folder(fresh, needed))
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in content.tensors.items()}
        if self.background:
            parts = {
                name: [
                    replace(fragment, values=fragment.values.detach().to("cpu", copy=True)) for fragment in fragments
                ]
                for name, fragments in parts.items()
            }
        description = {
            "step": step,
            "world_size": dist.world_size(),
            "dtype": compute_dtype(self.run),
            "state": content.state,
            "engines": {name: counters(engine) for name, engine in content.engines.items()},
            **asdict(self.fingerprint),
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "time": time.time(),
        }
        written = self._pool.submit(write_rank_files, fresh, parts)
        self._pending = Pending(step, started, fresh, tensors, description, needed, written)
        if not self.background:
            self.finish()

    def poll(self) -> None:
        """Complete a checkpoint in the background if every rank has written its files. Raises EnvironmentFault."""
        if self._pending:
            unfinished = float(not self._pending.written.done())
            if not dist.max_over_ranks(unfinished, self.run.world.device):
                self.finish()

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and complete it. Raises EnvironmentFault."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        result = result_of(pending.written)
        dist.meet()  # ranks may write at very different speeds
        results = dist.gather_objects(result)
        if problems := [problem for _, problem in results if problem]:
            on_each_storage(lambda: shutil.rmtree(pending.fresh, ignore_errors=True))
            raise EnvironmentFault(problems[0])
        files = {name: entry for entries, _ in results for name, entry in entries.items()}
        unite(pending.fresh)
        dist.on_main(lambda: seal(pending, files))
        unite(pending.fresh)
        on_each_storage(lambda: publish(pending, keep=self.keep))
        size, seconds = pending.num_bytes / GIB, time.monotonic() - pending.started
        log.info("checkpoint step-%d: %.3g GiB in %.1f s", pending.step, size, seconds)


def attempt(write: Callable[[], None]) -> bool:
    """Run `write`; if the disk refuses, log that and return False. Earlier checkpoints stay. A collective."""
    try:
        write()
    except EnvironmentFault as error:
        log.warning("not saved, training continues: %s", error)
        return False
    return True


def make_folder(fresh: Path, needed: int) -> None:
    """Create an empty folder on a disk with `needed` free bytes. Raises EnvironmentFault."""
    try:
        fresh.parent.mkdir(parents=True, exist_ok=True)
        for left in fresh.parent.glob(".step-*"):
            # Unfinished folders of a killed run; an .old one may be the only copy of its step.
            if not left.name.endswith(".old"):
                shutil.rmtree(left, ignore_errors=True)
        fresh.mkdir()
    except OSError as error:
        raise EnvironmentFault(cannot_write(fresh, error, needed=needed)) from error
    if needed > free_bytes(fresh):
        shutil.rmtree(fresh, ignore_errors=True)
        raise EnvironmentFault(cannot_write(fresh, "not enough room on the disk", needed=needed))


def write_rank_files(fresh: Path, parts: Mapping[str, list[Fragment]]) -> tuple[dict[str, Any], str]:
    """Write this rank's files; return their entries for the manifest, and a problem or an empty string."""
    entries = {}
    try:
        for name, fragments in parts.items():
            path = fresh / f"{name}.rank-{dist.rank()}.safetensors"
            write_fragments(path, fragments)
            flush(path)
            entries[path.name] = manifest_entry(path)
    except Exception as error:
        if not is_disk_trouble(error):
            raise
        problem = cannot_write(fresh, error)
        log.error("rank %d: %s", dist.rank(), problem)
        return entries, problem
    return entries, ""


def seal(pending: Pending, files: dict[str, Any]) -> None:
    """Write rank 0's files and the manifest. files: entries of all ranks' files.

    Raises:
        EnvironmentFault: the disk refused; the folder is deleted.
    """
    fresh = pending.fresh
    try:
        if pending.tensors:
            save_file(pending.tensors, fresh / SHARED)
        write_json(fresh / "state.json", pending.description)
        files |= {path.name: manifest_entry(path) for path in sorted(fresh.iterdir()) if path.name not in files}
        write_manifest(fresh, pending.step, files)
    except Exception as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if not is_disk_trouble(error):
            raise
        raise EnvironmentFault(cannot_write(fresh, error)) from error


def publish(pending: Pending, *, keep: int) -> None:
    """Rename a complete folder, and delete all but the newest `keep`. Raises EnvironmentFault."""
    final = pending.fresh.with_name(f"step-{pending.step}")
    with replacing(final, pending.fresh):
        pass
    delete_older(final.parent, keep)


def load(
    run: Run, engines: Mapping[str, TrainingEngine], fingerprint: RunFingerprint, *, reads_columns: bool = False
) -> Resumed | None:
    """Restore the engines from the checkpoint to resume from; return the rest of it, or None if there is none.

    A collective.

    Args:
        reads_columns: rewards read other columns of the data, or call functions: those of the checkpoint are compared.

    Raises:
        CheckpointError: the checkpoint is not usable. InputError: another run wrote it.
    """
    config: StageConfig = run.resolved.config
    if (resume := config.run.resumes_from) == "auto":
        unite(run.folder / "checkpoints")
    folder = dist.on_main(lambda: find(run.folder, resume))
    if folder is None:
        return None
    on_each_storage(lambda: check_whole(folder))
    saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    now = asdict(fingerprint)
    if not reads_columns:
        del now["columns"]
    if saved["fingerprints"].items() <= now["fingerprints"].items():
        del now["inputs"]  # their rows and models are the same
    check_resumed(folder, saved, now, config, force=config.run.force_resume)
    if (got := ", ".join(sorted(saved["engines"]))) != (expected := ", ".join(sorted(engines))):
        raise InputError(f"{folder}: got the state of {got}, expected that of {expected}: it is of another stage")
    log_differences(folder, saved, fingerprint.layout, config)
    if fingerprint.total_steps < (before := saved["total_steps"]):
        end = "ends at step %d, before it was to end at %d: learning rates follow the new end (--max-steps, epochs)"
        log.warning(end, fingerprint.total_steps, before)
    if resume != "auto":
        on_each_storage(lambda: set_aside_newer(run.folder / "checkpoints", saved["step"]))
    names = {path.name.split(".rank-")[0] for path in folder.glob("*.rank-*.safetensors")}
    readers = {name: FragmentReader(folder.glob(f"{name}.rank-*.safetensors")) for name in names}
    for name, engine in engines.items():
        restore_fragments(engine, readers.pop(name))
        restore_counters(engine, saved["engines"][name])
    shared = load_file(folder / SHARED) if (folder / SHARED).is_file() else {}
    return Resumed(saved["state"], readers, shared)


def check_whole(folder: Path) -> None:
    """Raise CheckpointError if this host's copy of a checkpoint is damaged; rank 0 has checked its own."""
    if not dist.is_main() and (problem := problem_with(folder)):
        raise CheckpointError(f"{problem} (on {socket.gethostname()}); delete {folder} there: it is copied again")


def log_differences(folder: Path, saved: dict[str, Any], layout: Mapping[str, Any], config: StageConfig) -> None:
    """Log the checkpoint and the differences that change the numbers of an uninterrupted run by rounding.

    The size of a rollout is compared among the checkpoint's "sizes", since several flags may set it.
    """
    log.info("resuming from %s (--overwrite starts over)", folder)
    in_force = {name: value for name, value in layout.items() if name not in (ROLLOUT, BATCHES)}
    now = {**in_force, "ranks": dist.world_size(), **{name: metadata.version(name) for name in PACKAGES}}
    before = defaults_of(config) | saved["settings"] | saved["layout"]
    then = before | {"ranks": saved["world_size"]} | saved["versions"]
    changed = [f"{name} {then.get(name)} -> {now[name]}" for name in sorted(now) if then.get(name) != now[name]]
    if changed:
        log.warning("resumed with other settings: %s; numbers are equal up to rounding", ", ".join(changed))
