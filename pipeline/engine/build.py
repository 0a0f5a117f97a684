"""Training engines, built from the configuration: compute type, placement, LoRA, and AdamW's parameter groups."""

from typing import Any

import torch
from torch import nn

from pipeline import dist
from pipeline.configuration.ds_config import EngineDtype, Placement
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig, OptimizerConfig
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.zero3 import Gather
from pipeline.models.causal_lm import CausalLM
from pipeline.models.loading import base_model, default_dtype, use_gradient_checkpointing
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import TokenValueModel
from pipeline.run.run import Run


def compute_dtype(settings: DeepSpeedConfig, device: torch.device) -> EngineDtype:
    """Return `--dtype` with auto resolved for this device."""
    if settings.dtype != "auto":
        return settings.dtype
    return "bf16" if default_dtype(device) == torch.bfloat16 else "fp32"


def placement(run: Run) -> Placement:
    """Describe the machine of this run's ranks, for the DeepSpeed JSON of its engines."""
    world = run.world
    return Placement(
        device="cuda" if world.device.type == "cuda" else "cpu",
        dtype=compute_dtype(run.resolved.config.deepspeed, world.device),
        ranks=world.size,
        run_dir=run.folder,
        one_node=dist.local_size() == world.size,
    )


def with_lora(model: Any, config: ModelConfig, settings: DeepSpeedConfig, *, task: str, seed: int) -> Any:
    """Return `model` with LoRA layers if `lora_dim` is not 0."""
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
    """Put `module` under DeepSpeed, with gradient checkpointing and parameter groups as configured."""
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


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, lora_learning_rate: float
) -> list[dict[str, Any]]:
    """Return AdamW's groups `decay`, `no_decay` and `lora` of the trainable parameters, without empty ones."""
    exempt = exempt_from_decay(model)
    members: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": [], "lora": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "lora" if "lora_" in name else "no_decay" if name in exempt else "decay"
            members[kind].append(parameter)
    settings = {"decay": (learning_rate, weight_decay), "no_decay": (learning_rate, 0.0)}
    settings["lora"] = (lora_learning_rate, weight_decay)
    return [
        {"name": kind, "params": params, "lr": settings[kind][0], "weight_decay": settings[kind][1]}
        for kind, params in members.items()
        if params
    ]


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Return the names of parameters without weight decay: biases, norms, embeddings (rare rows would only shrink).

    Decided by module type and name: a ZeRO-3 parameter has lost its shape.
    """
    names = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower():
            names |= {f"{module_name}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return names
