"""Streamed weights of the fused backend: layers are sharded over ranks, and gathered group by group for each pass.

A group of layers is one flat buffer of bytes, sharded into equal slices, one per rank. Two buffers alternate: one group
computes while the next is gathered. A forward pass is a collective (`StreamingLockstep`). N ranks, L layers.
"""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeline.cache_memory import memory_of
from pipeline.dist import RankGroup
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.generation.device_work import Lockstep, SideStream
from pipeline.generation.forwards.fused_weights import BlockWeights, LayerGroup, SlicedWeights, streamed_tensors
from pipeline.models.decoders.architecture import Architecture

log = logging.getLogger(__name__)


def view_of_bytes(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the tensor of the shape and type of `like` that begins at byte `start` of a flat uint8 buffer."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


class GatherBuffers:
    """The memory of streamed layers: this rank's slice of each group, and two buffers for gathered groups."""

    def __init__(self, groups: Sequence[LayerGroup], ranks: RankGroup, device: torch.device) -> None:
        self._ranks, sizes = ranks, [group.num_bytes for group in groups]
        slice_sizes = [size // ranks.size for size in sizes]
        slices = torch.zeros(sum(slice_sizes), dtype=torch.uint8, device=device)
        buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=device) for _ in groups[:2]]
        self.num_bytes = sum(len(memory) for memory in (slices, *buffers))
        self._slices = slices.split(slice_sizes)
        self._wholes = [buffers[number % 2][:size] for number, size in enumerate(sizes)]
        self._side = SideStream(device)

    def whole(self, number: int) -> Tensor:
        """Return the buffer (bytes,) of group `number`; the group after the next one shares it."""
        return self._wholes[number]

    def store_slice(self, number: int) -> None:
        """Copy this rank's slice out of the buffer of group `number`, which must be complete."""
        self._slices[number].copy_(self._wholes[number].chunk(self._ranks.size)[self._ranks.rank])

    def gathered_groups(self) -> Iterator[int]:
        """Yield the groups in order, each gathered until the next one is requested. A collective."""
        self._gather(0)
        for number in range(len(self._wholes)):
            self._side.synchronize()
            # The next group overwrites the group before this one, whose work has been enqueued.
            if number + 1 < len(self._wholes):
                self._gather(number + 1)
            yield number

    def _gather(self, number: int) -> None:
        """Gather a group, on a GPU on a side stream, which a CUDA graph captures as a fork and a join."""
        with self._side.enqueuing():
            self._ranks.gather(self._wholes[number], self._slices[number])


class StreamedWeights(SlicedWeights):
    """Decode weights whose projections are sharded over `ranks`, and gathered as a forward pass reads them.

    Embeddings, head and norms are whole on each rank, since a layer's norm is read while the group before is in use.
    The first `refresh` allocates the memory.
    """

    def __init__(self, architecture: Architecture, ranks: RankGroup) -> None:
        super().__init__(architecture, ranks.size)
        self.ranks, self.lockstep = ranks, StreamingLockstep(self)
        self._buffers: GatherBuffers | None = None

    def refresh(self) -> None:
        """Read the trained weights layer by layer: write each into the buffer of its group, and store this rank's
        slice."""
        outside, *layers = self._sources
        self._read(*outside)
        if self._buffers is None:
            self._buffers = self._allocate(self.weight_of(self.architecture.head).device)
        for number, group in enumerate(self.groups):
            for layer in group.layers:
                self._read(*layers[layer])
            self._buffers.store_slice(number)

    def _allocate(self, device: torch.device) -> GatherBuffers:
        """Allocate the buffers, and make the layers' tensors views of them."""
        buffers = GatherBuffers(self.groups, self.ranks, device)
        for number, group in enumerate(self.groups):
            for layer, starts in zip(group.layers, group.starts, strict=True):
                tensors = streamed_tensors(self.blocks[layer])
                for tensor, spec, start in zip(tensors, self._specs[layer], starts, strict=True):
                    tensor.copy_into(view_of_bytes(buffers.whole(number), start, spec))
        return buffers

    def iterate_layers(self) -> Iterator[BlockWeights]:
        assert self._buffers is not None, "refresh() comes first"
        for number in self._buffers.gathered_groups():
            for layer in self.groups[number].layers:
                yield self.blocks[layer]

    @property
    def num_copied_bytes(self) -> int:
        streamed = {id(tensor) for block in self.blocks for tensor in streamed_tensors(block)}
        unstreamed = sum(tensor.num_copied_bytes for tensor in self._tensors if id(tensor) not in streamed)
        return unstreamed if self._buffers is None else unstreamed + self._buffers.num_bytes


def check_streamed_weights_fit(weights: StreamedWeights, device: torch.device) -> None:
    """Log and check the memory that streamed weights take on a CUDA device.

    Raises:
        InputError: it is more than is free.
    """
    if device.type != "cuda":
        return
    total, free = weights.num_bytes_to_copy / GIB, memory_of(device)[0] / GIB
    log.info(
        "generation: streamed weights take %.2f GiB (1/%d of the layers) + %.2f GiB (%d groups of %d layers) "
        "+ %.2f GiB (whole on each rank) = %.2f GiB of the %.2f GiB that are free",
        weights.slice_bytes / GIB,
        weights.ranks.size,
        weights.gather_bytes / GIB,
        len(weights.groups[:2]),
        len(weights.groups[0].layers),
        weights.replicated_bytes / GIB,
        total,
        free,
    )
    if total > free:
        raise InputError(
            f"--rollout-weights: also streamed, the actor's weights take {total:.2f} GiB during a rollout, {free:.2f} "
            "GiB are free; take more GPUs, or free memory (--offload-optimizer-during-rollout)"
        )


class StreamingLockstep(Lockstep):
    """The lockstep of ranks that gather layers together: each runs as many passes as the rank that needs most."""

    def __init__(self, weights: StreamedWeights) -> None:
        self._weights = weights

    def largest(self, *values: int) -> Sequence[int]:
        device = self._weights.weight_of(self._weights.architecture.head).device
        return self._weights.ranks.largest(torch.tensor(values, dtype=torch.int64, device=device)).tolist()

    def join_prefill(self) -> None:
        for _ in self._weights.iterate_layers():
            pass
