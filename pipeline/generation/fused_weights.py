"""The tensors that the fused backend reads: views of the trained weights where possible, else refreshed copies.

Copied are joined projections (unless they are adjacent in DeepSpeed's flat buffer), layers with LoRA (merged), weights
that ZeRO-3 partitions, and shards under tensor parallelism. Copies keep their addresses, which CUDA graphs read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pipeline.kernels.decode_layers import NormWeights
from pipeline.kernels.split_kv import HeadLayout
from pipeline.models.architecture import Architecture, Block, Rows, linear_of, norm_kind
from pipeline.models.lora import merged_weight
from pipeline.models.partitions import gathered, is_partitioned, whole_shape


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each layer that this rank computes: heads and MLP columns number `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def cut(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank]


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


class WeightTensor:
    """One tensor for the decode step, joined from `sources()`: a view of them where possible, else a copy.

    spec: the whole tensor, joined of the sources of all ranks, on the meta device. copied: a view is impossible.
    num_shards: ranks that share it.
    """

    def __init__(self, sources: Callable[[], list[Tensor]], spec: Tensor, *, copied: bool, num_shards: int = 1) -> None:
        self._sources, self.spec, self._copied, self._num_shards = sources, spec, copied, num_shards
        self._copy: Tensor | None = None
        self._viewed: list[int] = []  # addresses of the sources that `tensor` is a view of
        self.tensor: Tensor

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the trained weights again, which must be whole. A view costs nothing."""
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
        """Let every later refresh copy into `memory`, a contiguous tensor of the right shape that others own."""
        self.tensor, self._copy, self._copied, self._viewed = memory, memory, True, []

    @property
    def num_bytes_to_copy(self) -> int:
        """Return the bytes of the copy that the first `refresh` will make, 0 for a view."""
        if not self._copied and joined_view([part.detach() for part in self._sources()]) is not None:
            return 0
        return self.spec.nbytes // self._num_shards

    @property
    def num_copied_bytes(self) -> int:
        """Return the bytes of the copy, 0 for a view."""
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()


class Projection:
    """Linear layers joined along their outputs; tensor parallelism cuts outputs (dim 0) or inputs (dim 1)."""

    def __init__(self, layers: Sequence[Any], dim: int, shard: Shard) -> None:
        layers = undivided(layers) if shard.size == 1 else layers
        self.modules = list(dict.fromkeys(module_of(layer) for layer in layers))
        bases = [linear_of(module) for module in self.modules]
        copied = shard.size > 1 or any(is_partitioned(base.weight) for base in bases)
        merged = any(hasattr(module, "lora_A") for module in self.modules)
        # A bound method would be a cycle that keeps the copies alive until the next garbage collection.
        sources, spec = partial(weight_shards, layers, dim, shard), joined_spec([whole_weight(one) for one in layers])
        self._weight = WeightTensor(sources, spec, copied=copied or merged, num_shards=shard.size)
        self._bias: WeightTensor | None = None
        if bases[0].bias is not None:
            sources, num_shards = partial(bias_shards, layers, dim, shard), shard.size if dim == 0 else 1
            spec = joined_spec([whole_bias(one) for one in layers])
            self._bias = WeightTensor(sources, spec, copied=copied, num_shards=num_shards)
        self.tensors = [tensor for tensor in (self._weight, self._bias) if tensor is not None]

    @property
    def weight(self) -> Tensor:
        """Return the joined weight of this rank, (outputs, inputs)."""
        return self._weight.tensor

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias.tensor


def module_of(layer: Any) -> Any:
    """Return the module of a linear layer that may be a part of one."""
    return layer.layer if isinstance(layer, Rows) else layer


def undivided(layers: Sequence[Any]) -> Sequence[Any]:
    """Return the one layer that all of `layers` are the parts of, in order; else `layers`."""
    first = layers[0]
    if not isinstance(first, Rows) or first.groups > 1:
        return layers
    every = [Rows(first.layer, first.sizes, index) for index in range(len(first.sizes))]
    return [first.layer] if list(layers) == every else layers


def by_outputs(layer: Any, weight: Tensor) -> Tensor:
    """Return the rows (outputs, inputs) of a layer in the weight of its module, which GPT-2 keeps transposed."""
    weight = weight.t() if isinstance(linear_of(module_of(layer)), Conv1D) else weight
    return layer.of(weight) if isinstance(layer, Rows) else weight


def whole_weight(layer: Any) -> Tensor:
    """Return a layer's whole weight (outputs, inputs) on the meta device, also before it is gathered."""
    return by_outputs(layer, on_meta(linear_of(module_of(layer)).weight))


def whole_bias(layer: Any) -> Tensor:
    """Return a layer's whole bias (outputs,) on the meta device."""
    bias = on_meta(linear_of(module_of(layer)).bias)
    return layer.of(bias) if isinstance(layer, Rows) else bias


def on_meta(parameter: Any) -> Tensor:
    """Return a whole parameter on the meta device."""
    return torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")


def joined_spec(parts: Sequence[Tensor]) -> Tensor:
    """Return meta tensors joined along their first dimension."""
    return torch.cat(list(parts))


def weight_shards(layers: Sequence[Any], dim: int, shard: Shard) -> list[Tensor]:
    """Return this rank's shard of each layer's weight (outputs, inputs), with its adapter added."""
    modules = dict.fromkeys(map(module_of, layers))
    whole = {one: merged_weight(one) if hasattr(one, "lora_A") else linear_of(one).weight for one in modules}
    return [shard.cut(by_outputs(layer, whole[module_of(layer)]), dim) for layer in layers]


def bias_shards(layers: Sequence[Any], dim: int, shard: Shard) -> list[Tensor]:
    """Return this rank's shard of each layer's bias; where outputs are summed over ranks, 0 on all but the first."""
    whole = [(layer, linear_of(module_of(layer)).bias) for layer in layers]
    biases = [layer.of(bias) if isinstance(layer, Rows) else bias for layer, bias in whole]
    if dim == 0:
        return [shard.cut(bias, 0) for bias in biases]
    return [bias if shard.rank == 0 else torch.zeros_like(bias) for bias in biases]


class Norm:
    """A norm's weight and bias, whole on every rank."""

    def __init__(self, module: Any) -> None:
        self._kind = norm_kind(module)
        self.modules = [module]
        self._weight, self._bias = (
            None if parameter is None else replicated(parameter)
            for parameter in (module.weight, getattr(module, "bias", None))
        )
        self.tensors = [tensor for tensor in (self._weight, self._bias) if tensor is not None]

    @property
    def weights(self) -> NormWeights:
        weight, bias = (None if tensor is None else tensor.tensor for tensor in (self._weight, self._bias))
        return NormWeights(weight, bias, **self._kind)


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
        made = [None if norm is None else Norm(norm) for norm in norms]
        self.attention_norm, self.mlp_norm, self.attention_out_norm, self.mlp_out_norm = made
        self.head_norms = None if block.head_norms is None else tuple(Norm(norm) for norm in block.head_norms)
        self.projections = [self.qkv, self.out, self.up, self.down]
        self.norms = [norm for norm in (*made, *(self.head_norms or ())) if norm is not None]


def in_memory_order(block: Block) -> list[str]:
    """Return q, k and v by the addresses of their weights, the only order in which one view can join them."""
    weights = {name: linear_of(module_of(getattr(block, name))).weight for name in ("q", "k", "v")}
    if any(is_partitioned(weight) for weight in weights.values()):
        return list(weights)
    return sorted(weights, key=lambda name: weights[name].data_ptr())


def head_layout(architecture: Architecture, number: int, order: Sequence[str], shard: Shard) -> HeadLayout:
    """Return the columns of q, k and v in the joined projection of this rank, and how layer `number` attends."""
    heads, kv_heads = architecture.num_heads // shard.size, architecture.num_kv_heads // shard.size
    widths = [(heads if name == "q" else kv_heads) * architecture.head_dim for name in order]
    offsets = dict(zip(order, accumulate(widths, initial=0), strict=False))
    return HeadLayout(
        heads, kv_heads, architecture.head_dim, offsets["q"], offsets["k"], offsets["v"], architecture.scale,
        window=architecture.blocks[number].window or 0, cap=architecture.cap or 0.0,
    )  # fmt: skip


def read_together(parts: Sequence[Projection | Norm]) -> tuple[list[nn.Parameter], list[WeightTensor]]:
    """Return the parameters that must be whole when these parts are read, adapters included, and the parts' tensors."""
    modules = [module for part in parts for module in part.modules]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return parameters, [tensor for part in parts for tensor in part.tensors]


class DecodeWeights:
    """All tensors of the fused backend for one model."""

    def __init__(self, architecture: Architecture, shard: Shard = Shard()) -> None:
        self.architecture, self.shard = architecture, shard
        self.blocks = [BlockWeights(block, shard) for block in architecture.blocks]
        outside = [architecture.tokens, architecture.head, architecture.positions]
        by_id: dict[int, Any] = {id(module.weight): module.weight for module in outside if module is not None}
        self._replicated = {key: replicated(parameter) for key, parameter in by_id.items()}  # tied ones once
        self.final_norm = None if architecture.final_norm is None else Norm(architecture.final_norm)
        self.project_in, self.project_out = (
            None if layer is None else Projection([layer], 0, Shard())
            for layer in (architecture.project_in, architecture.project_out)
        )
        parts = [part for part in (self.final_norm, self.project_in, self.project_out) if part is not None]
        parameters, tensors = read_together(parts)
        # Under ZeRO-3 gathered at a time: all that is outside the layers, then layer by layer.
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
        """Yield the layers in order for a forward pass; each can be read until the next one is asked for."""
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
