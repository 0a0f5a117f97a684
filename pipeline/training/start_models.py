"""The models that a stage starts from, with every check that takes config.json, tokenizers and headers of weights only.

A stage makes the checks before it reads data. The dry run and `rlhf train` make the same ones for all stages of a
command, with the model that an earlier stage starts from in the place of the one that it will make.
"""

import inspect
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import is_flash_attn_2_available

from pipeline.configuration.ds_json import read_user_json
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig, OptimizerConfig
from pipeline.errors import EnvironmentFault, InputError
from pipeline.models.architecture import longrope_limit
from pipeline.models.loading import (
    adapter_base,
    attention_for,
    check_model,
    check_stored_quantization,
    check_whole_experts,
    is_encoder_decoder,
    load_config,
    num_experts,
)
from pipeline.models.lora import check_quantization, linear_names
from pipeline.models.tokenizers import load_tokenizer
from pipeline.models.weight_files import check_plain_lora, warn_if_untested, warn_once

Check = Callable[[], object]
# Programs with which DeepSpeed compiles its asynchronous files -> where they are from.
BUILT_WITH = {"g++": "Debian, Ubuntu: apt-get install g++", "ninja": "pip install ninja"}


@dataclass(frozen=True, slots=True)
class StartModel:
    """A model that a stage starts from, and its checks, which raise InputError or EnvironmentFault.

    flag, path: how the user names it.
    check_kind: takes (path, flag) of an existing folder or a hub id: the model is of the kind that the stage needs.
    packages: checks that need no model.
    fits: checks of the settings against the model; they may read the models before it too.
    """

    flag: str
    path: str
    check_kind: Callable[[str, str], None]
    packages: Sequence[Check] = ()
    fits: Sequence[Check] = ()

    def check_files(self) -> None:
        """Raise InputError if the files at `path` are no model of the right kind."""
        self.check_kind(self.path, self.flag)
        check_model(self.path, self.flag)

    def warn_of_limits(self) -> None:
        """Warn of a type of model that no test trains, and of what is not trained in a mixture of experts."""
        config = load_config(self.path)
        warn_if_untested(self.path, config.model_type)
        if num_experts(config):
            text = "mixture of experts: the router's auxiliary loss is not added, and experts get no LoRA"
            warn_once(f"{self.path}: {text}")


def check_start_models(models: Sequence[StartModel]) -> None:
    """Make all checks of a stage's start models. Raises the first InputError or EnvironmentFault."""
    for model in models:
        model.check_files()
        for check in (*model.packages, *model.fits):
            check()
    for model in models:  # of models that nothing refuses
        model.warn_of_limits()


def package_checks(
    settings: ModelConfig, optimizer: OptimizerConfig, deepspeed: DeepSpeedConfig, prefix: str = ""
) -> list[Check]:
    """Return the checks of packages that a trained model needs; `prefix` is that of its flags (actor_)."""
    return [
        partial(check_optimizer_states, optimizer.optimizer_states),
        partial(check_disk_offload, deepspeed.deepspeed_config),
        partial(check_attention, settings.attn_implementation, f"--{prefix}attn_implementation"),
        partial(check_quantization, settings.quantization, f"--{prefix}quantization"),
    ]


def check_attention(implementation: str, flag: str) -> None:
    """Raise EnvironmentFault for an attention implementation, the value of `flag`, whose package is not installed."""
    if implementation == "flash_attention_2" and not is_flash_attn_2_available():
        raise EnvironmentFault(
            f"{flag} flash_attention_2: the package flash_attn is not installed; give {flag} sdpa, which has a flash "
            "kernel of its own on GPUs"
        )


def check_optimizer_states(states: str) -> None:
    """Raise EnvironmentFault for moments in 8 bits where bitsandbytes is not installed."""
    if states == "8bit" and find_spec("bitsandbytes") is None:
        raise EnvironmentFault("--optimizer_states 8bit: pip install bitsandbytes, which is not installed here")


def check_disk_offload(file: str) -> None:
    """Look for what DeepSpeed compiles its asynchronous files with, where the user's JSON `file` offloads to NVMe.

    Raises:
        EnvironmentFault: something is missing; a line names its package.
    """
    zero = read_user_json(file).get("zero_optimization", {}) if file else {}
    asked = [name for name in ("offload_optimizer", "offload_param") if (zero.get(name) or {}).get("device") == "nvme"]
    if not asked:
        return
    missing = [f"{program} ({package})" for program, package in BUILT_WITH.items() if shutil.which(program) is None]
    if not missing:
        from pipeline.engine.start import has_asynchronous_files  # imports DeepSpeed, which takes seconds

        missing = (
            [] if has_asynchronous_files() else ["libaio and its headers (Debian, Ubuntu: apt-get install libaio-dev)"]
        )
    if missing:
        key = f"--deepspeed_config {file}: zero_optimization.{asked[0]}.device nvme"
        raise EnvironmentFault(f"{key}: found no {' and no '.join(missing)}; install it, or offload to cpu")


def check_settings(path: str, settings: ModelConfig, prefix: str = "") -> None:
    """Raise InputError if the model at `path` cannot follow its flags, which begin with `prefix` (actor_).

    Weights that are stored as int8 or nf4 are trained on as such, ZeRO-3 partitions no experts, the attention
    implementation leaves no soft caps out, and LoRA's pattern matches a layer of the model, which is built without
    memory.
    """
    if settings.partitioned == "weights":
        check_whole_experts(path)
    check_stored_quantization(adapter_base(path) or path, settings.quantization, f"--{prefix}quantization")
    attention_for(load_config(path), settings.attn_implementation, path, flag=f"--{prefix}attn_implementation")
    is_adapter, is_quantised = adapter_base(path) is not None, settings.quantization != "none"
    if settings.lora_dim and is_adapter and not is_quantised:
        check_plain_lora(path)
    if settings.lora_dim and not (is_adapter and is_quantised):
        auto_class = AutoModelForSeq2SeqLM if is_encoder_decoder(path) else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto_class.from_config(load_config(path))
        linear_names(model, settings.lora_module_name, flag=f"--{prefix}lora_module_name")


def check_rotary_length(path: str, longest: int, flag: str) -> None:
    """Raise InputError if sequences that grow to `longest` tokens (the value of `flag`) change their first positions.

    Longrope takes other frequencies for all tokens of a pass that is longer than the original length: keys that a
    sampler has cached would keep the former ones, and a row's log-probabilities would depend on its micro-batch.
    """
    limit = longrope_limit(load_config(path).get_text_config())
    if limit is not None and longest > limit:
        raise InputError(
            f"{flag} {longest}: the model {path} has other rotary positions (longrope) above {limit} tokens, which a "
            f"sampler's cache cannot follow; {flag} {limit} is the most"
        )


def check_cache(path: str, flag: str) -> None:
    """Raise InputError for a decoder at `path` that keeps no keys and values, from which stage 3 samples on.

    Reads only config.json.
    """
    config = load_config(path)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class and "past_key_values" not in inspect.signature(model_class.forward).parameters:
        raise InputError(
            f"{flag} {path}: {config.model_type} has no cache of keys and values, which stage 3 samples with; stage 1 "
            "trains it"
        )


def same_tokens(first: object, second: object) -> bool:
    """Tell whether two tokenizers map text to the same ids."""
    return first.get_vocab() == second.get_vocab()  # type: ignore[attr-defined]


def check_critic_tokens(path: str, actor: str, flag: str) -> None:
    """Raise InputError if the tokenizer of the critic at `path` is not that of the model at `actor`."""
    if path != actor and not same_tokens(load_tokenizer(path), load_tokenizer(actor)):
        raise InputError(
            f"{flag} {path}: its tokenizer is not that of {actor}; a critic reads the actor's tokens. Start the critic "
            "from a model of the actor's family and give this one as --reward_model_name_or_path"
        )
