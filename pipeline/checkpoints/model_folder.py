"""Finished models: plain Hugging Face folders in safetensors, written beside and renamed into place.

Under ZeRO-3 the weights come one parameter at a time, so no GPU ever holds the whole model; rank 0 keeps them in host
memory until transformers writes the shards.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from pipeline import dist
from pipeline.engine.build import compute_dtype
from pipeline.files import with_new_folder
from pipeline.models.loading import (
    DTYPES,
    base_model,
)
from pipeline.models.lora import is_lora, merged_weight
from pipeline.models.paths import has_config
from pipeline.partitions import gathered
from pipeline.run.run import Run

SHARD_SIZE = "5GB"
# Where a weight sits inside peft's wrappers -> where transformers has it.
PEFT_WRAPPERS = ("base_layer.", "modules_to_save.default.")


def state_dict(model: nn.Module, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole weights of the transformers model inside `model`, LoRA merged, on the CPU of rank 0 ({} elsewhere).

    A collective under ZeRO-3. Buffers that transformers saves are included; tied weights occur once.
    """
    inner = base_model(model)
    tied = set(getattr(inner, "all_tied_weights_keys", {}) or {})
    found: dict[str, torch.Tensor] = {}
    for name, value in whole_tensors(inner):
        if value is not None and plain_name(name) not in tied:
            found[plain_name(name)] = value.detach().to(dtype if value.is_floating_point() else value.dtype).cpu()
    return found


def plain_name(name: str) -> str:
    for wrapper in PEFT_WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(name, whole value on rank 0 or None) for parameters and saved buffers, one gathered module at a time."""
    main = dist.is_main()
    lora: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for layer_name, layer in lora.items():
        with gathered(layer.parameters()):
            yield f"{layer_name}.weight", merged_weight(layer) if main else None
    merged = {f"{name}.base_layer.weight" for name in lora}
    for name, parameter in model.named_parameters():
        if name in merged or "lora_" in name or ".original_module." in name:
            continue
        with gathered([parameter]):
            yield name, parameter.data.clone() if main else None
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer if main else None


def save_model(
    model: nn.Module,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: torch.dtype,
    documents: Mapping[str, str],
    config_changes: Mapping[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
    adapter: bool = True,
    merged: bool = True,
) -> None:
    """Write `model` as a folder that `from_pretrained` reads, atomically; a collective.

    Args:
        dtype: of the saved weights.
        documents: further files, name -> text (README.md, training_config.json).
        config_changes: fields of config.json that differ from the configuration the model came with.
        weights: instead of the model's own (an average of them, say).
        adapter: with LoRA, write `adapter/` as well. merged: with LoRA, write the merged model.
    """
    whole = state_dict(model, dtype=dtype) if weights is None else weights
    lora_weights = adapter_weights(model, dtype) if adapter and is_lora(model) else None

    def write() -> None:
        with_new_folder(folder, lambda fresh: write_folder(fresh, lora_weights))

    def write_folder(fresh: Path, lora_weights: dict[str, torch.Tensor] | None) -> None:
        if merged or lora_weights is None:
            write_weights(base_model(model), whole, fresh, dtype, config_changes or {})
        if lora_weights is not None:
            target = fresh / "adapter" if merged else fresh
            write_adapter(model, lora_weights, target)
        tokenizer.save_pretrained(fresh)
        for name, text in documents.items():
            (fresh / name).write_text(text, encoding="utf-8")

    dist.on_main(write)


def is_saved(folder: str) -> bool:
    """Whether a model is in `folder`, as rank 0 sees it. A collective."""
    return dist.on_main(lambda: has_config(Path(folder)))


def write_weights(
    model: Any, whole: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype, changes: Mapping[str, Any]
) -> None:
    """Safetensors shards and configuration; the configuration is the source's own (its dropouts, its names)."""
    model.save_pretrained(folder, state_dict=whole, max_shard_size=SHARD_SIZE)
    config = model.source_config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)


def adapter_weights(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The adapter's tensors by peft's names on rank 0 ({} elsewhere); a collective under ZeRO-3."""
    found = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name or ".modules_to_save." in name:
            with gathered([parameter]):
                if dist.is_main():
                    found[name] = parameter.data.to(dtype).cpu().clone()
    return found


def write_adapter(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    model.save_pretrained(str(folder), state_dict=weights, safe_serialization=True)


def saved_dtype(run: Run) -> torch.dtype:
    """`--save_dtype`, or that of training."""
    config = run.resolved.config
    name = config.run.save_dtype
    return DTYPES[compute_dtype(config.deepspeed, run.world.device) if name == "auto" else name]


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
