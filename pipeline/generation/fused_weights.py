"""The tensors that a decode step reads: views of the trained weights where they lie as needed, else refreshed copies.

Copies are made of projections that are joined into one (unless DeepSpeed's flat buffer already holds them side by
side), of layers with LoRA (merged: the base weights are never written), of weights that ZeRO-3 partitions, and of this
rank's part under tensor parallelism. They keep their addresses, so that a CUDA graph stays valid after a refresh.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.kernels.decode_attention import HeadLayout
from pipeline.kernels.decode_layers import NormWeights
from pipeline.models.architecture import Architecture, Block, linear_of, norm_kind
from pipeline.models.lora import merged_weight
from pipeline.partitions import gathered, is_partitioned


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of each layer this rank holds: heads and MLP columns rank / size."""

    rank: int = 0
    size: int = 1

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.size, 0)[self.rank]

    def columns(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.size, 1)[self.rank]

    def once(self, bias: Tensor) -> Tensor:
        """The bias of a layer whose outputs are summed over ranks."""
        return bias if self.rank == 0 else torch.zeros_like(bias)


def has_lora(layer: Any) -> bool:
    return hasattr(layer, "lora_A")


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors that follow each other in memory, joined along their first dimension; else None."""
    first = parts[0]
    place = first.data_ptr()
    for part in parts:
        same_kind = part.dtype == first.dtype and part.shape[1:] == first.shape[1:] and part.is_contiguous()
        if not same_kind or part.data_ptr() != place:
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        place += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return torch.as_strided(first, shape, first.stride())


class Held:
    """One tensor for the decode step, made of `sources()`: a view of them where possible, else a copy of its own.

    of: the parameters that the sources come from. shares: ranks that take equal parts of them.
    """

    def __init__(
        self, sources: Callable[[], list[Tensor]], *, copied: bool, of: Sequence[nn.Parameter], shares: int = 1
    ) -> None:
        self._sources, self._copied, self._of, self._shares = sources, copied, list(of), shares
        self._copy: Tensor | None = None
        self._seen: list[int] = []  # where the parts lay that `tensor` is a view of
        self.tensor: Tensor

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the trained weights again; they must be whole. A view costs nothing."""
        parts = self._sources()
        places = [part.data_ptr() for part in parts]
        if self._seen and places == self._seen:
            return
        view = None if self._copied else adjacent([part.detach() for part in parts])
        if view is not None:
            self.tensor, self._copy, self._seen = view, None, places
            return
        self._seen = []
        if self._copy is None:
            self._copy = torch.cat(parts)
        else:
            torch.cat(parts, out=self._copy)
        self.tensor = self._copy

    def lie_in(self, place: Tensor) -> None:
        """Copy to `place` from the next refresh on: contiguous, of the right shape, and somebody else's memory."""
        self.tensor, self._copy, self._copied, self._seen = place, place, True, []

    @property
    def num_bytes_to_copy(self) -> int:
        """Of the copy that the first `refresh` will make, 0 where it will find a view."""
        if not self._copied and adjacent([parameter.detach() for parameter in self._of]) is not None:
            return 0
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in self._of) // self._shares

    @property
    def num_bytes(self) -> int:
        """Of the copy, 0 for a view."""
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()


class Projection:
    """Linear layers joined along their outputs; `split` says how this rank's part is taken."""

    def __init__(self, layers: Sequence[Any], split: str, shard: Shard) -> None:
        self._bases = bases = [linear_of(layer) for layer in layers]
        part = shard.size > 1 or any(is_partitioned(base.weight) for base in bases)
        merged = any(has_lora(layer) for layer in layers)
        # Not bound to this object: it would keep its copies alive until the next garbage collection.
        self._weight = Held(
            partial(weight_parts, layers, split, shard),
            copied=part or merged,
            of=[base.weight for base in bases],
            shares=shard.size,
        )
        self._bias: Held | None = None
        if bases[0].bias is not None:
            of, shares = [base.bias for base in bases], shard.size if split == "rows" else 1
            self._bias = Held(partial(bias_parts, bases, split, shard), copied=part, of=of, shares=shares)

    @property
    def held(self) -> list[Held]:
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    @property
    def parameters(self) -> list[list[nn.Parameter]]:
        """What each of `held` joins."""
        weights = [base.weight for base in self._bases]
        return [weights] if self._bias is None else [weights, [base.bias for base in self._bases]]

    @property
    def weight(self) -> Tensor:
        """(outputs, inputs) of this rank."""
        return self._weight.tensor

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias.tensor


def weight_parts(layers: Sequence[Any], split: str, shard: Shard) -> list[Tensor]:
    """This rank's part of each layer's weight, its adapter added."""
    whole = [merged_weight(layer) if has_lora(layer) else linear_of(layer).weight for layer in layers]
    if shard.size == 1:
        return whole
    return [shard.rows(weight) if split == "rows" else shard.columns(weight) for weight in whole]


def bias_parts(bases: Sequence[Any], split: str, shard: Shard) -> list[Tensor]:
    """This rank's part of each layer's bias."""
    if shard.size == 1:
        return [base.bias for base in bases]
    return [shard.rows(base.bias) if split == "rows" else shard.once(base.bias) for base in bases]


class Norm:
    """A norm's weight and bias, whole on every rank."""

    def __init__(self, module: Any) -> None:
        self._rms, self._eps = norm_kind(module)
        weight, bias = module.weight, getattr(module, "bias", None)
        self.parameters: list[nn.Parameter] = [parameter for parameter in (weight, bias) if parameter is not None]
        self._weight = None if weight is None else whole(weight)
        self._bias = None if bias is None else whole(bias)

    @property
    def held(self) -> list[Held]:
        return [held for held in (self._weight, self._bias) if held is not None]

    @property
    def values(self) -> NormWeights:
        weight = None if self._weight is None else self._weight.tensor
        return NormWeights(weight, None if self._bias is None else self._bias.tensor, self._eps, self._rms)


def whole(parameter: nn.Parameter) -> Held:
    """A parameter as it is, or its copy where ZeRO-3 partitions it."""
    return Held(lambda: [parameter.data], copied=is_partitioned(parameter), of=[parameter])


class BlockWeights:
    """A decoder layer's tensors."""

    def __init__(self, block: Block, shard: Shard) -> None:
        self.block = block
        self.order = in_memory_order({"q": block.q, "k": block.k, "v": block.v})
        self.qkv = Projection([getattr(block, name) for name in self.order], "rows", shard)
        self.out = Projection([block.out], "columns", shard)
        self.up = Projection(block.up, "rows", shard)
        self.down = Projection([block.down], "columns", shard)
        self.attention_norm, self.mlp_norm = Norm(block.attention_norm), Norm(block.mlp_norm)
        self.head_norms = None if block.head_norms is None else tuple(Norm(norm) for norm in block.head_norms)

    @property
    def projections(self) -> list[Projection]:
        return [self.qkv, self.out, self.up, self.down]

    @property
    def norms(self) -> list[Norm]:
        return [self.attention_norm, self.mlp_norm, *(self.head_norms or ())]

    @property
    def held(self) -> list[Held]:
        parts: list[Projection | Norm] = [*self.projections, *self.norms]
        return [held for part in parts for held in part.held]

    def parameters(self) -> list[nn.Parameter]:
        modules = [self.block.q, self.block.k, self.block.v, self.block.out, *self.block.up, self.block.down]
        modules += [self.block.attention_norm, self.block.mlp_norm, *(self.block.head_norms or ())]
        return [parameter for module in modules for parameter in module.parameters()]


def in_memory_order(layers: dict[str, Any]) -> list[str]:
    """Names of the layers as their weights lie in memory: only in this order can one view hold them all."""
    if any(is_partitioned(linear_of(layer).weight) for layer in layers.values()):
        return list(layers)
    return sorted(layers, key=lambda name: linear_of(layers[name]).weight.data_ptr())


def head_layout(architecture: Architecture, order: Sequence[str], shard: Shard) -> HeadLayout:
    """Columns of q, k and v in the joined projection of this rank."""
    heads, kv_heads = architecture.num_heads // shard.size, architecture.num_kv_heads // shard.size
    widths = {name: (heads if name == "q" else kv_heads) * architecture.head_dim for name in order}
    offsets, column = {}, 0
    for name in order:
        offsets[name] = column
        column += widths[name]
    scale = architecture.head_dim**-0.5
    return HeadLayout(heads, kv_heads, architecture.head_dim, offsets["q"], offsets["k"], offsets["v"], scale)


class DecodeWeights:
    """All tensors of a decode step."""

    def __init__(self, architecture: Architecture, shard: Shard = Shard()) -> None:
        self.architecture, self.shard = architecture, shard
        self.blocks = [BlockWeights(block, shard) for block in architecture.blocks]
        outside = [architecture.tokens, architecture.head, architecture.positions]
        by_id: dict[int, Any] = {id(module.weight): module.weight for module in outside if module is not None}
        self._whole = {key: whole(parameter) for key, parameter in by_id.items()}  # tied ones are held once
        self._whole_parameters: list[nn.Parameter] = list(by_id.values())
        self.final_norm = None if architecture.final_norm is None else Norm(architecture.final_norm)
        self.project_in, self.project_out = (
            None if layer is None else Projection([layer], "rows", Shard())
            for layer in (architecture.project_in, architecture.project_out)
        )
        modules = [architecture.final_norm, architecture.project_in, architecture.project_out]
        others = [parameter for module in modules if module is not None for parameter in module.parameters()]
        # What is gathered together under ZeRO-3: all outside the layers, then layer by layer.
        self._sources = [([*self._whole_parameters, *others], self._outside())]
        self._sources += [(block.parameters(), block.held) for block in self.blocks]

    def of(self, module: Any) -> Tensor:
        """The weight of a module outside the layers."""
        return self._whole[id(module.weight)].tensor

    def refresh(self) -> None:
        """Read the trained weights. Under ZeRO-3 a collective, a layer at a time."""
        for parameters, group in self._sources:
            self._read(parameters, group)

    @staticmethod
    def _read(parameters: Sequence[nn.Parameter], group: Sequence[Held]) -> None:
        with gathered(parameters):
            for held in group:
                held.refresh()

    def in_turn(self) -> Iterator[BlockWeights]:
        """The layers in order, as a pass over them wants them: each can be read until the next one is asked for."""
        yield from self.blocks

    def _outside(self) -> list[Held]:
        """What does not belong to a layer."""
        others = [part for part in (self.final_norm, self.project_in, self.project_out) if part is not None]
        return [*self._whole.values(), *(held for part in others for held in part.held)]

    def _held(self) -> list[Held]:
        return [held for _, group in self._sources for held in group]

    @property
    def num_bytes_to_copy(self) -> int:
        """What the first `refresh` will copy: weights in pieces, with adapters, shared among ranks, or lying apart."""
        return sum(held.num_bytes_to_copy for held in self._held())

    @property
    def num_copied_bytes(self) -> int:
        """Device memory beyond the trained weights."""
        return sum(held.num_bytes for held in self._held())

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies: a graph is valid as long as this stays the same."""
        return tuple(held.tensor.data_ptr() for held in self._held())
