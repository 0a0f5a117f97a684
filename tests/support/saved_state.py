"""The state of a checkpoint as a test wants it."""

import json
from pathlib import Path
from typing import Any

from pipeline.checkpoints.checkpoint_files import manifest_entry, write_manifest


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write state.json of `step-N`, and the manifest of all its files, which checks that they are whole."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "state.json").write_text(json.dumps(state))
    files = [file for file in checkpoint.iterdir() if file.name != "manifest.json"]
    step = int(checkpoint.name.removeprefix("step-"))
    write_manifest(checkpoint, step, {file.name: manifest_entry(file) for file in files})
