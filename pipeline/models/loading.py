"""Check and load language models: hub ids, folders and adapter folders, always with dropout off.

Configuration and files are checked before any weight is read. Reward heads are in `reward_model.py`, LoRA in `lora.py`.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import cached_file

from pipeline import dist
from pipeline.config_fields import declared, drop_unknown_fields
from pipeline.errors import InputError
from pipeline.files import CONFIG_FILES
from pipeline.hub import commits_read, go_offline_without_network, split_revision
from pipeline.models.lora import (
    check_quantization,
    merge_adapter,
    nf4_options,
    quantise_to_int8,
    quantization_of,
    settle_nf4,
    stored_quantization,
)
from pipeline.models.paths import at_flag, check_language_model, read_adapter_config, reading_error
from pipeline.models.weight_files import HARMLESS_FIELDS, check_model_files, check_text_model, warn_once
from pipeline.out_of_memory import is_out_of_memory

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def default_device() -> torch.device:
    return torch.device("cuda" if dist.has_gpu() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 for devices that compute in it natively, else fp32."""
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


def load_config(path: str) -> PretrainedConfig:
    """Load the configuration of a model, or of an adapter's base, without remote code and without private fields.

    Raises:
        InputError: it cannot be read, names an implementation that would be fetched from the hub and run, or belongs
            to a model that reads more than text.
        EnvironmentFault: the hub cannot be reached.
    """
    base, folder = adapter_base(path), Path(path).expanduser()
    # The adapter of a reward model has a configuration of its own: the base is a language model.
    source = str(folder if base is None or (folder / CONFIG_FILES[0]).is_file() else Path(base).expanduser())
    name, revision = split_revision(source)
    is_folder, commit = Path(name).is_dir(), commits_read.get(source) or revision or "main"
    if not is_folder:
        go_offline_without_network()
    try:
        if not is_folder:  # the cache names the folder of a file after its commit
            commit = Path(str(cached_file(name, CONFIG_FILES[0], revision=commit))).parent.name
            commits_read[source] = commit
        raw, _ = PretrainedConfig.get_config_dict(name, revision=commit)
        config = AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=False)
    except Exception as error:
        raise reading_error(path, "cannot read a model configuration", error) from error
    check_text_model(path, config, raw)
    # Fields that are private to transformers steer what it loads.
    declared = getattr(type(config), "__dataclass_fields__", {})
    private = [name for name in raw if name.startswith("_") and name not in (*HARMLESS_FIELDS, *declared)]
    for name in private:
        vars(config).pop(name, None)
    config._attn_implementation = None
    if private:
        warn_once(f"{path}: config.json: private fields are ignored: {', '.join(private)}")
    for found in drop_unknown_fields(config):
        warn_once(f"{path}: config.json: {found}")
    return config


def num_positions(config: PretrainedConfig) -> int | None:
    """Return how many tokens a sequence may have, None if the architecture has no limit (BLOOM)."""
    return declared(config.get_text_config(), "max_position_embeddings")


def num_experts(config: PretrainedConfig) -> int:
    """Return how many experts a layer of a mixture of experts has, 0 for any other model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max(declared(config.get_text_config(), name) or 0 for name in names)


def check_whole_experts(path: str) -> None:
    """Raise InputError for a mixture of experts, which ZeRO-3 does not partition. Reads only config.json."""
    if count := num_experts(load_config(path)):
        raise InputError(
            f"{path}: a mixture of {count} experts under ZeRO stage 3: all experts of a layer would be gathered for "
            "the few that a token uses; take ZeRO stage 0, 1 or 2"
        )


def dropout_fields(config: PretrainedConfig) -> list[str]:
    """Return the config fields that make forward passes random: dropouts (OPT's are functional) and layer drop."""
    words = ("dropout", "dropout_prob", "dropout_rate", "pdrop", "layerdrop")
    return [name for name, value in vars(config).items() if isinstance(value, float) and name.endswith(words)]


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of `config` whose forward passes are the same in training and evaluation mode."""
    quiet = copy.deepcopy(config)
    for name in dropout_fields(quiet):
        setattr(quiet, name, 0.0)
    return quiet


def check_model(path: str, flag: str = "") -> None:
    """Refuse a model whose file names, headers or config.json show that it cannot be loaded.

    Raises:
        InputError: as for check_model_files and load_config.
        EnvironmentFault: the hub cannot be reached.
    """
    check_model_files(path, flag)
    load_config(path)


def is_encoder_decoder(path: str) -> bool:
    """Return whether the model at `path` has an encoder besides its decoder, as T5 has. Reads only config.json."""
    return bool(load_config(path).is_encoder_decoder)


def check_decoder(path: str, flag: str = "") -> None:
    """Raise InputError for an encoder-decoder model, which stage 1 alone trains. Reads only config.json."""
    if is_encoder_decoder(path):
        raise InputError(
            f"{at_flag(flag)}{path} is an encoder-decoder model ({load_config(path).model_type}): stage 1 alone trains "
            "these; give a decoder (OPT, Llama, Qwen, ...)"
        )


def check_positions(path: str, longest: int, flag: str) -> None:
    """Raise InputError if sequences of `longest` tokens (the value of `flag`) do not fit into the model at `path`.

    Reads only config.json.
    """
    limit = num_positions(load_config(path))
    if limit is not None and longest > limit:
        raise InputError(f"{flag} {longest}: the model {path} has {limit} positions; {flag} {limit} is the most")


def load_causal_lm(path: str, **settings: Any) -> PreTrainedModel:
    """Load a language model as `load_language_model` does. Raises InputError for an encoder-decoder model."""
    check_language_model(path)
    check_decoder(path)
    return load_language_model(path, **settings)


def load_language_model(
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "auto",
    quantization: str = "auto",
    merged: bool = True,
) -> PreTrainedModel:
    """Load a decoder or an encoder-decoder model: a hub id, a folder, or an adapter folder.

    Args:
        quantization: of the base's linear layers: none, int8, nf4, or auto: as they are stored.
        merged: merge an adapter into its base; False, or a quantised base: return peft's wrapper, to be trained on.
    """
    check_language_model(path)
    base = adapter_base(path)
    if base is not None:
        check_model_files(path)
    options: dict[str, Any] = {"attn_implementation": attn_implementation, "quantization": quantization}
    if is_encoder_decoder(path):
        with head_apart_under_zero3(load_config(path)):
            model = load_pretrained(AutoModelForSeq2SeqLM, base or path, dtype=dtype, **options)
        if hasattr(getattr(model, "lm_head", None), "weight"):  # T5Gemma's and BERT's have other names
            model.source_config.tie_word_embeddings = "lm_head.weight" in model.all_tied_weights_keys
    else:
        model = load_pretrained(AutoModelForCausalLM, base or path, dtype=dtype, **options)
    return model if base is None else with_adapter(model, path, merged=merged)


def with_adapter(model: Any, path: str, *, merged: bool) -> Any:
    """Put the adapter in the folder `path` on its base model, or merge it into the base's weights.

    A quantised base keeps its adapter apart.
    """
    from peft import PeftConfig, PeftModel

    folder, merged = str(Path(path).expanduser()), merged and quantization_of(model) == "none"
    try:
        config = PeftConfig.from_pretrained(folder)
        if not model.can_generate() and config.task_type == "CAUSAL_LM":
            config.task_type = None  # a reward model that starts from the adapter of a language model
        with warnings.catch_warnings():  # of GPT-2's layers, which are stored transposed, but not once quantised
            warnings.filterwarnings("ignore", "fan_in_fan_out")
            wrapped: Any = PeftModel.from_pretrained(model, folder, config=config, is_trainable=not merged)
        return merge_adapter(wrapped) if merged else wrapped
    except Exception as error:
        raise reading_error(path, "cannot load the adapter", error) from error


@contextmanager
def head_apart_under_zero3(config: PretrainedConfig) -> Iterator[None]:
    """Keep the head of T5 1.1 and FLAN-T5 apart from the embeddings while a model is loaded into ZeRO-3 partitions.

    transformers declares all of T5 as tied, and finds out by comparing the loaded weights whether a head is one of its
    own; partitioned weights are empty, and so equal. Their outputs are not scaled: that tells them from T5.
    """
    if not is_deepspeed_zero3_enabled() or getattr(config, "scale_decoder_outputs", True):
        yield
        return
    model_class: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
    tied = model_class._tied_weights_keys
    model_class._tied_weights_keys = {name: source for name, source in tied.items() if name != "lm_head.weight"}
    try:
        yield
    finally:
        model_class._tied_weights_keys = tied


def adapter_base(path: str) -> str | None:
    """Return the base model that an adapter folder names, None for a folder that holds a whole model."""
    config = read_adapter_config(Path(path).expanduser())
    return None if config is None else config["base_model_name_or_path"]


def load_pretrained(
    auto_class: Any,
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str,
    quantization: str = "auto",
    may_lack: frozenset[str] = frozenset(),
    pickles: bool = True,
    **changes: Any,
) -> Any:
    """Call `auto_class.from_pretrained` with dropout off; `model.source_config` keeps the untouched configuration.

    `dtype` is always passed: OPT's hub files are fp16. Weights come from safetensors; a base model that only has
    `.bin` files is read by transformers with weights_only, and a warning says so.

    Args:
        quantization: of the linear layers but the heads: none, int8, nf4, or auto: as they are stored.
        may_lack: weights that may be missing in the files.
        pickles: True allows `.bin` files.
        changes: fields of the configuration to set.

    Raises:
        InputError: no model at `path`, weights missing in its files (they would be random), or stored as int8 or nf4
            where others are needed.
        EnvironmentFault: the hub cannot be reached, or bitsandbytes is not installed.
    """
    check_quantization(quantization, "--quantization")
    check_model_files(path, pickles=pickles)
    path = str(Path(path).expanduser())
    source = load_config(path)
    config = without_dropout(source)
    stored = stored_quantization(source)
    if quantization == "auto":
        quantization = stored
        check_quantization(stored, f"{path}: its weights are stored as")
    else:
        check_stored_quantization(path, quantization, "--quantization")
    if stored != "none":
        del source.quantization_config  # what is trained on it is saved without it
    for name, value in changes.items():
        setattr(config, name, value)
    # The commit of the configuration: a branch may move in between.
    options: dict[str, Any] = {"revision": commits_read.get(path, "main")}
    if (attention := attention_for(config, attn_implementation, path)) != "auto":
        options["attn_implementation"] = attention
    if not pickles:
        options["use_safetensors"] = True
    if quantization == "nf4":
        options |= nf4_options(config, dtype)
    name, _ = split_revision(path)
    try:
        model, info = auto_class.from_pretrained(
            name, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
        )
    except Exception as error:
        if dist.follows_from_another_rank(error) or is_out_of_memory(error):  # under ZeRO-3 loading is a collective
            raise
        raise reading_error(path, "cannot load the model", error) from error
    if missing := sorted(set(info["missing_keys"]) - may_lack):
        raise InputError(f"{path}: {len(missing)} weights are not in its files, the first is {missing[0]}")
    model.source_config = source
    if quantization == "int8":
        quantise_to_int8(model)
    elif quantization == "nf4":
        settle_nf4(model, dtype)
    return model


def check_stored_quantization(path: str, quantization: str, flag: str) -> None:
    """Raise InputError if the model at `path` is stored as int8 or nf4 and the value of `flag` is not, or as others."""
    stored = stored_quantization(load_config(path))
    if stored not in ("none", "int8", "nf4"):
        raise InputError(
            f"{path}: its weights are stored as {stored} (config.json: quantization_config), which cannot be trained "
            f"here; give its checkpoint in 16 bits, and {flag} int8 or nf4 with LoRA to quantise that while loading"
        )
    if stored not in ("none", quantization):
        raise InputError(f"{path}: its weights are stored as {stored}; give {flag} {stored}, with LoRA")


def attention_for(config: PretrainedConfig, asked: str, path: str, *, flag: str = "--attn_implementation") -> str:
    """Return the attention implementation to load a model with. Raises InputError for one that drops its soft caps.

    Older versions of transformers give Gemma 2 to sdpa, which leaves `attn_logit_softcapping` out without a word.
    """
    if not declared(config.get_text_config(), "attn_logit_softcapping"):
        return asked
    if asked == "sdpa":
        raise InputError(f"{flag} sdpa: {path} caps its attention scores, which sdpa cannot; give {flag} eager")
    return "eager" if asked == "auto" else asked


def base_model(model: Any) -> Any:
    """Return the transformers model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(model: Any) -> nn.Module:
    """Return the transformer without its head, which maps input ids to `last_hidden_state` (B, S, H)."""
    inner = base_model(model)
    return getattr(inner, inner.base_model_prefix)


def use_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass; inputs get gradients, so that LoRA layers do too."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
