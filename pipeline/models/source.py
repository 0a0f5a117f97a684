"""A model as its files describe it, before any weight is read: configuration, adapter, tokenizer, and their checks.

Weights are read in `loading.py`; checks of paths alone are in `paths.py`, those of files in `weight_files.py`.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from pipeline.data.templates import set_template
from pipeline.errors import InputError
from pipeline.files import CONFIG_FILES
from pipeline.hub import commits_read, go_offline_without_network, split_revision
from pipeline.model_types import declared, drop_unknown_fields
from pipeline.models.lora import stored_quantization
from pipeline.models.paths import at_flag, read_adapter_config, reading_error
from pipeline.models.tokenizers import (
    choose_padding_token,
    load_tokenizer,
    set_template_values,
    template_values,
    usable_ids,
)
from pipeline.models.weight_files import HARMLESS_FIELDS, check_model_files, check_sizes, check_text_model, warn_once

log = logging.getLogger(__name__)

MAX_LABELS = 10_000  # of a score head or a classifier; reading a configuration of 300,000 takes half a minute
# Private fields that transformers has written and does not read: the name in a GGUF file, and one of versions 4.
UNREAD_FIELDS = {"_model_name_or_path", "_attn_implementation_autoset"}


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model that is named by a hub id, a folder or an adapter folder; each of its files is read once, when needed.

    A stage creates one for each of its models. Reading a broken file raises InputError; an unreachable hub raises
    EnvironmentFault.
    """

    path: str
    _passed: set[bool] = field(default_factory=set, init=False, repr=False)  # values of `pickles` that passed `check`

    @cached_property
    def base(self) -> "ModelSource | None":
        """The model that an adapter folder names, None for a folder that holds a whole model."""
        adapter = read_adapter_config(Path(self.path).expanduser())
        return None if adapter is None else ModelSource(adapter["base_model_name_or_path"])

    @property
    def whole(self) -> "ModelSource":
        """The model whose weights are loaded: an adapter's base, or this one."""
        return self.base or self

    @cached_property
    def config(self) -> PretrainedConfig:
        """The configuration of the model, or of an adapter's base; a copy of it is what may be changed."""
        return _load_config(self)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of these files, with the run's template after `prepare_tokenizer`."""
        return load_tokenizer(self.path)

    @property
    def is_encoder_decoder(self) -> bool:
        """True for a model with an encoder besides its decoder, as T5 has."""
        return bool(self.config.is_encoder_decoder)

    @property
    def stored_quantization(self) -> str:
        """Storage format of the linear layers of the whole model: see `lora.stored_quantization`."""
        return stored_quantization(self.whole.config)

    def check(self, flag: str = "", *, pickles: bool = True) -> None:
        """Refuse a model whose file names, headers or config.json show that it cannot be loaded; the files once.

        Raises:
            InputError: as for check_model_files and `config`.
            EnvironmentFault: the hub cannot be reached.
        """
        if pickles not in self._passed:
            check_model_files(self.path, flag, pickles=pickles)
            for source in (self, self.whole):
                source._passed.add(pickles)
        _ = self.config


def _load_config(model: ModelSource) -> PretrainedConfig:
    """Load the configuration of a model, or of an adapter's base, without remote code and without private fields.

    Raises:
        InputError: it cannot be read, names an implementation that would be fetched from the hub and run, or belongs
            to a model that reads more than text.
        EnvironmentFault: the hub cannot be reached.
    """
    path, folder = model.path, Path(model.path).expanduser()
    # The adapter of a reward model has a configuration of its own: the base is a language model.
    source = str(folder if (folder / CONFIG_FILES[0]).is_file() else Path(model.whole.path).expanduser())
    name, revision = split_revision(source)
    is_folder, commit = Path(name).is_dir(), commits_read.get(source) or revision or "main"
    if not is_folder:
        go_offline_without_network()
    try:
        if not is_folder:  # the cache names the folder of a file after its commit
            commit = Path(str(cached_file(name, CONFIG_FILES[0], revision=commit))).parent.name
            commits_read[source] = commit
        raw, _ = PretrainedConfig.get_config_dict(name, revision=commit)
        if (labels := max(len(raw.get("id2label") or ()), raw.get("num_labels") or 0)) > MAX_LABELS:
            raise ValueError(f"config.json: got {labels:,} labels, expected at most {MAX_LABELS:,}")
        config = AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=False)
    except Exception as error:
        raise reading_error(path, "cannot read a model configuration", error) from error
    check_text_model(path, config, raw)
    check_sizes(path, config)
    # Fields that are private to transformers steer what it loads.
    declared = getattr(type(config), "__dataclass_fields__", {})
    private = [name for name in raw if name.startswith("_") and name not in (*HARMLESS_FIELDS, *declared)]
    private += [name for name in raw if name == "distributed_config"]  # with it transformers shards what it saves
    for name in private:
        vars(config).pop(name, None)
    config._attn_implementation = None
    if odd := [name for name in private if name not in UNREAD_FIELDS]:
        warn_once(f"{path}: config.json: private fields are ignored: {', '.join(odd)}")
    for line in drop_unknown_fields(config):
        warn_once(f"{path}: config.json: {line}")
    return config


def num_positions(config: PretrainedConfig) -> int | None:
    """Return how many tokens a sequence may have, None if the architecture has no limit (BLOOM)."""
    return declared(config.get_text_config(), "max_position_embeddings")


def has_key_value_cache(config: PretrainedConfig) -> bool:
    """Return True if the forward pass of a decoder takes a cache of keys and values.

    From transformers 5.24 on its name is `cache`, which models without attention take too, for their states.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not model_class:
        return True
    names = inspect.signature(model_class.forward).parameters
    has_attention = declared(config.get_text_config(), "num_attention_heads") is not None
    return "past_key_values" in names or ("cache" in names and has_attention)


def num_experts(config: PretrainedConfig) -> int:
    """Return how many experts a layer of a mixture of experts has, 0 for any other model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max(declared(config.get_text_config(), name) or 0 for name in names)


def check_whole_experts(source: ModelSource) -> None:
    """Raise InputError for a mixture of experts, which ZeRO-3 does not partition."""
    if count := num_experts(source.config):
        raise InputError(
            f"{source.path}: a mixture of {count} experts under ZeRO stage 3: all experts of a layer would be gathered "
            "for the few that a token uses; take ZeRO stage 0, 1 or 2"
        )


def check_decoder(source: ModelSource, flag: str = "") -> None:
    """Raise InputError for an encoder-decoder model, which stage 1 alone trains."""
    if source.is_encoder_decoder:
        raise InputError(
            f"{at_flag(flag)}{source.path} is an encoder-decoder model ({source.config.model_type}): stage 1 alone "
            "trains these; give a decoder (OPT, Llama, Qwen, ...)"
        )


def check_positions(source: ModelSource, longest: int, flag: str) -> None:
    """Raise InputError if sequences of `longest` tokens (the value of `flag`) do not fit into the model."""
    limit = num_positions(source.config)
    if limit is not None and longest > limit:
        raise InputError(f"{flag} {longest}: the model {source.path} has {limit} positions; {flag} {limit} is the most")


def check_stored_quantization(source: ModelSource, quantization: str, flag: str, *, learns: bool = True) -> None:
    """Raise InputError if the model is stored as int8 or nf4 and the value of `flag` is not, or as others."""
    stored, path = source.stored_quantization, source.whole.path
    if stored not in ("none", "int8", "nf4"):
        raise InputError(
            f"{path}: its weights are stored as {stored} (config.json: quantization_config), which cannot be trained "
            f"here; give its checkpoint in 16 bits, and {flag} int8 or nf4 with LoRA to quantise that while loading"
        )
    if stored not in ("none", quantization):
        raise InputError(f"{path}: its weights are stored as {stored}; give {flag} {stored}{', with LoRA' * learns}")


def attention_for(config: PretrainedConfig, requested: str, path: str, *, flag: str = "--attn-implementation") -> str:
    """Return the attention implementation to load a model with. Raises InputError for one that drops its soft caps.

    Older versions of transformers give Gemma 2 to sdpa, which silently ignores `attn_logit_softcapping`.
    """
    if not declared(config.get_text_config(), "attn_logit_softcapping"):
        return requested
    if requested == "sdpa":
        raise InputError(f"{flag} sdpa: {path} caps its attention scores, which sdpa cannot; give {flag} eager")
    return "eager" if requested == "auto" else requested


def prepare_tokenizer(source: ModelSource, template: str, kwargs: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with the run's chat template and a padding token that exists (the vocabulary never grows).

    kwargs: --chat-template-kwargs.

    The model's files are checked first, and that tokenizer and model match, since tokenising rows takes minutes and
    precedes loading. Raises InputError, EnvironmentFault.
    """
    source.check()
    tokenizer = source.tokenizer
    set_template(tokenizer, template, plain=source.is_encoder_decoder)
    set_template_values(tokenizer, template_values(kwargs), all_of=True)
    check_vocabulary(source, tokenizer)
    padding = choose_padding_token(tokenizer)
    if padding.source != "tokenizer":
        log.info("padding with %s (%s); masks never come from token ids", padding.token, padding.source)
        tokenizer.pad_token = padding.token
    return tokenizer


def check_vocabulary(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise InputError for a tokenizer that uses ids beyond the vocabulary of the model; warn of another EOS.

    More rows than ids are fine: published models pad their vocabulary. A special token beyond it that no row of data
    can hold is fine too: Gemma 3 has one for images. The tokenizer must already have its template.
    """
    path, config = source.path, source.config.get_text_config()
    size, largest = getattr(config, "vocab_size", None), max(usable_ids(tokenizer), default=-1)
    if size is not None and largest >= size:
        raise InputError(
            f"{path}: its tokenizer has ids up to {largest}, but the model's vocabulary has {size} rows: they do not "
            "belong together; copy the tokenizer files from the folder that the weights came from"
        )
    eos = getattr(config, "eos_token_id", None)
    ends = [eos] if isinstance(eos, int) else eos or []
    if ends and tokenizer.eos_token_id not in ends:
        warn_once(
            f"{path}: config.json ends texts with id {ends}, the tokenizer with {tokenizer.eos_token_id} "
            f"({tokenizer.eos_token}); the tokenizer's is trained"
        )
