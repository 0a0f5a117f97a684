"""SmolLM2-135M-Instruct, a published checkpoint, through all commands on a CPU, against numbers of its own.

Needs RLHF_TEST_MODELS; skipped without it. The numbers were computed by transformers in fp32.
"""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.command_run import run_command
from support.tiny_run import make_pair, make_prompts, read_metrics, write_lines
from transformers import AutoTokenizer

from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from rlhf import chat, compare

SENTENCE = (
    "The capital of France is Paris. It is located on the river Seine and is known for the Eiffel Tower, the Louvre "
    "museum and its cafes."
)
SHARED = {
    "data_path": "train.jsonl", "eval_data_path": "test.jsonl", "data_split": "none", "max_steps": 2, "dtype": "fp32",
    "data_output_path": "cache", "lora_dim": 4, "per_device_train_batch_size": 2, "keep_checkpoints": 0,
}  # fmt: skip
STAGES: dict[str, dict[str, Any]] = {
    "step1_sft": {"max_seq_len": 96, "output_dir": "sft"},
    "step2_reward": {"max_seq_len": 96, "output_dir": "reward", "model_name_or_path": "sft"},
    "step3_ppo": {
        "actor_model_name_or_path": "sft", "critic_model_name_or_path": "reward", "critic_lora_dim": 4,
        "max_prompt_seq_len": 64, "max_answer_seq_len": 12, "per_device_generation_batch_size": 2,
    },
}  # fmt: skip

pytestmark = pytest.mark.slow


def test_a_sentence_has_the_published_models_log_probability(real_model: Path) -> None:
    """The mean over 33 tokens without BOS; a uniform distribution would have 10.8."""
    model = CausalLM(load_causal_lm(str(real_model), dtype=torch.float32))
    ids = torch.tensor([AutoTokenizer.from_pretrained(real_model)(SENTENCE, add_special_tokens=False).input_ids])
    everything = torch.ones_like(ids, dtype=torch.bool)
    log_probs = model(ids, attention_mask=everything, selected=everything[:, 1:]).log_probs
    assert ids.shape[1] == 33 and -log_probs.mean().item() == pytest.approx(2.1621, abs=5e-4)


def test_it_answers_a_question(real_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    question = "What is the capital of Japan?"
    assert chat.main([str(real_model), "--prompt", question, "--temperature", "0", "--dtype", "fp32"]) == 0
    assert capfd.readouterr().out == "The capital of Japan is Tokyo.\n"


def test_it_goes_through_the_three_steps_and_a_comparison(real_model: Path, tmp_path: Path) -> None:
    random = Random(7)
    pairs = [make_pair(prompt, random) for prompt in make_prompts(8, random)]
    write_lines(tmp_path / "train.jsonl", pairs[:6])
    write_lines(tmp_path / "test.jsonl", pairs[6:])
    for stage, flags in STAGES.items():
        given = SHARED | ({"model_name_or_path": real_model} if stage == "step1_sft" else {}) | flags
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        ended = run_command(stage, words, folder=tmp_path)
        assert ended.code == 0, ended.stderr
    before, *_, after = [row["eval_loss"] for row in read_metrics(tmp_path / "runs/sft") if "eval_loss" in row]
    assert after < before - 0.1
    steps = [row for row in read_metrics(tmp_path / "output/runs/ppo") if "loss/policy" in row]
    assert len(steps) == 2 and all(row["policy/first_ratio_error"] < 1e-4 for row in steps)
    (tmp_path / "prompts.txt").write_text("What is a heron?\n")
    models = [str(tmp_path / name) for name in ("sft", "output/actor")]
    words = [
        "--reward-model",
        tmp_path / "reward",
        "--prompts",
        tmp_path / "prompts.txt",
        "--output",
        tmp_path / "both",
    ]
    assert compare.main([*models, *map(str, words), "--max-new-tokens", "6", "--dtype", "fp32"]) == 0
    (prompt,) = json.loads((tmp_path / "both.json").read_text())["prompts"]
    assert all(math.isfinite(answers[0]["score"]) for answers in prompt["answers"].values())
