"""Families of models through the three steps, by the real commands; which are called untested, and how often."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_run import run_command
from support.tiny_run import make_folder
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.models.weight_files import TESTED_TYPES

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
GATED: dict[str, Any] = {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
FIELDS: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {"intermediate_size": 64},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), GATED),
}


def save_family(kind: str, folder: Path) -> None:
    """Replace the model of `folder` by a tiny one of another type; the tokenizer stays."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(AutoTokenizer.from_pretrained(folder)), **SIZES, **FIELDS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*sorted({*TESTED_TYPES} - {"t5"}), "gpt_neox"])
def test_a_family_goes_through_the_three_steps(kind: str, tmp_path: Path) -> None:
    """A type that no test knows is said to be so where it enters the road, and not again."""
    folder = make_folder(tmp_path, num_train=8)
    save_family(kind, folder / "base")
    shared = {"data_path": "train.jsonl", "eval_data_path": "test.jsonl", "data_split": "none", "max_steps": 1,
              "data_output_path": "cache", "dtype": "fp32"}  # fmt: skip
    lengths = {"max_prompt_seq_len": 48, "max_answer_seq_len": 8}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("step1_sft", {"model_name_or_path": "base", "max_seq_len": 96, "output_dir": "sft"}),
        ("step2_reward", {"model_name_or_path": "sft", "max_seq_len": 96, "output_dir": "reward"}),
        ("step3_ppo", {"actor_model_name_or_path": "sft", "critic_model_name_or_path": "reward", **lengths}),
    ]
    said = []
    for stage, flags in steps:
        words = [word for name, value in (shared | flags).items() for word in (f"--{name}", value)]
        ended = run_command(stage, words, folder=folder)
        assert ended.code == 0, ended.stderr
        said.append(ended.stderr.count("is untested here"))
    assert said == [int(kind not in TESTED_TYPES), 0, 0]
