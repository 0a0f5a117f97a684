"""Run fingerprints: settings, data and start models that a resumed run must share with its checkpoint."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from pydantic import BaseModel

from pipeline.configuration.resume_rules import defaults_of, values_by_rule
from pipeline.files import digest

EDGE_BYTES = 1 << 20


def data_fingerprint(rows: Dataset) -> str:
    """Return the SHA-256 of the memory-mapped files of a dataset: its rows in their order."""
    return hashlib.sha256("".join(digest(Path(file["filename"])) for file in rows.cache_files).encode()).hexdigest()


def model_fingerprint(name_or_path: str) -> str:
    """Hash a model folder's config, and size, head and tail of each weights file; return a hub id as it is.

    Whole weights are not read: 7B parameters would take minutes on every start.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        return name_or_path
    total = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        total.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            total.update(file.read(EDGE_BYTES))
            file.seek(max(0, path.stat().st_size - EDGE_BYTES))
            total.update(file.read(EDGE_BYTES))
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class RunFingerprint:
    """The properties of a run that do not change while it lasts, and are compared when it is resumed.

    settings: flags that decide what is learnt. hashes: of data and start models. sizes: rows of an optimizer step and
    the like, over all ranks. rounding: flags that change numbers by rounding only; other values are logged.
    defaults: values assumed for flags that the checkpoint's version did not have.
    """

    settings: Mapping[str, Any]
    hashes: Mapping[str, str]
    sizes: Mapping[str, int]
    rounding: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def run_fingerprint(
    config: BaseModel, *, models: Mapping[str, str], data: Mapping[str, Dataset], sizes: Mapping[str, int]
) -> RunFingerprint:
    """Return the fingerprint of a run: start models are folders or hub ids; the keys are names for error messages."""
    hashes = {name: model_fingerprint(name_or_path) for name, name_or_path in models.items()}
    return RunFingerprint(
        settings=values_by_rule(config, "same"),
        hashes=hashes | {name: data_fingerprint(rows) for name, rows in data.items()},
        sizes=sizes,
        rounding=values_by_rule(config, "rounding"),
        defaults=defaults_of(config),
    )
