"""Describe the layers of OPT and Llama-like models in one form, for the fused and streamed decode steps.

The description refers to the live modules and copies no weight. Other model types are refused, and their callers fall
back to another generation backend.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.models.loading import backbone, base_model

LLAMA_SHAPE = ("llama", "mistral", "qwen2", "qwen3")
# Types of rotary embedding whose tables do not depend on the sequence length.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


class UnsupportedModel(Exception):
    """The model is not supported by a fast path, or not on this device; the text is logged."""


@dataclass(frozen=True, slots=True)
class Block:
    """A decoder layer as modules of the live model, so that their weights are always the trained ones.

    up: first linear layers of the MLP: (fc1,) or (gate, up). head_norms: RMSNorms of q and k (Qwen3), or None.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    up: tuple[Any, ...]
    down: Any
    attention_norm: nn.Module
    mlp_norm: nn.Module
    head_norms: tuple[nn.Module, nn.Module] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of OPT or of a Llama-like model.

    norm_first: norms precede attention and MLP (all but OPT-350m). window: tokens that attention sees, None = all;
    longer sequences are not supported. rotary: the module that computes cos and sin, None for learned positions
    (`positions`, whose rows start at `position_offset`).
    """

    blocks: list[Block]
    tokens: nn.Embedding
    positions: nn.Embedding | None = None
    position_offset: int = 0
    rotary: Any = None
    project_in: nn.Linear | None = None
    project_out: nn.Linear | None = None
    final_norm: nn.Module | None
    head: nn.Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_first: bool
    window: int | None = None

    @property
    def is_gated(self) -> bool:
        return len(self.blocks[0].up) == 2


def read_architecture(model: Any) -> Architecture:
    """Describe a transformers causal language model (or the one inside a peft wrapper).

    Raises:
        UnsupportedModel: its type or one of its settings is not supported.
    """
    model = base_model(model)
    kind = model.config.model_type
    if kind == "opt":
        return _read_opt(model)
    if kind in LLAMA_SHAPE:
        return _read_llama(model)
    raise UnsupportedModel(f"model type {kind} is not among opt, {', '.join(LLAMA_SHAPE)}")


def _read_opt(model: Any) -> Architecture:
    config, decoder = model.config, model.model.decoder
    if config.activation_function != "relu":
        raise UnsupportedModel(f"activation {config.activation_function}")
    blocks = [
        Block(
            q=layer.self_attn.q_proj,
            k=layer.self_attn.k_proj,
            v=layer.self_attn.v_proj,
            out=layer.self_attn.out_proj,
            up=(layer.fc1,),
            down=layer.fc2,
            attention_norm=layer.self_attn_layer_norm,
            mlp_norm=layer.final_layer_norm,
        )
        for layer in decoder.layers
    ]
    return Architecture(
        blocks=blocks,
        tokens=decoder.embed_tokens,
        positions=decoder.embed_positions,
        position_offset=decoder.embed_positions.offset,
        project_in=decoder.project_in,
        project_out=decoder.project_out,
        final_norm=decoder.final_layer_norm,
        head=model.lm_head,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        norm_first=config.do_layer_norm_before,
    )


def _read_llama(model: Any) -> Architecture:
    config = model.config
    decoder: Any = backbone(model)
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"activation {config.hidden_act}")
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type", "default") not in FIXED_ROTARY:
        raise UnsupportedModel(f"rotary positions of type {rotary['rope_type']}")
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("rotary positions on a part of each head")
    window = getattr(config, "sliding_window", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        blocks=[_llama_block(layer) for layer in decoder.layers],
        tokens=decoder.embed_tokens,
        rotary=decoder.rotary_emb,
        final_norm=decoder.norm,
        head=model.lm_head,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_first=True,
        window=window if window and getattr(config, "use_sliding_window", True) else None,
    )


def _llama_block(layer: Any) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    return Block(
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        out=attention.o_proj,
        up=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        attention_norm=layer.input_layernorm,
        mlp_norm=layer.post_attention_layernorm,
        head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
    )


def rotary_types(config: Any) -> set[str]:
    """Return the types of rotary embedding that a configuration names, for all its kinds of layers."""
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in rotary.values() if isinstance(value, dict)] or [rotary]
    return {kind.get("rope_type", "default") for kind in kinds}


def linear_of(module: Any) -> Any:
    """Return the layer itself, or the base layer inside a LoRA layer."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def norm_kind(norm: nn.Module) -> tuple[bool, float]:
    """Return (True for an RMSNorm, its epsilon)."""
    if isinstance(norm, nn.LayerNorm):
        return False, norm.eps
    return True, float(norm.variance_epsilon)  # type: ignore[arg-type]


def rotary_table(rotary: Any, positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each (positions, D / 2), in `like`'s dtype and device; both halves of a head rotate alike."""
    ids = torch.arange(positions, device=like.device).unsqueeze(0)
    cos, sin = rotary(like.new_empty(1, 1, 1), position_ids=ids)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
