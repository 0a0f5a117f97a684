"""A rank's sign of life: phase and step in a small file, from which the supervisor tells a rank that hangs.

The loops call `beat`; outside a stage (in tests, in chat.py) it does nothing. Imports no torch.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.run.layout import beat_file
from pipeline.run.outcome import replace_json

Phase = Literal["start", "generate", "score", "train", "evaluate", "save"]
INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank was about when it last told; `time` is in seconds since 1970."""

    phase: str
    step: int
    time: float


@dataclass(slots=True)
class Heart:
    """Where this process writes its beats, and the last of them."""

    file: Path
    phase: Phase
    step: int
    written: float = 0.0


_heart: Heart | None = None


def start(run_dir: Path, rank: int) -> None:
    """From now on `beat` writes for this rank; the first phase is "start": reading data and models."""
    global _heart
    _heart = Heart(beat_file(run_dir, rank), "start", 0)
    with suppress(OSError):
        _heart.file.parent.mkdir(parents=True, exist_ok=True)
    write(_heart)


def end() -> None:
    """Tell the exact step at last; from now on `beat` does nothing."""
    global _heart
    if _heart:
        write(_heart)
    _heart = None


def beat(phase: Phase, step: int) -> None:
    """Say that this rank lives, in `phase` of `step`: at every call where the phase changes, else twice a second."""
    if _heart is None:
        return
    changed = phase != _heart.phase
    _heart.phase, _heart.step = phase, step
    if changed or time.monotonic() - _heart.written >= INTERVAL_S:
        write(_heart)


def current_phase() -> Phase:
    return _heart.phase if _heart else "start"


def write(heart: Heart) -> None:
    """A full disk must not end a run here: then the beat is lost, and the next one may be written."""
    heart.written = time.monotonic()
    with suppress(OSError):
        replace_json(heart.file, asdict(Beat(heart.phase, heart.step, time.time())))


def read_beat(run_dir: Path, rank: int) -> Beat | None:
    """The last sign of life of `rank`; None where there is none that can be read."""
    with suppress(OSError, ValueError, KeyError):
        content = json.loads(beat_file(run_dir, rank).read_text(encoding="utf-8"))
        return Beat(content["phase"], content["step"], content["time"])
    return None
