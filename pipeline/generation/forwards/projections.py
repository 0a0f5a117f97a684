"""Joined linear layers as the fused backend reads them: views of the trained weights where possible, else copies.

Copied are joined projections (unless they are adjacent in DeepSpeed's flat buffer), layers with LoRA (merged), weights
that ZeRO-3 partitions, and shards under tensor parallelism. Copies keep their addresses, which CUDA graphs read. An
int8 base is not copied: its codes are moved next to each other once, and its adapters stay unmerged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.kernels.int8_linear import Int8Linear
from pipeline.models.decoders.architecture import Rows, linear_of
from pipeline.models.lora import merged_weight
from pipeline.models.partitions import is_partitioned, whole_shape


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each layer that this rank computes: heads and MLP columns number `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def slice_of(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank]


WHOLE = Shard()


def joined_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one view over tensors that are adjacent in memory, joined along their first dimension; else None."""
    first = parts[0]
    if len(parts) == 1:
        return first
    address = first.data_ptr()
    for part in parts:
        same_kind = part.dtype == first.dtype and part.shape[1:] == first.shape[1:] and part.is_contiguous()
        if not same_kind or part.data_ptr() != address:
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        address += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return torch.as_strided(first, shape, first.stride())


def make_adjacent(parameters: Sequence[nn.Parameter]) -> None:
    """Move frozen parameters into one allocation, in their order, so that a view joins them."""
    if joined_view([parameter.data for parameter in parameters]) is None:
        joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, joined.split([len(one) for one in parameters]), strict=True):
            parameter.data = part


class WeightTensor:
    """One tensor for the decode step, joined from `sources()`: a view of them where possible, else a copy.

    spec: the whole tensor, joined from the sources of all ranks, on the meta device. copied: True if a view is
    impossible. num_shards: ranks that share it.
    """

    def __init__(self, sources: Callable[[], list[Tensor]], spec: Tensor, *, copied: bool, num_shards: int = 1) -> None:
        self._sources, self.spec, self._copied, self._num_shards = sources, spec, copied, num_shards
        self._copy: Tensor | None = None
        self._viewed: list[int] = []  # addresses of the sources that `tensor` is a view of
        self.tensor: Tensor

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the trained weights again, which must be gathered. A view costs nothing."""
        parts = self._sources()
        addresses = [part.data_ptr() for part in parts]
        if self._viewed and addresses == self._viewed:
            return
        view = None if self._copied else joined_view([part.detach() for part in parts])
        if view is not None:
            self.tensor, self._copy, self._viewed = view, None, addresses
            return
        self._viewed = []
        if self._copy is None:
            self._copy = torch.cat(parts)
        else:
            torch.cat(parts, out=self._copy)
        self.tensor = self._copy

    def copy_into(self, memory: Tensor) -> None:
        """Make every later refresh copy into `memory`, a contiguous tensor of the right shape that the caller owns."""
        self.tensor, self._copy, self._copied, self._viewed = memory, memory, True, []

    @property
    def num_bytes_to_copy(self) -> int:
        """Return the bytes of the copy that the first `refresh` will create, 0 for a view."""
        if not self._copied and joined_view([part.detach() for part in self._sources()]) is not None:
            return 0
        return self.spec.nbytes // self._num_shards

    @property
    def num_copied_bytes(self) -> int:
        """Return the bytes of the copy, 0 for a view."""
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()


class Projection:
    """Linear layers joined along their outputs; tensor parallelism shards outputs (dim 0) or inputs (dim 1)."""

    def __init__(self, layers: Sequence[Any], dim: int, shard: Shard) -> None:
        layers = whole_layers(layers) if shard.size == 1 else layers
        self.modules = list(dict.fromkeys(module_of(layer) for layer in layers))
        bases = [linear_of(module) for module in self.modules]
        copied = shard.size > 1 or any(is_partitioned(base.weight) for base in bases)
        quantised, adapted = isinstance(bases[0], Int8Linear), any(map(has_adapter, self.modules))
        if quantised and not copied:
            make_adjacent([base.weight for base in bases])
        # A bound method would create a reference cycle, and the copies would live until the next garbage collection.
        sources, spec = partial(weight_shards, layers, dim, shard), torch.cat([whole_weight(one) for one in layers])
        self._weight = WeightTensor(sources, spec, copied=copied or (adapted and not quantised), num_shards=shard.size)
        self._scale = joined_tensor(partial(scale_shards, layers, dim, shard)) if quantised else None
        self.adapters = Adapters(layers, dim, shard) if quantised and adapted else None  # None: they are in the weight
        self._bias: WeightTensor | None = None
        if bases[0].bias is not None:
            sources, num_shards = partial(bias_shards, layers, dim, shard), shard.size if dim == 0 else 1
            spec = torch.cat([rows_of(one, on_meta(linear_of(module_of(one)).bias)) for one in layers])
            self._bias = WeightTensor(sources, spec, copied=copied, num_shards=num_shards)
        self.tensors = [one for one in (self._weight, self._scale, self._bias) if one is not None]
        self.tensors += [self.adapters.down, self.adapters.up] if self.adapters else []

    @property
    def weight(self) -> Tensor:
        """Return the joined weight of this rank, (outputs, inputs): int8 codes where there is a `scale`."""
        return self._weight.tensor

    @property
    def scale(self) -> Tensor | None:
        """Return the fp32 scales of int8 codes, (outputs, 1)."""
        return None if self._scale is None else self._scale.tensor

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias.tensor


class Adapters:
    """The unmerged adapters of joined layers: `scaling` * x @ down.T @ up.T; `up` has a block for each layer.

    R is the sum of the layers' ranks.
    """

    def __init__(self, layers: Sequence[Any], dim: int, shard: Shard) -> None:
        self.scaling: float = next(one for one in map(module_of, layers) if has_adapter(one)).scaling["default"]
        self.down = joined_tensor(partial(lora_down_shards, layers, dim, shard))  # all A of this rank, (R, inputs)
        # All B of this rank, (outputs, R).
        self.up = joined_tensor(partial(lora_up_shards, layers, dim, shard, self.scaling), copied=True)


def has_adapter(module: Any) -> bool:
    return hasattr(module, "lora_A")


def joined_tensor(sources: Callable[[], list[Tensor]], *, copied: bool = False) -> WeightTensor:
    """Return one tensor joined from what `sources()` returns: whole tensors, or this rank's shards of them."""
    return WeightTensor(sources, torch.cat([part.to("meta") for part in sources()]), copied=copied)


def module_of(layer: Any) -> Any:
    """Return the module of a linear layer; for `Rows`, the module that they are rows of."""
    return layer.layer if isinstance(layer, Rows) else layer


def whole_layers(layers: Sequence[Any]) -> Sequence[Any]:
    """Return [layer] if `layers` are all parts of one linear layer, in order, which needs no copy; else `layers`."""
    first = layers[0]
    if not isinstance(first, Rows) or first.groups > 1:
        return layers
    every = [Rows(first.layer, first.sizes, index) for index in range(len(first.sizes))]
    return [first.layer] if list(layers) == every else layers


def by_outputs(layer: Any, weight: Tensor) -> Tensor:
    """Return the rows (outputs, inputs) of a layer in the weight of its module, which GPT-2 keeps transposed."""
    return rows_of(layer, weight.t() if isinstance(linear_of(module_of(layer)), Conv1D) else weight)


def rows_of(layer: Any, whole: Tensor) -> Tensor:
    """Return a layer's part of a tensor whose first dimension is all outputs of its module."""
    return layer.of(whole) if isinstance(layer, Rows) else whole


def whole_weight(layer: Any) -> Tensor:
    """Return a layer's whole weight (outputs, inputs) on the meta device, also before it is gathered."""
    return by_outputs(layer, on_meta(linear_of(module_of(layer)).weight))


def on_meta(parameter: Any) -> Tensor:
    """Return a whole parameter on the meta device."""
    return torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")


def weight_shards(layers: Sequence[Any], dim: int, shard: Shard) -> list[Tensor]:
    """Return this rank's shard of each layer's weight (outputs, inputs), with its adapter added, or of its codes."""

    def whole(module: Any) -> Tensor:
        base = linear_of(module)
        return merged_weight(module) if has_adapter(module) and not isinstance(base, Int8Linear) else base.weight

    weights = {module: whole(module) for module in dict.fromkeys(map(module_of, layers))}
    return [shard.slice_of(by_outputs(layer, weights[module_of(layer)]), dim) for layer in layers]


def scale_shards(layers: Sequence[Any], dim: int, shard: Shard) -> list[Tensor]:
    """Return the scales of this rank's shard of each layer, (outputs, 1)."""
    scales = [rows_of(layer, linear_of(module_of(layer)).scale) for layer in layers]
    return [shard.slice_of(scale, 0) for scale in scales] if dim == 0 else scales


def lora_down_shards(layers: Sequence[Any], dim: int, shard: Shard) -> list[Tensor]:
    """Return A of the layers that have an adapter, with this rank's inputs."""
    downs = [module.lora_A["default"].weight for module in map(module_of, layers) if has_adapter(module)]
    return [shard.slice_of(down, 1) for down in downs] if dim == 1 else downs


def lora_up_shards(layers: Sequence[Any], dim: int, shard: Shard, scaling: float) -> list[Tensor]:
    """Return B of all layers as blocks of one matrix, with this rank's outputs; `scaling` is not applied."""

    like = next(one for one in map(module_of, layers) if has_adapter(one)).lora_B["default"].weight

    def block(layer: Any) -> Tensor:
        module = module_of(layer)
        if has_adapter(module):
            up = module.lora_B["default"].weight * (module.scaling["default"] / scaling)
        else:
            up = like.new_empty(len(linear_of(module).weight), 0)
        return shard.slice_of(rows_of(layer, up), 0) if dim == 0 else rows_of(layer, up)

    return [torch.block_diag(*map(block, layers))]


def bias_shards(layers: Sequence[Any], dim: int, shard: Shard) -> list[Tensor]:
    """Return this rank's shard of each layer's bias; if outputs are summed over ranks, 0 on all but the first."""
    biases = [rows_of(layer, linear_of(module_of(layer)).bias) for layer in layers]
    if dim == 0:
        return [shard.slice_of(bias, 0) for bias in biases]
    return [bias if shard.rank == 0 else torch.zeros_like(bias) for bias in biases]
