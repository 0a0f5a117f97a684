"""The parameter groups of an optimizer, with and without weight decay; engines and plans use them."""

from typing import Any

from torch import nn

from pipeline.configuration.groups import ModelConfig


def parameter_groups(model: nn.Module, config: ModelConfig) -> list[dict[str, Any]]:
    """Return AdamW's groups `decay`, `no_decay` and `lora` of the trainable parameters, without empty ones."""
    exempt = exempt_from_decay(model)
    groups: dict[str, dict[str, Any]] = {
        "decay": {"params": [], "lr": config.learning_rate, "weight_decay": config.weight_decay},
        "no_decay": {"params": [], "lr": config.learning_rate, "weight_decay": 0.0},
        "lora": {"params": [], "lr": config.lora_learning_rate, "weight_decay": config.weight_decay},
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "lora" if "lora_" in name else "no_decay" if name in exempt else "decay"
            groups[kind]["params"].append(parameter)
    return [{"name": kind} | group for kind, group in groups.items() if group["params"]]


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Return the names of parameters without weight decay: biases, norms, embeddings (decay would shrink rare rows).

    Module type and name decide, since a ZeRO-3 parameter has no shape.
    """
    names = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower():
            names |= {f"{module_name}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return names
