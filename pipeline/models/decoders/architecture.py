"""Describe the layers of decoders in one form, for the fused and streamed decode steps.

Differences of families are data here: position and kind of norms, activation, positions, caps, windows, scales. The
description refers to the live modules and copies no weight. `families.py` reads models.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from pipeline.kernels.token_statistics import LogitScaling
from pipeline.model_types import MODEL_TYPES, declared

# RMSNorms: (what is added to the weight, True = rounded before the product with the weight).
RMS_NORMS = {f"{kind.prefix}RMSNorm": kind.norm for kind in MODEL_TYPES.values() if kind.prefix}


class UnsupportedModel(Exception):
    """The model is not supported by a fast path, or not on this device; the text is logged."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Outputs of a linear layer that joins several: part `index`, of `sizes` outputs, of each of `groups` groups."""

    layer: Any
    sizes: tuple[int, ...]
    index: int
    groups: int = 1

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return these outputs' part of the layer's weight or bias, whose first dimension is all outputs."""
        start = sum(self.sizes[: self.index])
        grouped = whole.unflatten(0, (self.groups, -1))
        return grouped[:, start : start + self.sizes[self.index]].flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A decoder layer as modules of the live model, so that their weights are always the trained ones.

    Linear layers may be `Rows` of one that joins several.

    q: projection to queries.
    k: projection to keys.
    v: projection to values.
    out: projection of the attention's output.
    up: first layers of the MLP: one, or (gate, up).
    down: last layer of the MLP.
    attention_norm: norm of the attention's input (of OPT-350M: of the sum behind it).
    mlp_norm: norm of the MLP's input (of OPT-350M: of the sum behind it).
    attention_out_norm: norm of the attention's output.
    mlp_out_norm: norm of the MLP's output.
    head_norms: RMSNorms of q and k.
    rotary: key of Architecture.rotary; None: no rotation.
    window: number of tokens that attention sees; None: all.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    up: tuple[Any, ...]
    down: Any
    attention_norm: nn.Module | None
    mlp_norm: nn.Module | None
    attention_out_norm: nn.Module | None = None
    mlp_out_norm: nn.Module | None = None
    head_norms: tuple[nn.Module, nn.Module] | None = None
    rotary: str | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder whose layers are attention with norms and an MLP.

    blocks: the layers in their order.
    tokens: the token embedding.
    positions: the embedding of learned positions; None: there is none.
    position_offset: row of `positions` for position 0.
    rotary: name -> function that computes cos and sin.
    project_in: layer between embeddings and blocks (OPT-350M).
    project_out: layer between blocks and head (OPT-350M).
    final_norm: norm behind the blocks.
    head: the layer that computes logits.
    num_heads: heads of queries.
    num_kv_heads: heads of keys and values.
    head_dim: size of a head.
    scale: factor of the attention scores.
    activation: name of the MLP's activation, a value of `families.ACTIVATIONS`.
    norm_first: norms precede attention and MLP, if there are any there (all but OPT-350M).
    is_parallel: attention and MLP read the same input.
    embedding_scale: factor of the embeddings, ().
    cap: soft cap of the attention scores.
    scaling: scale and soft cap of the logits.
    joins_head_norms: q and k are normed over all heads together.
    max_tokens: longest pass; None: no limit.
    """

    blocks: list[Block]
    tokens: nn.Embedding
    positions: nn.Embedding | None = None
    position_offset: int = 0
    rotary: dict[str, Callable[..., Any]] = field(default_factory=dict)
    project_in: nn.Linear | None = None
    project_out: nn.Linear | None = None
    final_norm: nn.Module | None
    head: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    activation: str
    norm_first: bool = True
    is_parallel: bool = False
    embedding_scale: torch.Tensor | None = None
    cap: float | None = None
    scaling: LogitScaling = LogitScaling()
    joins_head_norms: bool = False
    max_tokens: int | None = None

    @property
    def is_gated(self) -> bool:
        return len(self.blocks[0].up) == 2


def rotary_types(config: PretrainedConfig) -> set[str]:
    """Return the types of rotary embedding that a configuration names, for all its kinds of layers."""
    rotary = declared(config, "rope_parameters") or {}
    parts = [value for value in rotary.values() if isinstance(value, dict)] or [rotary]
    return {part.get("rope_type", "default") for part in parts}


def longrope_limit(config: PretrainedConfig) -> int | None:
    """Return how many tokens a pass may have before longrope changes all frequencies; None: no longrope."""
    rotary = declared(config, "rope_parameters") or {}
    return rotary["original_max_position_embeddings"] if rotary.get("rope_type") == "longrope" else None


def linear_of(module: Any) -> Any:
    """Return the layer itself, or the base layer inside a LoRA layer."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def norm_kind(norm: Any) -> dict[str, Any]:
    """Return eps, rms (True for an RMSNorm), offset and rounds_first of a norm, as `NormWeights` has them.

    Raises:
        UnsupportedModel: a norm that is not known.
    """
    if isinstance(norm, nn.LayerNorm):
        return {"eps": norm.eps, "rms": False}
    name = type(norm).__name__
    if name not in RMS_NORMS:
        raise UnsupportedModel(f"norms of type {name}")
    offset, rounds_first = RMS_NORMS[name]
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return {"eps": float(eps), "rms": True, "offset": offset, "rounds_first": rounds_first}
