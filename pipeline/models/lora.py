"""LoRA by peft: choose the layers, wrap the model, compute merged weights.

Saving adapters is in `checkpoints/model_folder.py`.
"""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.errors import InputError


def linear_names(model: Any, pattern: str) -> list[str]:
    """Return the names of linear layers that contain `pattern` (all-linear: all of them), never the head.

    Raises:
        InputError: no layer matches.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and name.split(".")[-1] != "score"
    }
    chosen = [name for name in linear if pattern == "all-linear" or pattern in name]
    if not chosen:
        examples = ", ".join(list(linear)[:3])
        raise InputError(f"--lora_module_name {pattern}: matches no linear layer; the model has {examples}, ...")
    return chosen


def target_names(model: Any, chosen: list[str]) -> list[str]:
    """Return the last parts of the chosen layers' names where no other module has one of them, else the whole names.

    Programs that serve adapters (SGLang) look for names such as q_proj in adapter_config.json.
    """
    last = {name.rpartition(".")[2] for name in chosen}
    same = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return sorted(last) if len(same) == len(chosen) else chosen


def add_lora(
    model: Any, *, dim: int, alpha: float, dropout: float, module_name: str, only_lora: bool, task: str, seed: int
) -> Any:
    """Wrap `model` with LoRA layers whose B is zero, so that it starts as the base model.

    Args:
        only_lora: freeze all other weights but a reward head; False: train weights that LoRA does not cover as well.
        task: peft's task type: CAUSAL_LM, SEQ_2_SEQ_LM or SEQ_CLS (whose head `score` is trained and saved along).
        seed: seed of the initial values of A.
    """
    config = LoraConfig(
        r=dim,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft scales by any number
        lora_dropout=dropout,
        target_modules=target_names(model, linear_names(model, module_name)),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
        task_type=task,
    )
    with torch.random.fork_rng(devices=[]):
        # peft draws A from the global generator, on the CPU.
        torch.manual_seed(seed)
        wrapped: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    # A set so far, whose order in adapter_config.json would be another one in each process.
    config.target_modules = sorted(config.target_modules or ())
    if not only_lora:  # all but the base weights of LoRA layers and the originals of saved modules
        frozen = {id(module.get_base_layer().weight) for module in wrapped.modules() if isinstance(module, LoraLayer)}
        for name, parameter in wrapped.named_parameters():
            if id(parameter) not in frozen and "original_module" not in name:
                parameter.requires_grad_(True)
    return wrapped


def is_lora(model: Any) -> bool:
    return hasattr(model, "peft_config")


@torch.no_grad()
def merged_weight(layer: Any, adapter: str = "default") -> torch.Tensor:
    """Return W + scale * B A, computed in fp32, in W's dtype. `layer` is not changed; its weights must be gathered."""
    weight, scale = layer.get_base_layer().weight, layer.scaling[adapter]
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if weight.is_cuda and weight.dtype == a.dtype and not layer.fan_in_fan_out:
        return torch.addmm(weight, b, a, alpha=scale)  # one kernel that accumulates in fp32 and rounds once
    # peft's get_delta_weight multiplies in the weights' dtype, which rounds a second time.
    delta = scale * b.float() @ a.float()
    return (weight.float() + (delta.T if layer.fan_in_fan_out else delta)).to(weight.dtype)
