"""Fragments of parameters on disk: each rank's part of a tensor, by the tensor's name and the part's position.

A reader asks for a range of elements by name and position, for any number of ranks that wrote and any partitioning; so
a checkpoint fits another number of ranks and another ZeRO stage. Files are safetensors: no pickle is read or written.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Fragment:
    """`values` (n,) are the elements start, ..., start + n - 1 of the flattened tensor `name`; mostly a view."""

    name: str
    start: int
    values: torch.Tensor


def write_fragments(path: Path, fragments: Iterable[Fragment]) -> None:
    """Write this rank's fragments, at most one of each name, as one safetensors file.

    Raises:
        OSError, safetensors.SafetensorError: the file cannot be written.
    """
    tensors, starts = {}, {}
    for fragment in fragments:
        # A copy: safetensors refuses views that share memory, and training goes on while the file is written.
        tensors[fragment.name] = fragment.values.detach().to("cpu", copy=True).contiguous()
        starts[fragment.name] = fragment.start
    save_file(tensors, path, metadata={"starts": json.dumps(starts)})


class FragmentReader:
    """Reader of any range of any tensor from the files that all ranks wrote."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        for path in files:
            opened = safe_open(path, framework="pt")
            starts = json.loads((opened.metadata() or {})["starts"])
            for name, start in starts.items():
                numel = opened.get_slice(name).get_shape()[0]
                self._parts.setdefault(name, []).append((start, numel, opened))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (n,) with the elements start, ..., start + n - 1 of the flattened tensor `name`.

        Raises:
            CheckpointError: the files do not hold all of them.
        """
        filled = 0
        for begin, numel, opened in self._parts.get(name, ()):
            first, last = max(begin, start), min(begin + numel, start + len(out))
            if first < last:
                out[first - start : last - start].copy_(opened.get_slice(name)[first - begin : last - begin])
                filled += last - first
        if filled != len(out):
            raise CheckpointError(f"checkpoint: {name} has {filled} of the {len(out)} elements from {start} on")
