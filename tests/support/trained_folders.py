"""Folders as training writes them, although nothing is trained.

LoRA with random weights is added to a model, and `save_model` writes it, as at the end of a stage and in `rlhf export`.
"""

from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.model_folder import save_model
from pipeline.models.loading import load_language_model
from pipeline.models.lora import add_lora
from pipeline.models.source import ModelSource, prepare_tokenizer


def save_as_trained(start: str | Path, folder: Path, *, lora: bool, seed: int = 1) -> Path:
    """Write the folder that training with or without LoRA leaves of a start model.

    seed: of the adapter's weights.
    """
    source = ModelSource(str(start))
    model = load_language_model(source, dtype=torch.float32)
    if lora:
        settings: dict[str, Any] = {"dim": 2, "alpha": 4.0, "dropout": 0.0, "module_name": "all-linear"}
        model = add_lora(model, **settings, only_lora=True, seed=0, task="CAUSAL_LM")
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
    save_model(model, prepare_tokenizer(source, "auto"), folder, dtype=torch.float32, documents={})
    return folder
