"""Data, tokenizer and models that are small enough to train in seconds; made of the demo's own functions."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM, OPTForSequenceClassification

from demo.make import distinct_prompts, make_document, make_tokenizer, write_lines
from demo.rule import make_pair

SCORE_MEAN, SCORE_STD = 0.25, 1.5


def make_folder(folder: Path, *, num_train: int = 64, num_test: int = 8, num_documents: int = 64) -> Path:
    """`train.jsonl` and `test.jsonl` (pairs), `text.jsonl`, and the model folders `base/` and `scorer/`."""
    random = Random(7)
    rows = []
    for prompt in distinct_prompts(num_train + num_test, random):
        chosen, rejected = make_pair(prompt, random)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    write_lines(folder / "train.jsonl", rows[:num_train])
    write_lines(folder / "test.jsonl", rows[num_train:])
    write_lines(folder / "text.jsonl", ({"text": make_document(random)} for _ in range(num_documents)))
    tokenizer = make_tokenizer(folder)
    save_base(folder / "base", tokenizer)
    save_scorer(folder / "scorer", tokenizer)
    return folder


def opt_config(vocab_size: int, **changes: Any) -> OPTConfig:
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 128,
        "init_std": 0.1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    return OPTConfig(**(settings | changes))


def save_base(folder: Path, tokenizer: Any, *, seed: int = 1) -> None:
    """A causal language model whose EOS comes early for some prompts and late for others."""
    torch.manual_seed(seed)
    model = OPTForCausalLM(opt_config(len(tokenizer)))
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.eos_token_id] *= 6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_scorer(folder: Path, tokenizer: Any, *, seed: int = 2) -> None:
    """A reward model as step 2 leaves it: `score` head, statistics of its scores in the configuration."""
    torch.manual_seed(seed)
    model = OPTForSequenceClassification(opt_config(len(tokenizer), num_labels=1))
    with torch.no_grad():
        model.score.weight.normal_(std=0.3)
    model.config.score_mean, model.config.score_std = SCORE_MEAN, SCORE_STD
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def take_lines(source: Path, target: Path, count: int) -> None:
    """The first `count` lines of a text file."""
    target.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
