"""Loading causal language models: one loader for hub ids, folders and adapter folders, with dropout off."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pipeline.errors import InputError
from pipeline.model_paths import check_model_path

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device computes in it at speed, else fp32."""
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def dropout_names(config: PretrainedConfig) -> list[str]:
    """Config fields that make forward passes random: dropouts (OPT's are functional) and layer drop."""
    words = ("dropout", "dropout_prob", "pdrop", "layerdrop")
    return [name for name, value in vars(config).items() if isinstance(value, float) and name.endswith(words)]


def load_config(path: str) -> PretrainedConfig:
    """The configuration of a model, or of an adapter's base. Raises InputError in one line where there is none."""
    try:
        return AutoConfig.from_pretrained(adapter_base(path) or path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read a model configuration: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config` whose forward passes are the same in training and evaluation mode."""
    quiet = copy.deepcopy(config)
    for name in dropout_names(quiet):
        setattr(quiet, name, 0.0)
    return quiet


def load_pretrained(
    auto_class: Any,
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    may_lack: frozenset[str] = frozenset(),
    **changes: Any,
) -> Any:
    """`auto_class.from_pretrained` with dropout off; the untouched configuration is kept as `model.source_config`.

    `dtype` is always passed: OPT's hub files are fp16. Weights come from safetensors; a base model that only has
    `.bin` files is read by transformers with weights_only, which says so.

    Args:
        may_lack: weights that the files need not hold.
        changes: fields of the configuration to set.

    Raises:
        InputError: no model there, or weights missing in its files (they would be random).
    """
    check_model_path(path)
    source = load_config(path)
    config = without_dropout(source)
    for name, value in changes.items():
        setattr(config, name, value)
    attention = {} if attn_implementation == "auto" else {"attn_implementation": attn_implementation}
    try:
        model, info = auto_class.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **attention
        )
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"{path}: cannot load the model: {first_line(error)}") from error
    if missing := sorted(set(info["missing_keys"]) - may_lack):
        raise InputError(f"{path}: {len(missing)} weights are not in its files, the first is {missing[0]}")
    model.source_config = source
    return model


def adapter_base(path: str) -> str | None:
    """The base model that an adapter folder names, or None for a folder that holds a whole model."""
    file = Path(path) / "adapter_config.json"
    return json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"] if file.is_file() else None


def load_causal_lm(path: str, *, dtype: torch.dtype, attn_implementation: str = "auto") -> PreTrainedModel:
    """The causal language model at `path` (hub id, folder, or peft adapter folder, which is merged into its base)."""
    base = adapter_base(path)
    model = load_pretrained(AutoModelForCausalLM, base or path, dtype=dtype, attn_implementation=attn_implementation)
    if base is None:
        return model
    from peft import PeftModel

    merged: Any = PeftModel.from_pretrained(model, path).merge_and_unload()
    merged.source_config = model.source_config
    return merged


def use_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass; the inputs get gradients so that LoRA layers are reached."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


def base_model(model: Any) -> Any:
    """The transformers model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> nn.Module:
    """The transformer without its head: input ids -> `last_hidden_state` (B, S, H)."""
    inner = base_model(model)
    return getattr(inner, inner.base_model_prefix)
