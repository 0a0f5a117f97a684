"""Load the weights of language models, always with dropout off: hub ids, folders and adapter folders.

Configuration and files are checked first (`source.py`). Reward heads are in `reward_model.py`, LoRA in `lora.py`.
"""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING as PEFT_CLASSES
from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
from torch import nn
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from pipeline import dist
from pipeline.errors import InputError, RunError
from pipeline.hub import commits_read, split_revision
from pipeline.models.lora import (
    check_quantization,
    merge_adapter,
    nf4_options,
    quantise_to_int8,
    quantization_of,
    settle_nf4,
)
from pipeline.models.paths import check_language_model, reading_error
from pipeline.models.source import ModelSource, attention_for, check_decoder, check_stored_quantization
from pipeline.models.weight_files import ADAPTER_WEIGHTS, warn_once
from pipeline.out_of_memory import is_out_of_memory
from pipeline.processes import TimeLimitError, time_limit

LAYER = re.compile(r"\.\d+\.")  # in the name of a layer's weight
# Fields of an adapter's configuration that are one regular expression, or hold some.
PATTERNS = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")
MAX_MATCH_S = 5.0  # for the regular expressions of an adapter, which take milliseconds
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def default_device() -> torch.device:
    return torch.device("cuda" if dist.find_gpu() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 for devices that compute in it natively, else fp32."""
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


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


class LoadSettings(TypedDict, total=False):
    """Settings by which the weights of a model are loaded.

    dtype: that of the loaded weights.
    attn_implementation: the attention kernel, see `attention_for`; auto if it is left out.
    quantization: of the linear layers but the heads: none, int8, nf4, or auto: as they are stored. auto if left out.
    """

    dtype: Required[torch.dtype]
    attn_implementation: str
    quantization: str


def load_causal_lm(path: str, *, merged: bool = True, **settings: Unpack[LoadSettings]) -> PreTrainedModel:
    """Load a language model as `load_language_model` does. Raises InputError for an encoder-decoder model."""
    source = ModelSource(path)
    check_language_model(path)
    check_decoder(source)
    return load_language_model(source, merged=merged, **settings)


def load_language_model(
    source: ModelSource, *, merged: bool = True, **settings: Unpack[LoadSettings]
) -> PreTrainedModel:
    """Load a decoder or an encoder-decoder model: a hub id, a folder, or an adapter folder.

    Args:
        merged: merge an adapter into its base; False, or a quantised base: return peft's wrapper, to be trained on.
    """
    check_language_model(source.path)
    if source.base is not None:
        source.check()
    if source.is_encoder_decoder:
        with head_apart_under_zero3(source.config):
            model = load_pretrained(AutoModelForSeq2SeqLM, source.whole, **settings)
        if hasattr(getattr(model, "lm_head", None), "weight"):  # T5Gemma's and BERT's have other names
            model.source_config.tie_word_embeddings = "lm_head.weight" in model.all_tied_weights_keys
    else:
        model = load_pretrained(AutoModelForCausalLM, source.whole, **settings)
    return model if source.base is None else with_adapter(model, source.path, merged=merged)


def with_adapter(model: PreTrainedModel, path: str, *, merged: bool) -> Any:
    """Put the adapter in the folder `path` on its base model, or merge it into the base's weights.

    A quantised base has its adapter beside it, not merged.
    """
    folder, merged = str(Path(path).expanduser()), merged and quantization_of(model) == "none"
    try:
        config = PeftConfig.from_pretrained(folder)
        if config.is_prompt_learning:
            raise InputError(f"{path}: an adapter of {config.peft_type} learns a prompt, not weights; give one of LoRA")
        if not model.can_generate() and config.task_type == "CAUSAL_LM":
            config.task_type = None  # a reward model that starts from the adapter of a language model
        config.inference_mode = merged
        fields = [getattr(config, name, None) for name in PATTERNS]  # each kind of adapter has some of them
        patterns = [one for field in fields for one in ([field] if isinstance(field, str) else field or ())]
        with time_limit(MAX_MATCH_S):
            for pattern in patterns:
                _ = [re.fullmatch(pattern, name) for name, _ in model.named_modules()]
        with warnings.catch_warnings():  # of GPT-2's layers, which are stored transposed, but not once quantised
            warnings.filterwarnings("ignore", "fan_in_fan_out")
            wrapped: Any = PEFT_CLASSES.get(config.task_type, PeftModel)(model, config)
        # `PeftModel.from_pretrained` does not return what it lacked.
        loaded = set_peft_model_state_dict(wrapped, load_peft_weights(folder, device="cpu"))
        check_adapter_names(wrapped, loaded, path)
        return merge_adapter(wrapped) if merged else wrapped
    except RunError:
        raise
    except TimeLimitError:
        raise InputError(f"{path}: its target_modules take more than {MAX_MATCH_S:g} s to match; list names") from None
    except Exception as error:
        if isinstance(error, KeyError) and "base_model." in str(error):  # of a module that is saved whole
            raise InputError(f"{path}: 1 weights are not in its {ADAPTER_WEIGHTS}, the first is {error}") from error
        raise reading_error(path, "cannot load the adapter", error) from error


def check_adapter_names(wrapped: PeftModel, loaded: Any, path: str) -> None:
    """Raise InputError if the file of an adapter lacks weights, which peft leaves random, or holds others.

    Args:
        loaded: the names that torch did not find, and those that the model does not have.
    """
    weights = dict(wrapped.named_parameters(remove_duplicate=False))  # some kinds share one between their layers
    absent = set(loaded.missing_keys)
    present = {id(weight) for name, weight in weights.items() if name not in absent}
    missing = [name for name, weight in weights.items() if ".default" in name and id(weight) not in present]
    # The head of a language model may go where another takes its place.
    keeps_head = base_model(wrapped).can_generate() or wrapped.active_peft_config.task_type is not None
    others = [name for name in loaded.unexpected_keys if LAYER.search(name) or keeps_head]
    for names, fault in ((missing, "are not in"), (others, "of another model are in")):
        if names:
            raise InputError(f"{path}: {len(names)} weights {fault} its {ADAPTER_WEIGHTS}, the first is {names[0]}")


@contextmanager
def head_apart_under_zero3(config: PretrainedConfig) -> Iterator[None]:
    """Separate the head of T5 1.1 and FLAN-T5 from the embeddings while a model is loaded into ZeRO-3 partitions.

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


def load_pretrained(
    auto_class: Any,
    source: ModelSource,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "auto",
    quantization: str = "auto",
    may_lack: frozenset[str] = frozenset(),
    pickles: bool = True,
    **changes: Any,
) -> Any:
    """Call `auto_class.from_pretrained` with dropout off; `model.source_config` keeps the untouched configuration.

    `dtype` is always passed: OPT's hub files are fp16. Weights come from safetensors; a base model that only has
    `.bin` files is read by transformers with weights_only, and a warning says so.

    Args:
        source: a whole model, no adapter.
        quantization: of the linear layers but the heads: none, int8, nf4, or auto: as they are stored.
        may_lack: weights that may be missing in the files.
        pickles: True allows `.bin` files.
        changes: fields of the configuration to set.

    Raises:
        InputError: no model at `source`, weights missing in its files (they would be random), or stored as int8 or nf4
            where others are needed.
        EnvironmentFault: the hub cannot be reached, or bitsandbytes is not installed.
    """
    check_quantization(quantization, "--quantization")
    source.check(pickles=pickles)
    path = str(Path(source.path).expanduser())
    if quantization == "auto":
        quantization = source.stored_quantization
        check_quantization(quantization, f"{path}: its weights are stored as")
    else:
        check_stored_quantization(source, quantization, "--quantization")
    config, saved_config = without_dropout(source.config), copy.deepcopy(source.config)
    if source.stored_quantization != "none":
        del saved_config.quantization_config  # what is trained on it is saved without it
    for name, value in changes.items():
        setattr(config, name, value)
    options: dict[str, Any] = {"use_safetensors": True} if not pickles else {}
    if (attention := attention_for(config, attn_implementation, path)) != "auto":
        options["attn_implementation"] = attention
    if quantization == "nf4":
        options |= nf4_options(config, dtype)
    model = read_weights(auto_class, path, config, may_lack, dtype=dtype, **options)
    model.source_config = saved_config
    if quantization == "int8":
        quantise_to_int8(model)
    elif quantization == "nf4":
        settle_nf4(model, dtype)
    return model


def read_weights(auto_class: Any, path: str, config: PretrainedConfig, may_lack: frozenset[str], **options: Any) -> Any:
    """Return the model of `config` with the weights at `path`. Raises as `load_pretrained`."""
    name, _ = split_revision(path)
    revision = commits_read.get(path, "main")  # that of the configuration: a branch may move in between
    try:
        model, info = auto_class.from_pretrained(
            name, config=config, output_loading_info=True, trust_remote_code=False, revision=revision, **options
        )
    except Exception as error:
        if dist.follows_from_another_rank(error) or is_out_of_memory(error):  # under ZeRO-3 loading is a collective
            raise
        raise reading_error(path, "cannot load the model", error) from error
    if missing := sorted(set(info["missing_keys"]) - may_lack):
        raise InputError(f"{path}: {len(missing)} weights are not in its files, the first is {missing[0]}")
    if others := sorted(name for name in info["unexpected_keys"] if LAYER.search(name)):  # a head may go
        warn_once(
            f"{path}: {len(others)} weights of layers that its config.json does not have are left out: {others[0]}, ..."
        )
    return model


class WrappedModel(nn.Module):
    """A transformers model, or peft's wrapper of one, inside a module that has a forward pass of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    @property
    def config(self) -> Any:
        return base_model(self.model).config


def base_model(model: nn.Module) -> Any:
    """Return the transformers model inside a peft wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def backbone(model: nn.Module) -> nn.Module:
    """Return the transformer without its head, which maps input ids to `last_hidden_state` (B, S, H)."""
    inner = base_model(model)
    return getattr(inner, inner.base_model_prefix)


def use_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass; inputs get gradients, so that LoRA layers do too."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
