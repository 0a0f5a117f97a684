"""Responses with tools on CUDA devices: what is sampled, on fused and on streamed weights, is what the trainer sees."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_stage import furthest, log_of, run_stage
from support.tool_run import make_tool_folder

pytestmark = pytest.mark.gpu

METRICS = ("loss/policy", "objective/scores", "actor/grad_norm", "tools/turns", "tools/calls", "tools/failed_calls")
# Largest error of a token's log-probability: of other kernels in fp32, of rounding in 16 bits.
SAMPLER_ERROR = {"fp32": 1e-3, "bf16": 0.2}
FP32_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_folder(tmp_path_factory.mktemp("tools"), "add", "wrong", num_train=16)


def run(folder: Path, output: str, **given: Any) -> list[dict]:
    """Run two steps of GRPO on one rollout whose responses call a tool, in fp32 unless `given` says otherwise."""
    flags = {
        "method": "grpo", "critic_model_name_or_path": None, "critic_learning_rate": None, "max_prompt_seq_len": 950,
        "max_answer_seq_len": 192, "num_samples_per_prompt": 4, "rollout_batch_size": 32, "batch": 32,
        "reward_function": f"{folder}/tools.py:calls", "tools": f"{folder}/tools.py:add",
    }  # fmt: skip
    return run_stage("ppo", folder, output, **flags | given)


@pytest.fixture(scope="module")
def fused(folder: Path) -> list[dict]:
    lines = run(folder, "fused", generation_engine="fused")
    assert lines[0]["tools/turns"] > 1.5 and lines[0]["tools/calls"] > lines[0]["tools/failed_calls"] > 0
    return lines


@pytest.mark.parametrize("dtype", list(SAMPLER_ERROR))
def test_the_trainer_sees_what_was_sampled(folder: Path, dtype: str) -> None:
    lines = run(folder, dtype, dtype=dtype)
    assert lines[0]["policy/first_ratio_error"] == 0
    assert 0 < lines[0]["policy/sampler_error"] < SAMPLER_ERROR[dtype]


@pytest.mark.parametrize("engine", ["static", "eager"])
def test_backends_agree(folder: Path, fused: list[dict], engine: str) -> None:
    assert furthest(run(folder, engine, generation_engine=engine), fused, *METRICS) < FP32_TOLERANCE


@pytest.mark.two_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_streamed_weights(folder: Path, fused: list[dict]) -> None:
    lines = run(folder, "streamed", ranks=2, actor_zero_stage=3, rollout_weights="streamed")
    assert furthest(lines, fused, *METRICS) < FP32_TOLERANCE
    assert "weights are streamed" in log_of("ppo", folder, "streamed")
