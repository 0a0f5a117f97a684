"""Read the decoders of each family of models as `Architecture`s.

Other models fall back to another generation backend.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers import GPT2LMHeadModel, GPTNeoXForCausalLM, OPTForCausalLM, PretrainedConfig, PreTrainedModel

from pipeline.kernels.token_statistics import LogitScaling
from pipeline.model_types import MODEL_TYPES, declared
from pipeline.models.decoders.architecture import (
    Architecture,
    Block,
    Rows,
    UnsupportedModel,
    longrope_limit,
    norm_kind,
    rotary_types,
)
from pipeline.models.loading import backbone, base_model

# Types of rotary embedding whose tables do not depend on the sequence length; longrope: up to the longest of stage 3.
FIXED_ROTARY = {"default", "linear", "llama3", "yarn", "longrope"}
# transformers' names of activations -> the function.
ACTIVATIONS = {
    "relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
LLAMA_SHAPE = {name: kind.norms for name, kind in MODEL_TYPES.items() if kind.norms}
# Fields of configurations that are understood, or change no forward pass, with `ModelType.fields` of one type. Others
# must be empty.
UNDERSTOOD = frozenset(PretrainedConfig.__dataclass_fields__) | set(
    """activation_function attention_bias attention_dropout attn_logit_softcapping attn_pdrop bos_token_id
    classifier_dropout do_layer_norm_before dropout embd_pdrop enable_bias eos_token_id ffn_dim final_logit_softcapping
    head_dim hidden_act hidden_activation hidden_dropout hidden_size init_std initializer_range intermediate_size
    layer_norm_elementwise_affine layer_norm_eps layer_norm_epsilon layer_types layerdrop max_position_embeddings
    max_window_layers mlp_bias n_embd n_head n_inner n_layer n_positions no_rope_layer_interval no_rope_layers
    num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings pad_token_id
    pretraining_tp query_pre_attn_scalar _remove_final_layer_norm resid_pdrop rms_norm_eps rope_parameters
    scale_attn_weights sliding_window summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj tie_word_embeddings use_cache use_parallel_residual use_sliding_window vocab_size
    word_embed_proj_dim""".split()
)


def read_architecture(model: nn.Module) -> Architecture:
    """Describe a transformers causal language model (or the one inside a peft wrapper).

    Raises:
        UnsupportedModel: its type or one of its settings is not supported.
    """
    inner = base_model(model)
    config, kind = inner.config, inner.config.model_type
    if kind not in READERS:
        raise UnsupportedModel(f"model type {kind} is not known")
    if declared(config, "scale_attn_weights") is False:
        raise UnsupportedModel("config.json: scale_attn_weights False")
    for problem in fields_not_understood(config):
        raise UnsupportedModel(f"config.json: {problem}")
    heads = config.num_attention_heads
    # transformers' layers of Llama's shape read head_dim, declared or not.
    head_dim = (kind in LLAMA_SHAPE and getattr(config, "head_dim", None)) or config.hidden_size // heads
    shared = {
        "tokens": inner.get_input_embeddings(),
        "head": inner.get_output_embeddings(),
        "num_heads": heads,
        "num_kv_heads": declared(config, "num_key_value_heads") or heads,
        "head_dim": head_dim,
        "scale": (declared(config, "query_pre_attn_scalar") or head_dim) ** -0.5,
        "activation": _activation(config),
    }
    architecture = READERS[kind](inner, shared)
    for norm in filter(None, (architecture.final_norm, *(architecture.blocks[0].head_norms or ()))):
        norm_kind(norm)
    return architecture


def fields_not_understood(config: PretrainedConfig) -> Iterator[str]:
    """Yield the settings of a supported type that this project does not understand: a field with a value.

    transformers' own forward pass may depend on it, in untested ways.
    """
    if config.model_type not in READERS:
        return
    understood = UNDERSTOOD | set(MODEL_TYPES[config.model_type].fields.split())
    for name in sorted(set(type(config).__dataclass_fields__) - understood):
        if getattr(config, name, None):
            yield f"{name} {getattr(config, name)} is not understood"
    for kind in sorted(rotary_types(config) - FIXED_ROTARY):
        yield f"rope_parameters: rotary positions of type {kind}"


def _activation(config: PretrainedConfig) -> str:
    name = next(n for n in ("hidden_activation", "hidden_act", "activation_function") if declared(config, n))
    value = getattr(config, name)
    if value not in ACTIVATIONS:
        raise UnsupportedModel(f"config.json: {name} {value} is not among {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _read_opt(model: OPTForCausalLM, shared: dict[str, Any]) -> Architecture:
    config, decoder = model.config, model.model.decoder
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
        positions=decoder.embed_positions,
        position_offset=decoder.embed_positions.offset,
        project_in=decoder.project_in,
        project_out=decoder.project_out,
        final_norm=decoder.final_layer_norm,
        **shared,
        norm_first=config.do_layer_norm_before,
    )


def _read_gpt2(model: GPT2LMHeadModel, shared: dict[str, Any]) -> Architecture:
    config, decoder = model.config, model.transformer

    def block(layer: Any) -> Block:
        return Block(
            **qkv_parts(layer.attn.c_attn, *[config.hidden_size] * 3),
            out=layer.attn.c_proj,
            up=(layer.mlp.c_fc,),
            down=layer.mlp.c_proj,
            attention_norm=layer.ln_1,
            mlp_norm=layer.ln_2,
        )

    return Architecture(
        blocks=[block(layer) for layer in decoder.h],
        positions=decoder.wpe,
        final_norm=decoder.ln_f,
        **shared,
    )


def _read_gpt_neox(model: GPTNeoXForCausalLM, shared: dict[str, Any]) -> Architecture:
    config, decoder = model.config, model.gpt_neox

    def block(layer: Any) -> Block:
        return Block(
            **qkv_parts(layer.attention.query_key_value, *[shared["head_dim"]] * 3, groups=shared["num_heads"]),
            out=layer.attention.dense,
            up=(layer.mlp.dense_h_to_4h,),
            down=layer.mlp.dense_4h_to_h,
            attention_norm=layer.input_layernorm,
            mlp_norm=layer.post_attention_layernorm,
            rotary="all",
        )

    return Architecture(
        blocks=[block(layer) for layer in decoder.layers],
        rotary={"all": decoder.rotary_emb},
        final_norm=decoder.final_layer_norm,
        **shared,
        is_parallel=config.use_parallel_residual,
    )


def _read_llama(model: PreTrainedModel, shared: dict[str, Any]) -> Architecture:
    config = model.config
    decoder: Any = backbone(model)
    joins_head_norms = config.model_type == "olmo2"
    rotary = {"all": decoder.rotary_emb}
    if config.model_type == "gemma3_text":
        rotary = {kind: partial(decoder.rotary_emb, layer_type=kind) for kind in set(config.layer_types)}
    factors = {(config.rope_parameters or {}).get("partial_rotary_factor", 1.0)}
    blocks = [_llama_block(config, layer, index, shared["head_dim"]) for index, layer in enumerate(decoder.layers)]
    if blocks[0].head_norms and not joins_head_norms and factors != {1.0}:
        raise UnsupportedModel("config.json: rope_parameters: partial_rotary_factor beside norms of q and k")
    return Architecture(
        blocks=blocks,
        rotary=rotary,
        final_norm=decoder.norm,
        **shared,
        embedding_scale=getattr(decoder.embed_tokens, "embed_scale", None),
        cap=declared(config, "attn_logit_softcapping") if config.model_type == "gemma2" else None,
        scaling=LogitScaling.from_config(config, 1.0),
        joins_head_norms=joins_head_norms,
        max_tokens=longrope_limit(config),
    )


def _llama_block(config: PretrainedConfig, layer: Any, index: int, head_dim: int) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    if hasattr(attention, "qkv_proj"):  # Phi-3
        qkv = qkv_parts(attention.qkv_proj, heads, kv_heads, kv_heads)
        up: Any = tuple(Rows(mlp.gate_up_proj, (config.intermediate_size,) * 2, part) for part in range(2))
    else:
        qkv = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
        up = (mlp.gate_proj, mlp.up_proj)
    kinds = declared(config, "layer_types")
    kind = kinds[index] if kinds else "sliding_attention"
    rotary = kind if config.model_type == "gemma3_text" else "all"
    names = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    norms = {
        name: None if attribute is None else getattr(layer, attribute)
        for name, attribute in zip(names, LLAMA_SHAPE[config.model_type], strict=True)
    }
    return Block(
        **qkv,
        out=attention.o_proj,
        up=up,
        down=mlp.down_proj,
        **norms,
        head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
        rotary=rotary if getattr(attention, "use_rope", True) else None,
        window=declared(config, "sliding_window") if kind == "sliding_attention" else None,
    )


def qkv_parts(layer: Any, *sizes: int, groups: int = 1) -> dict[str, Any]:
    """Return q, k and v of a layer that joins them, as fields of a Block."""
    return {name: Rows(layer, sizes, index, groups) for index, name in enumerate("qkv")}


READERS: dict[str, Callable[..., Architecture]] = {
    "gpt2": _read_gpt2, "gpt_neox": _read_gpt_neox, "opt": _read_opt, **dict.fromkeys(LLAMA_SHAPE, _read_llama),
}  # fmt: skip
