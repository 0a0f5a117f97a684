"""Facts about types of models: the tested ones, and the fields that configurations declare."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAX_LORA_RANK = 2**14  # as wide as the widest published models
MAX_LORA_ALPHA = 1_000_000  # far above published ones, which are below 1,000
# Fields that parts of transformers, or other programs, read in models of any class.
MISREAD = (
    "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping", "kv_sharing_modes", "layer_types",
    "logit_scale", "logits_scaling", "query_pre_attn_scalar", "sliding_window",
)  # fmt: skip

# Names of a layer's norms: before attention, after it, before the MLP, after it.
PRE_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip
GEMMA_NORM = (1.0, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """Facts about a tested type of models that the fast paths need beside its configuration.

    prefix: beginning of its classes' names in transformers, such as Llama in LlamaRMSNorm; empty without RMSNorms.
    norms: names of a layer's norms, for layers of Llama's shape; empty for others.
    norm: what an RMSNorm adds to its weight, and True if it rounds before the product with the weight.
    fused: parts of a layer that kernels compute in training: norm, which needs the default `norm`; gate, for an MLP
        down_proj(act_fn(gate_proj(x)) * up_proj(x)); rotary, if channel i of a head turns with channel i + D / 2.
    is_packed: several sequences may share a row, since only attention mixes tokens, with heads of one size.
    fields: fields of its configuration that change no forward pass, or that the layers handle.
    """

    prefix: str = ""
    norms: tuple[str | None, ...] = ()
    norm: tuple[float, bool] = (0.0, True)
    fused: str = ""
    is_packed: bool = False
    fields: str = ""


# Type -> what is known of it. tests/models/test_families.py takes each through the three stages (t5:
# tests/step1_sft/test_seq2seq.py, stage 1); models of other types load with a warning.
MODEL_TYPES = {
    "bloom": ModelType(),
    "gemma": ModelType(prefix="Gemma", norms=PRE_NORMS, norm=GEMMA_NORM, fused="gate rotary", is_packed=True),
    "gemma2": ModelType(prefix="Gemma2", norms=BOTH_NORMS, norm=GEMMA_NORM, fused="gate rotary"),
    "gemma3_text": ModelType(prefix="Gemma3", norms=BOTH_NORMS, norm=GEMMA_NORM, fused="gate rotary"),
    "gpt2": ModelType(),
    "gpt_neox": ModelType(is_packed=True),
    "llama": ModelType(prefix="Llama", norms=PRE_NORMS, fused="norm gate rotary", is_packed=True),
    "mistral": ModelType(prefix="Mistral", norms=PRE_NORMS, fused="norm gate rotary", is_packed=True),
    "olmo2": ModelType(prefix="Olmo2", norms=POST_NORMS, norm=(0.0, False), is_packed=True),
    "olmoe": ModelType(),
    "opt": ModelType(is_packed=True),
    "phi3": ModelType(prefix="Phi3", norms=PRE_NORMS, fused="norm rotary", is_packed=True),
    "qwen2": ModelType(prefix="Qwen2", norms=PRE_NORMS, fused="norm gate rotary", is_packed=True),
    "qwen3": ModelType(prefix="Qwen3", norms=PRE_NORMS, fused="norm gate rotary", is_packed=True),
    "qwen3_moe": ModelType(),
    "smollm3": ModelType(prefix="SmolLM3", norms=PRE_NORMS, fused="norm gate rotary", is_packed=True),
    "t5": ModelType(),
}


def fused_classes(part: str, ending: str) -> frozenset[str]:
    """Return the names of transformers' classes, which have this ending, whose `part` of a layer kernels compute."""
    return frozenset(f"{kind.prefix}{ending}" for kind in MODEL_TYPES.values() if part in kind.fused.split())


def declared(config: "PretrainedConfig", name: str) -> Any:
    """Return the field `name` of a transformers configuration; None if its class does not know that field.

    transformers keeps unknown fields of config.json as attributes, and its forward passes do not read them.
    """
    config_class: Any = type(config)
    return getattr(config, name, None) if knows_field(config_class, name) else None


@cache
def knows_field(config_class: Any, name: str) -> bool:
    """Return whether a class of configurations has the field `name`: declared, an alias, or set by its constructor."""
    if hasattr(config_class, name) or name in config_class.__dataclass_fields__ or name in config_class.attribute_map:
        return True
    try:
        return name in vars(config_class())
    except Exception:  # composite classes need their parts; a class may refuse its own defaults
        return False


def drop_unknown_fields(config: "PretrainedConfig") -> Iterator[str]:
    """Remove the fields of MISREAD that the configuration's class lacks; yield a line that names those with a value.

    The caches of transformers apply `sliding_window` if it is set; the forward pass without a cache, which trains, may
    not.
    """
    for part in (config, config.get_text_config(decoder=True)):
        config_class: Any = type(part)
        unknown = [name for name in MISREAD if name in vars(part) and not knows_field(config_class, name)]
        dropped = {name: vars(part).pop(name) for name in unknown}
        if names := ", ".join(name for name, value in dropped.items() if value is not None):
            yield f"{names}: ignored: transformers' class of this model, {config_class.__name__}, does not know it"
