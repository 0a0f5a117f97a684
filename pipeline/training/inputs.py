"""From configuration to the things a loop works on: tokenizer, rows, models under DeepSpeed."""

import json
import logging
from typing import Any

import torch

from pipeline import dist
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.facts import data_fingerprint, model_fingerprint
from pipeline.configuration.ds_config import frozen_config, read_user_json, training_config
from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, ModelConfig, OptimizerConfig
from pipeline.data.cache import Built, build
from pipeline.data.loader import StepLoader
from pipeline.data.selection import DataOptions, Stage, parse_column_map
from pipeline.data.templates import set_template
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.engine.zero3 import Gather
from pipeline.models.causal_lm import CausalLM
from pipeline.models.loading import (
    DTYPES,
    base_model,
    default_dtype,
    use_gradient_checkpointing,
)
from pipeline.models.lora import add_lora
from pipeline.models.model_fit import check_model, check_vocabulary
from pipeline.models.reward_model import TokenValueModel
from pipeline.models.tokenizers import load_tokenizer, pad_policy
from pipeline.run.earlier_runs import defaults_of, layout_of, settings_of
from pipeline.run.run import Run

log = logging.getLogger(__name__)


def prepare_tokenizer(path: str, template: str) -> Any:
    """The tokenizer with the chat template of the run and a padding token that exists (the vocabulary never grows).

    The model's files are looked at first, and that tokenizer and model belong together: rows are tokenised for minutes
    before weights are read. Raises InputError, EnvironmentFault.
    """
    check_model(path)
    tokenizer = load_tokenizer(path)
    check_vocabulary(path, tokenizer)
    set_template(tokenizer, template)
    policy = pad_policy(tokenizer)
    if policy.source != "tokenizer":
        log.info("padding with %s (%s); masks never come from token ids", policy.token, policy.source)
        tokenizer.pad_token = policy.token
    return tokenizer


def prepare_data(stage: Stage, data: DataConfig, *, tokenizer: Any, **limits: Any) -> Built:
    """Tokenised rows of a stage; drops and repairs are reported once, by rank 0.

    Args:
        limits: further fields of DataOptions (lengths and what happens to longer rows).
    """
    options = DataOptions(
        data_path=tuple(data.data_path),
        eval_data_path=tuple(data.eval_data_path),
        data_split=data.data_split,
        eval_fraction=data.eval_fraction,
        seed=data.data_seed,
        column_map=parse_column_map(data.column_map),
        template=data.template,
        cache_dir=data.data_output_path or None,
        **limits,
    )
    # Rank 0 reports errors for all; the other processes of a node find the cache built.
    dist.on_main(lambda: build(stage, options, tokenizer) and None)
    built = build(stage, options, tokenizer)
    if dist.is_main():
        log.info("%s rows: %d to train on, %d held out", stage, len(built.train), len(built.eval))
        for line in built.counts.lines():
            log.info("  rows: %s", line)
    return built


def compute_dtype(settings: DeepSpeedConfig, device: torch.device) -> str:
    """`--dtype` with auto resolved for this device: bf16, fp16 or fp32."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bf16" if default_dtype(device) == torch.bfloat16 else "fp32"


def saved_dtype(run: Run) -> torch.dtype:
    """`--save_dtype`, or that of training."""
    config = run.resolved.config
    name = config.run.save_dtype
    return DTYPES[compute_dtype(config.deepspeed, run.world.device) if name == "auto" else name]


def deepspeed_json(
    run: Run, settings: DeepSpeedConfig, optimizer: OptimizerConfig, *, zero_stage: int, accumulation: int
) -> dict[str, Any]:
    """The DeepSpeed configuration of a trained model, the user's own JSON merged in."""
    user = read_user_json(settings.deepspeed_config) if settings.deepspeed_config else None
    return training_config(
        settings,
        zero_stage=zero_stage,
        dtype=compute_dtype(settings, run.world.device),  # type: ignore[arg-type]
        micro_batch_size=optimizer.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation,
        world_size=run.world.size,
        max_grad_norm=optimizer.max_grad_norm,
        run_dir=run.folder,
        device=run.world.device.type,  # type: ignore[arg-type]
        one_node=dist.local_size() == run.world.size,
        user_json=user,
        origins=run.resolved.origins,
    )


def frozen_json(run: Run, settings: DeepSpeedConfig, *, zero_stage: int, offload: bool) -> dict[str, Any]:
    """The DeepSpeed configuration of a model that is only read: stage 3 where the trained twin has it, else plain."""
    return frozen_config(
        settings,
        zero_stage=3 if zero_stage == 3 else 0,
        dtype=compute_dtype(settings, run.world.device),  # type: ignore[arg-type]
        micro_batch_size=1,
        world_size=run.world.size,
        offload=offload,
    )


def with_lora(model: Any, config: ModelConfig, settings: DeepSpeedConfig, *, task: str, seed: int) -> Any:
    """`model` with LoRA layers where `lora_dim` asks for them."""
    if config.lora_dim == 0:
        return model
    return add_lora(
        model,
        dim=config.lora_dim,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        module_name=config.lora_module_name,
        only_lora=settings.only_optimize_lora,
        task=task,
        seed=seed,
    )


def training_engine(
    module: CausalLM | TokenValueModel,
    config: ModelConfig,
    optimizer: OptimizerConfig,
    ds_json: dict[str, Any],
    *,
    gather: Gather,
) -> TrainingEngine:
    """`module` (a CausalLM or TokenValueModel) under DeepSpeed with its parameter groups."""
    if config.gradient_checkpointing:
        use_gradient_checkpointing(base_model(module.model))
    groups = parameter_groups(
        module,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        lora_learning_rate=config.lora_learning_rate,
    )
    betas = (optimizer.adam_beta1, optimizer.adam_beta2)
    return TrainingEngine(module.train(), groups, ds_json, betas=betas, eps=optimizer.adam_eps, gather=gather)


def make_facts(config: Any, loader: StepLoader[Any]) -> checkpoint.Facts:
    """What a resumed run of step 1 or 2 must share with the one that wrote its checkpoint."""
    return checkpoint.Facts(
        settings=settings_of(config),
        fingerprints={
            "training rows": data_fingerprint(loader.rows),
            "model": model_fingerprint(config.model.model_name_or_path),
        },
        sizes={"rows of an optimizer step": loader.rows_per_step},
        layout=layout_of(config),
        defaults=defaults_of(config),
    )


def model_documents(run: Run, *, base: str, kind: str) -> dict[str, str]:
    """README.md (model card) and training_config.json of a saved model."""
    config = run.resolved.config
    card = [
        f"# {kind}",
        "",
        f"Trained by `{run.stage}` of rlhf-pipeline from `{base}` on {', '.join(config.data.data_path)}.",
        "All settings are in `training_config.json`.",
        "",
    ]
    return {"README.md": "\n".join(card), "training_config.json": json.dumps(config.model_dump(), indent=2) + "\n"}
