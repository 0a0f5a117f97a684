"""Tiny models for tests of chat: a random one, and one that answers a given text to every question."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.data.templates import set_template

TEXT = " Hé!\x1b[31mx"  # one character of two tokens, and an escape sequence
SHOWN = "Hé!\\x1b[31mx"  # what is printed of it
NUM_TOKENS = 400  # of the tokenizer in conftest.bpe_folder


def tiny_config(*, vocab_size: int = NUM_TOKENS, hidden_size: int = 32, num_positions: int = 512) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=num_positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


def save(model: torch.nn.Module, bpe_folder: Path, folder: Path) -> str:
    """Save a model with the tokenizer and its Human/Assistant template, as a finished stage does."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bpe_folder)
    set_template(tokenizer, "auto")
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def random_model(bpe_folder: Path, folder: Path, *, seed: int = 0, vocab_size: int = NUM_TOKENS, **changes: int) -> str:
    """A folder with a randomly initialised model, whose logits are spread enough that greedy answers are stable."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(vocab_size=vocab_size, **changes))
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return save(model, bpe_folder, folder)


def ending_model(bpe_folder: Path, folder: Path) -> str:
    """Save a random model of which some answers end and others do not."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    model.lm_head.weight.data[2] *= 6
    return save(model, bpe_folder, folder)


def scripted_model(bpe_folder: Path, folder: Path, text: str, *, ends: bool = True, num_positions: int = 512) -> str:
    """A folder with a model that answers `text`, then ends, or starts again if `ends` is false.

    Its embedding is the identity, its layer adds nothing, and its head maps each token to the one that follows.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bpe_folder)
    chain = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(set(chain)) == len(chain), "each token of the text must occur once"
    follower = torch.full((NUM_TOKENS,), chain[0])
    follower[chain] = torch.tensor([*chain[1:], 2 if ends else chain[0]])
    model = LlamaForCausalLM(tiny_config(hidden_size=NUM_TOKENS, num_positions=num_positions))
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(NUM_TOKENS))
        model.lm_head.weight.zero_()
        model.lm_head.weight[follower, torch.arange(NUM_TOKENS)] = 10.0
    return save(model, bpe_folder, folder)
