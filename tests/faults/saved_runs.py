"""A checkpoint of a small engine without DeepSpeed, and every file operation of its save made visible."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import forks
from torch import nn

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import RunFingerprint
from pipeline.engine import fragments
from step1_sft.config import SFTConfig

OS_CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")
FINGERPRINT = RunFingerprint(settings={"seed": 1}, fingerprints={"data": "abc"}, sizes={"rows": 8}, layout={})


def make_engine() -> Any:
    """What checkpoint.py asks of a TrainingEngine at stage 0, with one AdamW step taken."""
    torch.manual_seed(0)
    module = nn.Linear(16, 8)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    counts = SimpleNamespace(global_steps=1, global_samples=2, micro_steps=1, skipped_steps=0)
    return SimpleNamespace(
        module=module, optimizer=optimizer, partitions_weights=False, partitions_optimizer=False, deepspeed=counts
    )


def make_run(folder: Path) -> Any:
    resolved = SimpleNamespace(config=SFTConfig(deepspeed={"dtype": "fp32"}))
    return SimpleNamespace(folder=folder, resolved=resolved, world=SimpleNamespace(device=torch.device("cpu")))


def save(folder: Path, engine: Any, step: int, *, keep: int = 1, background: bool = False) -> None:
    """A checkpoint with all kinds of files."""
    content = checkpoint.Content(
        state={"step": step},
        engines={"model": engine},
        fragments={"average": [fragments.Fragment("weight", 0, torch.full((64,), float(step)))]},
        tensors={"responses/order": torch.arange(8) + step},
    )
    saver = checkpoint.Saver(make_run(folder), FINGERPRINT, keep=keep, background=background)
    saver.save(content, step=step)
    saver.finish()


@contextmanager
def operations_watched(before: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """While open, `before(name, arguments)` is called ahead of each write, flush, rename and removal."""

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any, **further: Any) -> Any:
            before(name, given)
            return call(*given, **further)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in OS_CALLS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        patch.setattr(Path, "write_bytes", watched("write_bytes", Path.write_bytes))
        for name in ("save_file", "write_fragments"):
            patch.setattr(checkpoint, name, watched(name, getattr(checkpoint, name)))
        yield


def count_operations(folder: Path, engine: Any) -> list[str]:
    """The names of all operations of saving step 2 where step 1 is there and one checkpoint is kept."""
    names: list[str] = []
    shutil.rmtree(folder, ignore_errors=True)
    save(folder, engine, 1)
    with operations_watched(lambda name, given: names.append(name)):
        save(folder, engine, 2)
    return names


def save_killed(folder: Path, at: int, *, half: bool) -> int:
    """In a child: save step 2 and SIGKILL itself ahead of operation `at`, with `half` of a file's write done.

    The child is one of a small server: pytest's process may be too large to fork.
    """
    return forks.exit_code([forks.start(save_and_die, folder, at, half)])


def save_and_die(folder: Path, at: int, half: bool) -> None:
    seen = 0

    def before(name: str, given: tuple[Any, ...]) -> None:
        nonlocal seen
        if seen == at:
            if half and name in ("write_bytes", "save_file", "write_fragments"):
                with Path(given[1] if name == "save_file" else given[0]).open("wb") as file:
                    file.write(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    with operations_watched(before):
        save(folder, make_engine(), 2)
