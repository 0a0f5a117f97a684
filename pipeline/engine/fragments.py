"""Fragments of parameters on disk: each rank's part of a tensor, by the tensor's name and the part's position.

A reader requests a range of elements by name and position, whatever the number of ranks and the partitioning that wrote
it. So a checkpoint fits any number of ranks and any ZeRO stage. Files are safetensors: no pickle is read or written.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pipeline.errors import CheckpointError

# Data types of fragments, by their names in the header of a safetensors file.
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
PIECE = 2**24  # elements that are copied from a device at a time


@dataclass(frozen=True, slots=True)
class Fragment:
    """`values` (n,) are the elements start, ..., start + n - 1 of the flattened tensor `name`; usually a view."""

    name: str
    start: int
    values: torch.Tensor


def write_fragments(path: Path, fragments: list[Fragment]) -> None:
    """Write this rank's fragments, at most one of each name, as one safetensors file; the list is emptied meanwhile.

    It needs memory for a piece of one fragment besides the fragments; safetensors' own writer needs copies of all.

    Raises:
        OSError: the file cannot be written.
    """
    starts = {fragment.name: fragment.start for fragment in fragments}
    header: dict[str, Any] = {"__metadata__": {"starts": json.dumps(starts)}}
    end = 0
    for fragment in fragments:
        start, end = end, end + fragment.values.nbytes
        shape = list(fragment.values.shape)
        header[fragment.name] = {"dtype": CODES[fragment.values.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while fragments:
            for piece in fragments.pop(0).values.detach().split(PIECE):
                file.write(piece.cpu().contiguous().view(torch.uint8).numpy())


class FragmentReader:
    """A reader of any range of any tensor from the files that all ranks wrote."""

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
            CheckpointError: the files lack some of them.
        """
        filled = 0
        for begin, numel, opened in self._parts.get(name, ()):
            first, last = max(begin, start), min(begin + numel, start + len(out))
            if first < last:
                out[first - start : last - start].copy_(opened.get_slice(name)[first - begin : last - begin])
                filled += last - first
        if filled != len(out):
            raise CheckpointError(f"checkpoint: {name} has {filled} of the {len(out)} elements from {start} on")
