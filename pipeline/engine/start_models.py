"""The models that a stage starts from, with all checks that need only config.json, tokenizers and weight headers.

A stage runs the checks before it reads data. The dry run and `rlhf train` run them for all stages of a command. If an
earlier stage will write a stage's model, they check the model that the earlier stage starts from.
"""

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.utils import is_flash_attn_2_available

from pipeline.configuration.ds_config import device_of
from pipeline.configuration.ds_json import read_user_json
from pipeline.configuration.groups import ModelConfig
from pipeline.configuration.stage import StageConfig, SupervisedConfig
from pipeline.errors import EnvironmentFault, InputError, dashed
from pipeline.models.decoders.architecture import longrope_limit
from pipeline.models.decoders.families import fields_not_understood
from pipeline.models.lora import check_quantization, linear_names
from pipeline.models.source import (
    ModelSource,
    attention_for,
    check_decoder,
    check_positions,
    check_stored_quantization,
    check_whole_experts,
    has_key_value_cache,
    num_experts,
)
from pipeline.models.tokenizers import same_tokens
from pipeline.models.weight_files import check_plain_lora, warn_if_untested, warn_once

Check = Callable[[], object]
LARGE = 10_000_000  # number of weights from which on a high learning rate causes a warning
# Programs with which DeepSpeed compiles its asynchronous file I/O -> how to install them.
BUILT_WITH = {"g++": "Debian, Ubuntu: apt-get install g++", "ninja": "pip install ninja"}


@dataclass(frozen=True, slots=True)
class StartModel:
    """A model that a stage starts from, and its checks, which raise InputError or EnvironmentFault.

    flag: the flag that names it.
    path: the value of the flag.
    source: its files; if an earlier stage will write the model, the files of the model that stage starts from.
    check_kind: takes (path, flag) of an existing folder or a hub id; checks that the model is of the kind that the
    stage needs.
    packages: checks of packages, which need no model.
    fits: checks of the settings against the model; they may also read the models before this one.
    """

    flag: str
    path: str
    source: ModelSource
    check_kind: Callable[[str, str], None]
    packages: Sequence[Check] = ()
    fits: Sequence[Check] = ()

    def warn_of_limits(self) -> None:
        """Warn of an untested type or field, and of parts of a mixture of experts that are not trained."""
        warn_if_untested(self.path, self.source.config.model_type)
        for problem in fields_not_understood(self.source.config):
            warn_once(f"{self.path}: config.json: {problem}: left to transformers, and untested here")
        if num_experts(self.source.config):
            text = "mixture of experts: the router's auxiliary loss is not added, and experts get no LoRA"
            warn_once(f"{self.path}: {text}")


def check_start_models(models: Sequence[StartModel]) -> list[ModelSource]:
    """Run all checks of a stage's start models and return their files. Raises InputError, EnvironmentFault."""
    for model in models:
        model.check_kind(model.path, model.flag)
        model.source.check(model.flag)
        for check in (*model.packages, *model.fits):
            check()
    for model in models:  # no check refused one
        model.warn_of_limits()
    return [model.source for model in models]


def package_checks(config: StageConfig, settings: ModelConfig, prefix: str = "", *, trains: bool = True) -> list[Check]:
    """Return the checks of packages that a model needs; those of an optimizer and of offload only if it is trained.

    Args:
        prefix: that of the model's flags (actor_).
    """
    checks = [
        partial(check_attention, settings.attn_implementation, dashed(prefix + "attn_implementation")),
        partial(check_quantization, settings.quantization, dashed(prefix + "quantization")),
    ]
    states, file = config.optimizer.optimizer_states, config.deepspeed.deepspeed_config
    of_training = [partial(check_optimizer_states, states), partial(check_disk_offload, file)]
    return [*(of_training if trains else ()), *checks]


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
        raise EnvironmentFault("--optimizer-states 8bit: pip install bitsandbytes, which is not installed here")


def check_disk_offload(file: str) -> None:
    """Check that DeepSpeed can compile its asynchronous file I/O, if the user's JSON `file` offloads to NVMe.

    Raises:
        EnvironmentFault: something is missing; a line names its package.
    """
    zero = read_user_json(file).get("zero_optimization", {}) if file else {}
    offloaded = [name for name in ("offload_optimizer", "offload_param") if device_of(zero, name) == "nvme"]
    if not offloaded:
        return
    missing = [f"{program} ({package})" for program, package in BUILT_WITH.items() if shutil.which(program) is None]
    if not missing:
        from pipeline.engine.start import has_asynchronous_files  # imports DeepSpeed, which takes seconds

        missing = (
            [] if has_asynchronous_files() else ["libaio and its headers (Debian, Ubuntu: apt-get install libaio-dev)"]
        )
    if missing:
        key = f"--deepspeed-config {file}: zero_optimization.{offloaded[0]}.device nvme"
        raise EnvironmentFault(f"{key}: found no {' and no '.join(missing)}; install it, or offload to cpu")


def decoder_start(
    config: SupervisedConfig,
    base_of_output: Mapping[str, str],
    check_kind: Callable[[str, str], None],
    *,
    length: int,
    more: Sequence[Callable[[ModelSource], object]] = (),
) -> StartModel:
    """Return the start model of a stage that trains one decoder on sequences of up to --max-seq-len tokens.

    Args:
        base_of_output: folder of an earlier stage's output -> the model that that stage starts from.
        check_kind: see `StartModel`.
        length: --max-seq-len.
        more: checks of its files that run before those of its flags.
    """
    flag, path = "--model-name-or-path", config.model.model_name_or_path
    start = ModelSource(base_of_output.get(path, path))
    fits: list[Check] = [partial(check_decoder, start, flag), partial(check_positions, start, length, "--max-seq-len")]
    fits += [partial(one, start) for one in more]
    fits.append(partial(check_settings, start, config.model, only_lora=config.deepspeed.only_optimize_lora))
    packages = package_checks(config, config.model)
    return StartModel(flag, path, start, check_kind, packages, fits)


def check_settings(
    source: ModelSource, settings: ModelConfig, prefix: str = "", *, learns: bool = True, only_lora: bool = True
) -> None:
    """Raise InputError if the model cannot follow its flags, which begin with `prefix` (actor_).

    Stored int8 or nf4 weights must be trained as such; ZeRO-3 must not partition experts; the attention implementation
    must apply soft caps; LoRA's pattern must match a layer. To check that, the model is built without memory.
    """
    if settings.partitioned == "weights":
        check_whole_experts(source)
    check_stored_quantization(source, settings.quantization, dashed(prefix + "quantization"), learns=learns)
    attention_for(source.config, settings.attn_implementation, source.path, flag=dashed(prefix + "attn_implementation"))
    if not learns:
        return
    warn_of_rate(source, settings, prefix, only_lora=only_lora)
    is_adapter, is_quantised = source.base is not None, settings.quantization != "none"
    if settings.lora_dim and is_adapter and not is_quantised:
        check_plain_lora(source.path)
    if settings.lora_dim and not (is_adapter and is_quantised):
        linear_names(without_memory(source), settings.lora_module_name, flag=dashed(prefix + "lora_module_name"))


def without_memory(source: ModelSource) -> PreTrainedModel:
    """Return the language model of a configuration, with weights on the meta device."""
    auto_class = AutoModelForSeq2SeqLM if source.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        return auto_class.from_config(copy.deepcopy(source.config))


def warn_of_rate(source: ModelSource, settings: ModelConfig, prefix: str, *, only_lora: bool) -> None:
    """Warn of peak learning rates far above those with which models of LARGE weights or more are trained.

    only_lora: LoRA, if enabled, leaves all other weights frozen.
    """
    rates = {"lora_learning_rate": 1e-2} if settings.lora_dim else {}
    rates |= {} if settings.lora_dim and only_lora else {"learning_rate": 1e-3}
    for name, most in rates.items():
        if (rate := getattr(settings, name)) > most and without_memory(source).num_parameters() >= LARGE:
            warn_once(
                f"{source.path}: {dashed(prefix + name)} {rate:g} is above {most:g}: training will probably diverge"
            )


def check_rotary_length(source: ModelSource, longest: int, flag: str) -> None:
    """Raise InputError if sequences that grow to `longest` tokens (the value of `flag`) change their first positions.

    Longrope changes the frequencies of all tokens once a pass exceeds the original length. Keys that a sampler has
    cached would keep the former ones, and a row's log-probabilities would depend on its micro-batch.
    """
    limit = longrope_limit(source.config.get_text_config())
    if limit is not None and longest > limit:
        raise InputError(
            f"{flag} {longest}: the model {source.path} has other rotary positions (longrope) above {limit} tokens, "
            f"which a sampler's cache cannot follow; {flag} {limit} is the most"
        )


def check_cache(source: ModelSource, flag: str) -> None:
    """Raise InputError for a decoder that keeps no keys and values, which stage 3 cannot sample from."""
    config = source.config
    if not has_key_value_cache(config):
        raise InputError(
            f"{flag} {source.path}: {config.model_type} has no cache of keys and values, which stage 3 samples with; "
            "only stage 1 can train it"
        )


def check_teacher_tokens(teacher: ModelSource, actor: ModelSource, flag: str) -> None:
    """Raise InputError if the tokenizer of the teacher is not the actor's."""
    if teacher.path != actor.path and not same_tokens(teacher.tokenizer, actor.tokenizer):
        sizes = [len(one.tokenizer) for one in (teacher, actor)]
        raise InputError(
            f"{flag} {teacher.path}: its vocabulary, {sizes[0]} tokens, is not that of {actor.path}, {sizes[1]} "
            "tokens; distillation compares both models token by token. Give a teacher of the actor's family"
        )


def check_critic_tokens(critic: ModelSource, actor: ModelSource, flag: str) -> None:
    """Raise InputError if the tokenizer of the critic is not the actor's."""
    if critic.path != actor.path and not same_tokens(critic.tokenizer, actor.tokenizer):
        raise InputError(
            f"{flag} {critic.path}: its tokenizer is not that of {actor.path}; a critic reads the actor's tokens. "
            "Start the critic from a model of the actor's family; as reward model this one can stay"
        )
