"""Hashes that tell whether a resumed run reads the same data and starts from the same models."""

import hashlib
from pathlib import Path
from typing import Any

EDGE_BYTES = 1 << 20


def digest(path: Path) -> str:
    """SHA-256 of a file's content, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_fingerprint(rows: Any) -> str:
    """SHA-256 of the memory-mapped files of a `datasets.Dataset`: its samples in their order."""
    return hashlib.sha256("".join(digest(Path(file["filename"])) for file in rows.cache_files).encode()).hexdigest()


def model_fingerprint(name_or_path: str) -> str:
    """Of a model folder: its config, and size, head and tail of each weights file; of a hub id: the id.

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
