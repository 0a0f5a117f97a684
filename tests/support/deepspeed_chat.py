"""DeepSpeed-Chat's model code written anew from its description: its LoRA layer, its reward model and what it saves."""

import math
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from support.tiny_models import randomise
from torch import nn
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase


class LoraLayer(nn.Module):
    """A linear layer with low-rank parts: right (inputs, rank), left (rank, outputs), scaled by 1 / rank."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_right_weight = nn.Parameter(torch.zeros(linear.in_features, rank))
        self.lora_left_weight = nn.Parameter(torch.zeros(rank, linear.out_features))
        self.scaling = 1 / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias) + self.scaling * (
            x @ self.lora_right_weight @ self.lora_left_weight
        )


class RewardModel(nn.Module):
    """A transformer without a head, and a linear layer without bias that gives each token a score."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.config = transformer.config
        width = getattr(self.config, "word_embed_proj_dim", self.config.hidden_size)
        self.v_head = nn.Linear(width, 1, bias=False)
        self.rwtransformer = transformer

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.rwtransformer(ids, attention_mask=mask)[0]).squeeze(-1)


def padded_size(num_tokens: int) -> int:
    """The rows of an embedding: a multiple of 8."""
    return 8 * math.ceil(num_tokens / 8)


def actor(config: PretrainedConfig, *, lora: str = "", seed: int = 0) -> nn.Module:
    """A random language model; layers whose names contain `lora` get low-rank parts."""
    return prepared(AutoModelForCausalLM.from_config(config), lora, seed)


def reward_model(config: PretrainedConfig, *, lora: str = "", seed: int = 0) -> RewardModel:
    return prepared(RewardModel(AutoModel.from_config(config)), lora, seed)


def prepared(model: Any, lora: str, seed: int) -> Any:
    if lora:
        linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for name, module in linear:
            if lora in name:
                parent = model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], LoraLayer(module, rank=3))
    randomise(model, seed)
    return model.eval()


def save(
    model: Any,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    origin: str = "facebook/opt-1.3b",
    drop_lora: bool = False,
    zero_stage: int = 2,
) -> Path:
    """`pytorch_model.bin`, config.json with PAD = EOS, and the vocabulary files, without any other tokenizer file."""
    folder.mkdir(parents=True)
    weights = dict(model.named_parameters()) if zero_stage == 3 else model.state_dict()  # a tied weight once
    weights = {name: value.detach() for name, value in weights.items() if not (drop_lora and "lora" in name)}
    torch.save(weights, folder / "pytorch_model.bin")
    config = model.config
    config.pad_token_id = config.end_token_id = config.eos_token_id
    config.name_or_path = origin
    config.to_json_file(folder / "config.json", use_diff=False)
    if tokenizer is not None:
        tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    return folder


def is_read_by_torch(value: torch.Tensor) -> bool:
    """Whether this version of torch reads such a saved tensor without running code."""
    file = BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except UnpicklingError:
        return False
    return True
