"""Fields of a model's configuration that its class in transformers declares; config.json may hold others."""

from collections.abc import Iterator
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
