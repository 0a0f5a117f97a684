"""Training engines, built from the configuration: compute type, placement, LoRA, and AdamW's parameter groups."""

import logging
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn

from pipeline.configuration.ds_config import EngineDtype, Json, Placement
from pipeline.configuration.groups import ModelConfig
from pipeline.configuration.run_flags import RunConfig
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.memory import keep_to_limit
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.engine.start import partitioned_loading, start_deepspeed
from pipeline.errors import InputError
from pipeline.model_types import MODEL_TYPES
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.forward.seq2seq_lm import Seq2SeqLM
from pipeline.models.loaded import check_finite
from pipeline.models.loading import (
    DTYPES,
    LoadSettings,
    base_model,
    default_device,
    default_dtype,
    load_language_model,
    use_gradient_checkpointing,
)
from pipeline.models.lora import add_lora, is_lora, keep_norms_in_fp32, lora_settings, unfreeze
from pipeline.models.partitions import has_shards_on_disk
from pipeline.models.reward_model import TokenValueModel, initialise_head, load_reward_model, score_constants
from pipeline.models.source import ModelSource
from pipeline.rendezvous import local_size
from pipeline.run.run import Run
from pipeline.tensor_ops import gather_log_probs

log = logging.getLogger(__name__)

Trained = CausalLM | Seq2SeqLM | TokenValueModel
# peft's names of a model's task.
TASKS = {CausalLM: "CAUSAL_LM", Seq2SeqLM: "SEQ_2_SEQ_LM", TokenValueModel: "SEQ_CLS"}
# Number of tokens whose log-probabilities are compared with transformers' own.
NUM_PROBED = 4


def compute_dtype(run: Run) -> EngineDtype:
    """Return `--dtype` with auto resolved for this run's device."""
    dtype = run.resolved.config.deepspeed.dtype
    if dtype != "auto":
        return dtype
    return "bf16" if default_dtype(run.world.device) == torch.bfloat16 else "fp32"


def placement(run: Run) -> Placement:
    """Describe the machine of this run's ranks, for the DeepSpeed JSON of its engines."""
    world = run.world
    return Placement(
        device="cuda" if world.device.type == "cuda" else "cpu",
        dtype=compute_dtype(run),
        ranks=world.size,
        run_dir=run.folder,
        one_node=local_size() == world.size,
    )


def engine_jsons(run: Run) -> dict[str, Json]:
    """Return the DeepSpeed JSON of each engine of a run, created at the first call.

    Raises:
        InputError: settings that contradict each other.
    """
    if not run.engine_jsons:
        run.engine_jsons.update(run.resolved.config.engine_jsons(run.resolved.origins, placement(run)))
    return run.engine_jsons


def start_engines(run: Run) -> None:
    """Prepare DeepSpeed for the run's engines, before any data are read; the engines themselves are created later.

    Builds their JSON, limits this process to `--gpu-memory-gib`, and starts DeepSpeed on the existing process group.

    Raises:
        InputError: engine settings that contradict each other.
        EnvironmentFault: the GPU has less memory than `--gpu-memory-gib`, or CUDA itself would take all of it; or
            DeepSpeed's version does not fit.
    """
    engine_jsons(run)
    keep_to_limit(run)
    settings: RunConfig = run.resolved.config.run
    start_deepspeed(deterministic=settings.deterministic, verbose=settings.verbose)


def language_model_engine(run: Run, source: ModelSource, model: ModelConfig, *, name: str = "model") -> TrainingEngine:
    """Load a decoder or an encoder-decoder model and put it under DeepSpeed, with LoRA if `lora_dim` is not 0.

    `name` is the engine's key in `engine_jsons`.
    """
    ds_json = engine_jsons(run)[name]
    with partitioned_loading(ds_json, source):
        module = start_language_model(source, model, weights_dtype(run))
    return training_engine(run, module, model, ds_json)


def start_language_model(source: ModelSource, model: ModelConfig, dtype: torch.dtype) -> CausalLM | Seq2SeqLM:
    """Load the language model that training starts from.

    If its folder holds an adapter, training continues that adapter. Only if `lora_dim` is 0 and the base is not
    quantised, the adapter is merged into the base, and the whole model is trained.
    """
    loaded = load_language_model(source, **load_settings(model, dtype), merged=not model.lora_dim)
    return (Seq2SeqLM if loaded.config.is_encoder_decoder else CausalLM)(loaded)


def value_model_engine(
    run: Run,
    source: ModelSource,
    model: ModelConfig,
    *,
    name: str = "model",
    new_head: bool = False,
    head_std: float | None = None,
    normalised: bool = False,
) -> TrainingEngine:
    """Load a model with a scalar head and put it under DeepSpeed, with LoRA if `lora_dim` is not 0.

    Args:
        name: the engine's key in `engine_jsons`.
        new_head: start from a language model, with a head drawn from the run's seed.
        head_std: standard deviation of a new head's weights; None: (hidden size + 1)^-0.5.
        normalised: as for `start_value_model`.
    """
    ds_json = engine_jsons(run)[name]
    with partitioned_loading(ds_json, source):
        loaded = start_value_model(source, model, weights_dtype(run), new_head=new_head, normalised=normalised)
    if new_head:
        initialise_head(loaded.model.score, seed=run.resolved.config.run.seed, std=head_std)
    return training_engine(run, loaded, model, ds_json)


def start_value_model(
    source: ModelSource, model: ModelConfig, dtype: torch.dtype, *, new_head: bool = False, normalised: bool = False
) -> TokenValueModel:
    """Load the model with a scalar head that training starts from; a new head is not drawn yet.

    Args:
        normalised: return values as (raw - mean) / std, by the constants score_mean and score_std in the model's
            config.json, if it has them; False: return raw values.
    """
    merged = new_head or not model.lora_dim
    loaded = load_reward_model(source, **load_settings(model, dtype), new_head=new_head, merged=merged)
    if normalised and (constants := score_constants(loaded.model.source_config)):
        loaded.score_mean, loaded.score_std = constants
    return loaded


def frozen_engine(
    run: Run, load: Callable[..., nn.Module], source: ModelSource, model: ModelConfig, *, name: str
) -> FrozenEngine:
    """Load a frozen model with the flags of the model that is trained; `name` is the engine's key in `engine_jsons`."""
    ds_json, settings = engine_jsons(run)[name], run.resolved.config.deepspeed
    with partitioned_loading(ds_json, source):
        loaded = load(source, **load_settings(model, weights_dtype(run)))
    engine = FrozenEngine(loaded, ds_json, run.world.device, gather=settings.zero3_gather)
    keep_norms_in_fp32(engine.module, model.quantization)
    check_finite(engine.module, source.path)
    check_function(engine, source.path)
    return engine


def load_policy(source: ModelSource, **settings: Unpack[LoadSettings]) -> CausalLM:
    """Load a causal language model that is only read."""
    return CausalLM(load_language_model(source, **settings))


def load_settings(model: ModelConfig, dtype: torch.dtype) -> LoadSettings:
    """Return how the weights of a model are loaded, as keyword arguments of the functions that load one."""
    return {"dtype": dtype, "attn_implementation": model.attn_implementation, "quantization": model.quantization}


def weights_dtype(run: Run) -> torch.dtype:
    """Return the dtype in which the weights of this run compute."""
    return DTYPES[compute_dtype(run)]


def training_engine(run: Run, module: Trained, model: ModelConfig, ds_json: dict[str, Any]) -> TrainingEngine:
    """Put `module` under DeepSpeed, with LoRA, gradient checkpointing and parameter groups as configured.

    Raises:
        InputError: a weight is not finite.
    """
    config, optimizer = run.resolved.config, run.resolved.config.optimizer
    add_adapters(run, module, model)
    if model.gradient_checkpointing:
        use_gradient_checkpointing(base_model(module.model))
    if isinstance(module, CausalLM):
        module.stores_logits = bool(run.plan.get("stores_logits"))
    groups, betas = parameter_groups(module, model), (optimizer.adam_beta1, optimizer.adam_beta2)
    gather = config.deepspeed.zero3_gather
    states = optimizer.optimizer_states
    if states == "8bit":
        log.warning("AdamW's moments have 8 bits, those of embeddings too: some models diverge; see the loss")
    engine = TrainingEngine(
        module.train(), groups, ds_json, betas=betas, eps=optimizer.adam_eps, gather=gather, states=states
    )
    keep_norms_in_fp32(engine.module, model.quantization)
    check_finite(engine.module, model.model_name_or_path)
    check_function(engine, model.model_name_or_path)
    return engine


@torch.no_grad()
def check_function(engine: FrozenEngine | TrainingEngine, path: str) -> None:
    """Raise InputError for a decoder from `path` whose log-probabilities differ from those of transformers' forward
    pass.

    `causal_lm.py` computes logits from the backbone's hidden states by the head and `LogitScaling` (a factor and a soft
    cap from config.json). An architecture may do more than that, such as another projection. MODEL_TYPES, which the
    tests train, and models whose weights are offloaded to a disk are not checked. A collective under ZeRO-3.
    """
    module = engine.module
    if not isinstance(module, CausalLM) or module.config.model_type in MODEL_TYPES:
        return
    if any(map(has_shards_on_disk, module.parameters())):
        return
    was_training = module.training
    module.eval()
    ids = torch.arange(NUM_PROBED, device=default_device()).unsqueeze(0)
    everything = torch.ones_like(ids, dtype=torch.bool)
    computed = engine(ids, attention_mask=everything, selected=everything[:, 1:]).log_probs
    logits = module.model(input_ids=ids, use_cache=False).logits[:, :-1]
    engine.release_gathered()
    module.train(was_training)
    error = (computed - gather_log_probs(logits, ids[:, 1:])).abs().max()
    if error > 1e-4 + 4 * torch.finfo(logits.dtype).eps * logits.abs().max():
        raise InputError(
            f"{path}: {module.config.model_type} computes its logits in an unknown way (not by its head and "
            "a scale or soft cap in config.json alone); take another model"
        )


def add_adapters(run: Run, module: Trained, model: ModelConfig) -> None:
    """Add LoRA layers to `module` as configured; without LoRA, all of its parameters are trained."""
    config = run.resolved.config
    if is_lora(module.model):
        log.info("%s: training continues its adapter; --lora-dim has no effect", model.model_name_or_path)
        if not config.deepspeed.only_optimize_lora:
            unfreeze(module.model)
    elif model.lora_dim:
        adapters, only_lora = lora_settings(dict(model)), config.deepspeed.only_optimize_lora
        task, seed, base = TASKS[type(module)], config.run.seed, model.model_name_or_path
        module.model = add_lora(module.model, **adapters, only_lora=only_lora, task=task, seed=seed, base=base)
