"""Tiny models with every weight random, for comparisons with transformers' own forward passes.

OPT as it ships (dropout, layer drop, positions offset by 2), OPT in the shape of its 350m (norms after the blocks,
embeddings narrower than the hidden size, projections between), and Llama with grouped queries.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from pipeline.data.templates import set_template

NUM_TOKENS = 400  # of the tokenizer in conftest.bpe_folder
PAD, BOS, EOS = 0, 1, 2
NAMES = ("opt", "opt-350m", "llama")

COMMON = {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """The configuration of one of NAMES; dropouts are on, as OPT's are."""
    if name == "llama":
        settings: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2, "attention_dropout": 0.1}
        settings |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
        return LlamaConfig(**(COMMON | IDS | settings | changes))
    settings = {"ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.1, "layerdrop": 0.1}
    if name == "opt-350m":
        settings |= {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
    else:
        settings |= {"word_embed_proj_dim": 32}
    return OPTConfig(**(COMMON | IDS | settings | changes))


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Normal weights, biases and norms included, spread enough that a lost term shows."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1.0)


def save_tiny(name: str, bpe_folder: Path, folder: Path, *, reward: bool = False, seed: int = 0, **changes: Any) -> str:
    """A folder with a tiny model, made by transformers alone, and the tokenizer of `bpe_folder`."""
    auto_class = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    model = auto_class.from_config(tiny_config(name, **({"num_labels": 1} if reward else {}), **changes))
    randomise(model, seed)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(bpe_folder).save_pretrained(folder)
    return str(folder)


def give_template(*folders: str) -> None:
    """Save the Human/Assistant template with the tokenizers of folders, as a finished stage does."""
    for folder in folders:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        set_template(tokenizer, "auto")
        tokenizer.save_pretrained(folder)


def random_rows(seed: int, lengths: tuple[int, ...] = (9, 4, 7, 1)) -> list[torch.Tensor]:
    """Token ids (S_n,) of ragged rows, EOS among them anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, NUM_TOKENS, (length,), generator=generator) for length in lengths]


def padded(rows: list[torch.Tensor], *, side: str, extra: int, fill: int = EOS) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids (N, S), mask (N, S) bool, True = real token), filled up with `fill` and `extra` more columns of it."""
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        columns = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[index, columns], mask[index, columns] = row, True
    return ids, mask
