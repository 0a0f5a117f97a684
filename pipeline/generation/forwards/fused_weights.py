"""The tensors of a whole model that the fused backend reads, layer by layer, refreshed from the trained weights.

Linear layers are those of projections.py. Under ZeRO-3 a refresh gathers a layer at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from pipeline.generation.device_work import Lockstep
from pipeline.generation.forwards.projections import WHOLE, Projection, Shard, WeightTensor, module_of, on_meta
from pipeline.generation.options import GROUP_BYTES
from pipeline.models.decoders.architecture import Architecture, Block, linear_of, norm_kind
from pipeline.models.partitions import gathered, is_partitioned
from pipeline.tensor_ops import round_up

# Alignment in bytes of the tensors of streamed layers, which matrix products need.
ALIGNMENT = 256


class Norm:
    """A norm's weight and bias, whole on every rank."""

    def __init__(self, module: Any) -> None:
        self.kind = norm_kind(module)
        self.modules = [module]
        self._weight, self._bias = (
            None if parameter is None else replicated(parameter)
            for parameter in (module.weight, getattr(module, "bias", None))
        )
        self.tensors = [tensor for tensor in (self._weight, self._bias) if tensor is not None]

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias (H,), or None."""
        weight, bias = (None if tensor is None else tensor.tensor for tensor in (self._weight, self._bias))
        return weight, bias


def replicated(parameter: nn.Parameter) -> WeightTensor:
    """Return a whole parameter, as a view or as a copy where ZeRO-3 partitions it."""
    return WeightTensor(lambda: [parameter.data], on_meta(parameter), copied=is_partitioned(parameter))


class BlockWeights:
    """The tensors of a decoder layer."""

    def __init__(self, block: Block, shard: Shard) -> None:
        self.order = in_memory_order(block)
        self.qkv = Projection([getattr(block, name) for name in self.order], 0, shard)
        self.out, self.down = Projection([block.out], 1, shard), Projection([block.down], 1, shard)
        self.up = Projection(block.up, 0, shard)
        norms = (block.attention_norm, block.mlp_norm, block.attention_out_norm, block.mlp_out_norm)
        wrapped = [None if norm is None else Norm(norm) for norm in norms]
        self.attention_norm, self.mlp_norm, self.attention_out_norm, self.mlp_out_norm = wrapped
        self.head_norms = None if block.head_norms is None else tuple(Norm(norm) for norm in block.head_norms)
        self.projections = [self.qkv, self.out, self.up, self.down]
        self.norms = [norm for norm in (*wrapped, *(self.head_norms or ())) if norm is not None]


def in_memory_order(block: Block) -> list[str]:
    """Return q, k and v by the addresses of their weights, the only order in which one view can join them."""
    weights = {name: linear_of(module_of(getattr(block, name))).weight for name in ("q", "k", "v")}
    if any(is_partitioned(weight) for weight in weights.values()):
        return list(weights)
    return sorted(weights, key=lambda name: weights[name].data_ptr())


def read_together(parts: Sequence[Projection | Norm]) -> tuple[list[nn.Parameter], list[WeightTensor]]:
    """Return the parameters that must be whole when these parts are read, adapters included, and the parts' tensors."""
    modules = [module for part in parts for module in part.modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return parameters, [tensor for part in parts for tensor in part.tensors]


class DecodeWeights:
    """All tensors of the fused backend for one model, trained or not: whole, or this rank's shard of them."""

    lockstep: Lockstep | None = None  # the ranks with which a forward pass is a collective

    def __init__(self, architecture: Architecture, shard: Shard = WHOLE) -> None:
        self.architecture, self.shard = architecture, shard
        self.blocks = [BlockWeights(block, shard) for block in architecture.blocks]
        outside = [architecture.tokens, architecture.head, architecture.positions]
        by_id: dict[int, Any] = {id(module.weight): module.weight for module in outside if module is not None}
        self._replicated = {key: replicated(parameter) for key, parameter in by_id.items()}  # tied ones once
        self.final_norm = None if architecture.final_norm is None else Norm(architecture.final_norm)
        self.project_in, self.project_out = (
            None if layer is None else Projection([layer], 0, WHOLE)
            for layer in (architecture.project_in, architecture.project_out)
        )
        parts = [part for part in (self.final_norm, self.project_in, self.project_out) if part is not None]
        parameters, tensors = read_together(parts)
        # Under ZeRO-3 these are gathered one at a time: all that is outside the layers, then layer by layer.
        self._sources = [([*by_id.values(), *parameters], [*self._replicated.values(), *tensors])]
        self._sources += [read_together([*block.projections, *block.norms]) for block in self.blocks]
        self._tensors = [tensor for _, tensors in self._sources for tensor in tensors]

    def weight_of(self, module: Any) -> Tensor:
        """Return the weight of an embedding or of the head."""
        return self._replicated[id(module.weight)].tensor

    def refresh(self) -> None:
        """Read the trained weights. Under ZeRO-3 a collective, a layer at a time."""
        for parameters, tensors in self._sources:
            self._read(parameters, tensors)

    @staticmethod
    def _read(parameters: Sequence[nn.Parameter], tensors: Sequence[WeightTensor]) -> None:
        with gathered(parameters):
            for tensor in tensors:
                tensor.refresh()

    def iterate_layers(self) -> Iterator[BlockWeights]:
        """Yield the layers in order for a forward pass; each can be read until the next one is requested."""
        yield from self.blocks

    @property
    def num_bytes_to_copy(self) -> int:
        """Return the bytes that the first `refresh` will copy."""
        return sum(tensor.num_bytes_to_copy for tensor in self._tensors)

    @property
    def num_copied_bytes(self) -> int:
        """Return the device memory beyond the trained weights in bytes."""
        return sum(tensor.num_copied_bytes for tensor in self._tensors)

    def addresses(self) -> tuple[int, ...]:
        """Return the address of every tensor; a CUDA graph is valid as long as they stay."""
        return tuple(tensor.tensor.data_ptr() for tensor in self._tensors)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers in one buffer. starts: for each of `layers` the first byte of each of its tensors."""

    layers: range
    starts: list[list[int]]
    num_bytes: int


def group_layers(layers: Sequence[Sequence[Tensor]], num_ranks: int, max_bytes: int) -> list[LayerGroup]:
    """Split L layers into groups of at most `max_bytes`, or of one layer; each is padded to N equal slices."""
    sizes = [[round_up(tensor.nbytes, ALIGNMENT) for tensor in layer] for layer in layers]
    groups: list[LayerGroup] = []
    first = 0
    while first < len(layers):
        last = first + 1
        while last < len(layers) and sum(map(sum, sizes[first : last + 1])) <= max_bytes:
            last += 1
        starts: list[list[int]] = []
        end = 0
        for layer in sizes[first:last]:
            *offsets, end = accumulate(layer, initial=end)
            starts.append(offsets)
        groups.append(LayerGroup(range(first, last), starts, round_up(end, num_ranks * ALIGNMENT)))
        first = last
    return groups


def streamed_tensors(block: BlockWeights) -> list[WeightTensor]:
    """Return the tensors of a layer that are streamed: its projections."""
    return [tensor for projection in block.projections for tensor in projection.tensors]


class SlicedWeights(DecodeWeights):
    """Decode weights whose projections are sharded over `num_ranks` ranks, in groups of layers (streaming.py)."""

    def __init__(self, architecture: Architecture, num_ranks: int) -> None:
        super().__init__(architecture)
        self._specs = [[tensor.spec for tensor in streamed_tensors(block)] for block in self.blocks]
        self._num_ranks, self.groups = num_ranks, group_layers(self._specs, num_ranks, GROUP_BYTES)

    @property
    def slice_bytes(self) -> int:
        """Return the bytes of this rank's slices of all layers."""
        return sum(group.num_bytes for group in self.groups) // self._num_ranks

    @property
    def gather_bytes(self) -> int:
        """Return the bytes of the buffers for the group in use and the next one."""
        return len(self.groups[:2]) * max(group.num_bytes for group in self.groups)

    @property
    def replicated_bytes(self) -> int:
        """Return the bytes of tensors that each rank has whole."""
        outside, *_ = self._sources
        norms = [tensor.spec for block in self.blocks for norm in block.norms for tensor in norm.tensors]
        return sum(spec.nbytes for spec in (*map(on_meta, outside[0]), *norms))

    @property
    def num_bytes_to_copy(self) -> int:
        return self.slice_bytes + self.gather_bytes + self.replicated_bytes
