"""Flags of tiny runs of DPO, IPO and KTO, and their rows and log-probabilities by transformers alone."""

import json
from pathlib import Path
from typing import Any

import torch
from support.run_words import run_words

NUM_STEPS, BETA, RATE = 5, 0.5, 2e-3


def words(folder: Path, out: str, **changes: object) -> list[str]:
    flags = {
        "model_name_or_path": folder / "base", "data_split": None, "beta": BETA, "max_seq_len": 96,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "num_train_epochs": 9, "max_steps": NUM_STEPS,
        "max_grad_norm": 0, "adam_beta2": 0.9, "output_dir": f"{out}/actor",
    }  # fmt: skip
    return run_words(folder, **flags | changes)


def pairs_of(file: Path, tokenizer: Any) -> list[tuple[list[int], list[int], int]]:
    """The ids of both sides of each pair by the saved chat template, and the number of those of the prompt."""
    pairs = []
    for row in map(json.loads, file.read_text().splitlines()):
        user = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=True)["input_ids"]
        sides = [
            tokenizer.apply_chat_template([*user, {"role": "assistant", "content": row[side]}], return_dict=True)
            for side in ("chosen", "rejected")
        ]
        chosen, rejected = (side["input_ids"] for side in sides)
        assert chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        pairs.append((chosen, rejected, len(prompt)))
    return pairs


def response_log_prob(model: Any, ids: list[int], start: int) -> torch.Tensor:
    tokens = torch.tensor([ids])
    log_probs = model(tokens).logits[0, :-1].log_softmax(-1)
    return log_probs[start - 1 :].gather(1, tokens[0, start:, None]).sum()
