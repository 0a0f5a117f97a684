"""The three steps on one CUDA device in 16 bits, by stage and precision; `make test-gpu`."""

import math
from pathlib import Path

import pytest
from support.command_run import run_command
from support.cuda_stage import scale_file
from support.tiny_run import read_metrics

pytestmark = pytest.mark.gpu

MODULES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo"}
CASES = [(0, "bf16"), (2, "fp16"), (3, "bf16")]


def run(stage: str, folder: Path, output: str, **given: object) -> list[dict]:
    """Run a stage for a few steps; its training lines. Every number must be finite."""
    common = {
        "data_path": folder / "train.jsonl",
        "eval_data_path": folder / "test.jsonl",
        "data_split": "none",
        "max_steps": 4,
        "keep_checkpoints": 0,
    }
    words = [word for name, value in {**common, **given}.items() for word in (f"--{name}", str(value))]
    ended = run_command(MODULES[stage], [*words, "--output-dir", output], folder=folder)
    assert ended.code == 0, ended.stderr[-2000:]
    run_dir = folder / output / "runs" / "ppo" if stage == "ppo" else folder / "runs" / output
    lines = [line for line in read_metrics(run_dir) if "step_s" in line]
    assert len(lines) == given.get("max_steps", 4)
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    return lines


@pytest.mark.parametrize(("zero_stage", "dtype"), CASES)
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_supervised_steps(folder, stage, zero_stage, dtype):
    lines = run(
        stage,
        folder,
        f"{stage}-{zero_stage}",
        model_name_or_path="base",
        zero_stage=zero_stage,
        dtype=dtype,
        max_seq_len=64,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        deepspeed_config=scale_file(folder, initial_scale_power=8),
    )
    assert all(line["loss"] is not None for line in lines)
    assert lines[-1]["skipped_updates"] == 0
    assert all(line["gpu_memory_gib"] > 0 for line in lines)


@pytest.mark.parametrize(("zero_stage", "dtype"), CASES)
def test_ppo(folder, zero_stage, dtype):
    lines = run(
        "ppo",
        folder,
        f"ppo-{zero_stage}",
        actor_model_name_or_path="base",
        critic_model_name_or_path="scorer",
        actor_zero_stage=zero_stage,
        critic_zero_stage=zero_stage,
        dtype=dtype,
        max_prompt_seq_len=64,
        max_answer_seq_len=16,
        per_device_generation_batch_size=8,
        per_device_train_batch_size=4,
        deepspeed_config=scale_file(folder, initial_scale_power=8),
    )
    assert max(line["policy/first_ratio_error"] for line in lines) == 0.0
    assert lines[-1]["skipped_updates"] == 0


def test_an_fp16_loss_scale_that_starts_too_high_settles(folder):
    """Each overflow is skipped and halves the scale; that takes more steps than --max-bad-steps allows other faults."""
    lines = run(
        "sft",
        folder,
        "sft-settling",
        model_name_or_path="base",
        zero_stage=2,
        dtype="fp16",
        max_seq_len=64,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        deepspeed_config=scale_file(folder, initial_scale_power=32, hysteresis=1),
        max_bad_steps=2,
        max_steps=40,
    )
    skipped = [line["skipped_updates"] for line in lines]
    assert 2 < skipped[-1] < 40 and skipped[-1] == skipped[-5]
    assert lines[-1]["loss"] < lines[0]["loss"]
