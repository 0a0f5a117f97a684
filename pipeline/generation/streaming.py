"""Decoder layers that no rank holds whole in a rollout: each keeps a slice of all, and groups are gathered in turn.

A group of layers lies in one flat buffer of bytes, which is cut into equal slices, one a rank. Two buffers take turns:
while one group is computed with, the next one comes. Layers are views of these buffers, so their addresses stay. A pass
over the layers is a collective: ranks must make the same passes, whatever rows they have (`CommonPace`).

N ranks, L layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.dist import RankGroup
from pipeline.generation.fused_weights import BlockWeights, DecodeWeights, Held
from pipeline.generation.scheduler import Pace
from pipeline.models.architecture import Architecture
from pipeline.tensor_ops import round_up

# Bytes of the layers that are gathered at once; a larger layer is a group of its own.
GROUP_BYTES = 2**28
# Tensors begin at multiples of this many bytes, as matrix products want it.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor as it will be."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, buffer: Tensor, start: int) -> Tensor:
        """The tensor that begins at byte `start` of a flat uint8 buffer."""
        return buffer[start : start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers in one buffer. starts: for each of `layers` the first byte of each of its tensors."""

    layers: range
    starts: list[list[int]]
    num_bytes: int


def plan_groups(layers: Sequence[Sequence[Spec]], ranks: int, limit: int) -> list[LayerGroup]:
    """Cut L layers into groups of as many as fit in `limit` bytes, at least one; each fills whole slices of N ranks."""
    sizes = [sum(round_up(spec.num_bytes, ALIGNMENT) for spec in layer) for layer in layers]
    groups: list[LayerGroup] = []
    first = 0
    while first < len(layers):
        last = first + 1
        while last < len(layers) and sum(sizes[first : last + 1]) <= limit:
            last += 1
        starts: list[list[int]] = []
        place = 0
        for layer in layers[first:last]:
            starts.append([])
            for spec in layer:
                starts[-1].append(place)
                place += round_up(spec.num_bytes, ALIGNMENT)
        groups.append(LayerGroup(range(first, last), starts, round_up(place, ranks * ALIGNMENT)))
        first = last
    return groups


class Ring:
    """The memory of streamed layers: this rank's slice of each group, and the buffers that groups are gathered in."""

    def __init__(self, groups: Sequence[LayerGroup], ranks: RankGroup, device: torch.device) -> None:
        self._ranks, sizes = ranks, [group.num_bytes for group in groups]
        slices = [size // ranks.size for size in sizes]
        kept = torch.zeros(sum(slices), dtype=torch.uint8, device=device)
        buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in groups[:2]]
        self.num_bytes = sum(len(memory) for memory in (kept, *buffers))
        self._slices = kept.split(slices)
        self._wholes = [buffers[number % 2][:size] for number, size in enumerate(sizes)]
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def whole(self, number: int) -> Tensor:
        """(bytes of the group,) where group `number` lies when it is whole; the group after the next lies there too."""
        return self._wholes[number]

    def keep(self, number: int) -> None:
        """Group `number` has been written whole: keep this rank's slice of it."""
        self._slices[number].copy_(self._wholes[number].chunk(self._ranks.size)[self._ranks.rank])

    def turns(self) -> Iterator[int]:
        """The groups in order, each whole until the next one is asked for. A collective."""
        self._begin(0)
        for number in range(len(self._wholes)):
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            # The buffer of the next group is that of the last one, whose work has been handed in.
            if number + 1 < len(self._wholes):
                self._begin(number + 1)
            yield number

    def _begin(self, number: int) -> None:
        """Gather a group, on a GPU beside what runs there. A stream that forks and joins may be captured in a graph."""
        if self._side is None:
            self._ranks.gather(self._wholes[number], self._slices[number])
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._ranks.gather(self._wholes[number], self._slices[number])


class StreamedWeights(DecodeWeights):
    """Weights of a decode step whose layers' projections are shared among `ranks`, and gathered as a pass needs them.

    What lies outside the layers is whole on each rank, and so are the norms: one is read while the group before its own
    is in use. Memory is taken at the first `refresh`.
    """

    def __init__(self, architecture: Architecture, ranks: RankGroup) -> None:
        super().__init__(architecture)
        self.ranks = ranks
        self._specs = [specs_of(block) for block in self.blocks]
        self.groups = plan_groups(self._specs, ranks.size, GROUP_BYTES)
        self._ring: Ring | None = None

    def refresh(self) -> None:
        """Read the trained weights, a layer at a time: each passes through the place where its group will lie."""
        outside, *layers = self._sources
        self._read(*outside)
        if self._ring is None:
            self._ring = self._made(self.of(self.architecture.head).device)
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                self._read(*layers[layer])
            self._ring.keep(number)

    def _made(self, device: torch.device) -> Ring:
        """Buffers, and the layers' tensors as views of them."""
        ring = Ring(self.groups, self.ranks, device)
        for number, group in enumerate(self.groups):
            for layer, starts in zip(group.layers, group.starts, strict=True):
                for held, spec, start in zip(streamed(self.blocks[layer]), self._specs[layer], starts, strict=True):
                    held.lie_in(spec.view(ring.whole(number), start))
        return ring

    def in_turn(self) -> Iterator[BlockWeights]:
        assert self._ring is not None, "refresh() comes first"
        for number in self._ring.turns():
            for layer in self.groups[number].layers:
                yield self.blocks[layer]

    @property
    def slice_bytes(self) -> int:
        """This rank's part of all layers."""
        return sum(group.num_bytes for group in self.groups) // self.ranks.size

    @property
    def ring_bytes(self) -> int:
        """The group in use and the next one."""
        return len(self.groups[:2]) * max(group.num_bytes for group in self.groups)

    @property
    def whole_bytes(self) -> int:
        """What each rank holds whole."""
        outside, *layers = self._sources
        norms = [p for block in self.blocks for norm in block.norms for p in norm.parameters]
        return sum(spec_of([parameter]).num_bytes for parameter in [*outside[0], *norms])

    @property
    def num_bytes_to_copy(self) -> int:
        return self.slice_bytes + self.ring_bytes + self.whole_bytes

    @property
    def num_copied_bytes(self) -> int:
        moving = {id(held) for block in self.blocks for held in streamed(block)}
        own = sum(held.num_bytes for held in self._held() if id(held) not in moving)
        return own if self._ring is None else own + self._ring.num_bytes


def streamed(block: BlockWeights) -> list[Held]:
    """The tensors of a layer that are gathered: its projections."""
    return [held for projection in block.projections for held in projection.held]


def specs_of(block: BlockWeights) -> list[Spec]:
    """What `streamed` will hold, known before anything is gathered."""
    return [spec_of(joined) for projection in block.projections for joined in projection.parameters]


def spec_of(parameters: Sequence[Any]) -> Spec:
    """Whole parameters, joined along their first dimension."""
    shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in parameters]
    return Spec((sum(shape[0] for shape in shapes), *shapes[0][1:]), parameters[0].dtype)


class CommonPace(Pace):
    """Ranks that gather their layers together: what one of them does, all do."""

    def __init__(self, weights: StreamedWeights, device: torch.device) -> None:
        self._weights, self._device = weights, device

    def most(self, *wanted: int) -> Sequence[int]:
        return self._weights.ranks.largest(torch.tensor(wanted, dtype=torch.int64, device=self._device)).tolist()

    def take_part(self) -> None:
        for _ in self._weights.in_turn():
            pass
