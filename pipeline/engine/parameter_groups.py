"""Optimizer groups: with and without weight decay, and LoRA weights at their own learning rate."""

from typing import Any

from torch import nn


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Names of parameters without weight decay: biases, norms, and embeddings (rare rows would only shrink).

    Decided by module type and name: a ZeRO-3 parameter has lost its shape.
    """
    names = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower():
            names |= {f"{module_name}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return names


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, lora_learning_rate: float
) -> list[dict[str, Any]]:
    """Groups `decay`, `no_decay` and `lora` of the trainable parameters for AdamW; empty ones are left out."""
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
