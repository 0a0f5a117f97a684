"""Options of PPO on a CUDA device: what must change nothing does not, what must change something does; chat."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cuda_stage import furthest, log_of, run_stage, scale_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf import chat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOSSES = ("loss/policy", "loss/value", "objective/kl", "objective/scores", "actor/grad_norm", "critic/grad_norm")
FP32_TOLERANCE = 1e-4
BOTH = ("actor", "critic")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict]:
    lines = run_stage("ppo", folder, "plain")
    assert "generation: fused backend" in log_of("ppo", folder, "plain")
    assert lines[0]["policy/first_ratio_error"] == 0.0 and lines[1]["policy/approx_kl"] > 0
    return lines


def weights(folder: Path, output: str, model: str = "actor") -> dict[str, torch.Tensor]:
    return load_file(folder / output / model / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("checkpointing", {f"{model}_gradient_checkpointing": "true" for model in BOTH}),
        ("offload", {"offload": "true", "actor_zero_stage": 2, "critic_zero_stage": 2}),
        ("offload at stage 3", {"offload": "true", "actor_zero_stage": 3, "critic_zero_stage": 3}),
        ("halves", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
        ("layers", {"actor_zero_stage": 3, "critic_zero_stage": 3, "zero3_gather": "layers"}),
        ("static", {"generation_engine": "static"}),
        ("eager", {"generation_engine": "eager"}),
    ],
)
def test_what_only_moves_memory_or_time_changes_no_number(folder, plain, name, flags):
    lines = run_stage("ppo", folder, name, **flags)
    assert furthest(lines, plain, *LOSSES) < FP32_TOLERANCE


@pytest.mark.parametrize("merged", ["true", "false"])
def test_lora(folder, plain, merged):
    """The first rollout is the base model's; then the adapters learn and nothing else does."""
    output = f"lora-{merged}"
    flags = {"actor_lora_dim": 4, "actor_lora_learning_rate": 1e-2, "merge_lora_for_generation": merged}
    lines = run_stage("ppo", folder, output, **flags)
    assert furthest(lines[:1], plain[:1], "objective/kl", "objective/scores", "loss/value") < FP32_TOLERANCE
    assert lines[0]["policy/first_ratio_error"] == 0.0 and lines[1]["policy/approx_kl"] > 0
    base, trained = load_file(folder / "base/model.safetensors"), weights(folder, output)
    changed = {name for name in trained if not torch.equal(trained[name], base[name])}
    assert changed and all("proj" in name or "fc" in name for name in changed)


def test_unsupervised_text_and_moving_average(folder, plain):
    """The text's loss changes the actor; the average lies between its beginning and its end."""
    flags = {"unsupervised_data_path": "text.jsonl", "unsup_coef": 0.5, "enable_ema": "true", "ema_decay": 0.5}
    lines = run_stage("ppo", folder, "text", **flags)
    assert all(line["loss/ptx"] > 0 for line in lines)
    assert furthest(lines[:1], plain[:1], "objective/kl", "objective/scores") < FP32_TOLERANCE
    assert furthest(lines, plain, "actor/grad_norm") > 1e-2, "the text's gradient counts"
    base, actor = load_file(folder / "base/model.safetensors"), weights(folder, "text")
    average = weights(folder, "text", "actor_ema")
    moved = sum((actor[name] - base[name]).square().sum() for name in actor)
    behind = sum((actor[name] - average[name]).square().sum() for name in actor)
    assert 0 < behind < moved


def test_an_fp16_overflow_skips_the_step_of_both_models(folder):
    """A scale that is too high for one of them: neither steps; it halves until both do."""
    flags = {"dtype": "fp16", "actor_zero_stage": 2, "critic_zero_stage": 2, "max_bad_steps": 2, "max_steps": 40,
             "deepspeed_config": scale_file(folder, initial_scale_power=32, hysteresis=1)}  # fmt: skip
    lines = run_stage("ppo", folder, "overflow", **flags)
    skipped = [line["skipped_updates"] for line in lines]
    assert 2 < skipped[-1] < 40 and skipped[-1] == skipped[-5], "it settles"
    assert skipped[:2] == [1, 2]


def test_chat_answers_as_transformers_does(folder, plain, capsys):
    """Greedy in fp32: the tokens of transformers' own generate on the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "plain" / "actor")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain" / "actor")
    words = ["--path", str(folder / "plain" / "actor"), "--prompt", "How is the sea?", "--temperature", "0"]
    assert chat.main([*words, "--dtype", "fp32", "--max-new-tokens", "12"]) == 0
    answer = capsys.readouterr().out
    messages = [{"role": "user", "content": "How is the sea?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert re.sub(r"\s+", " ", expected).strip() in re.sub(r"\s+", " ", answer)


def test_a_model_of_real_size(tmp_path):
    """OPT-1.3B and OPT-350M with random weights, the batch of the benchmark: finite, exact ratios, within 48 GiB."""
    subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.random_models", "--output", tmp_path, "--prompts", "192"], check=True
    )
    lines = run_stage(
        "ppo",
        tmp_path,
        "real",
        batch=64,
        data_path="prompts.jsonl",
        eval_data_path=None,
        eval_fraction=0,
        actor_model_name_or_path="actor",
        critic_model_name_or_path="critic",
        dtype="bf16",
        actor_zero_stage=2,
        critic_zero_stage=2,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        max_prompt_seq_len=256,
        max_answer_seq_len=256,
        long_prompts="truncate_left",
        actor_learning_rate=1e-6,
        critic_learning_rate=1e-6,
        ppo_epochs=1,
        old_log_probs="trainer",
        **{f"{model}_gradient_checkpointing": "false" for model in BOTH},
    )
    assert all(line["policy/first_ratio_error"] == 0.0 for line in lines)
    assert all(line["policy/sampler_error"] < 0.2 for line in lines)
    assert max(line["gpu_memory_gib"] for line in lines) < 48
    assert lines[-1]["skipped_updates"] == 0
