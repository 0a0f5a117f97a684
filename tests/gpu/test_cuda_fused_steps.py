"""Whole steps with fused layers and without: the same losses and gradients, whatever engine is around the model."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.command_run import TIMEOUT_S
from support.forks import environment
from support.tiny_run import read_metrics

pytestmark = pytest.mark.gpu

# argv: from how many numbers on layers are fused, the module to run, its flags.
RUN = """
import runpy, sys
from pipeline.models.forward import fused_layers
fused_layers.MIN_ELEMENTS = int(sys.argv.pop(1))
if fused_layers.MIN_ELEMENTS:
    fused_layers.LoraLinear.plain_adapter = lambda layer: None
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
ALWAYS, NEVER = 0, 2**62
KERNELS = {"_norm_gradient", "_relu_gradient"}
TINY = "--eval-data-path test.jsonl --data-path train.jsonl --data-split none --keep-checkpoints 0 --dtype fp32"
SUPERVISED = "--model-name-or-path base --max-seq-len 64 --per-device-train-batch-size 8 --max-steps 4"
PPO = (
    "--actor-model-name-or-path base --critic-model-name-or-path scorer --max-prompt-seq-len 64 "
    "--max-answer-seq-len 16 --per-device-generation-batch-size 8 --per-device-train-batch-size 4 --max-steps 2"
)
LORA = "--lora-dim 4 --lora-learning-rate 1e-2"
PPO_LORA = "--actor-lora-dim 4 --critic-lora-dim 4 --actor-quantization int8 --actor-lora-learning-rate 1e-2"
CASES = {
    "sft, ZeRO 2": ("step1_sft.main", f"{SUPERVISED} --zero-stage 2"),
    "sft, ZeRO 3 with checkpointing": (
        "step1_sft.main",
        f"{SUPERVISED} --zero-stage 3 --gradient-checkpointing true",
    ),
    "reward, ZeRO 0": ("step2_reward.main", f"{SUPERVISED} --zero-stage 0"),
    "sft, LoRA, ZeRO 2 with checkpointing": (
        "step1_sft.main",
        f"{SUPERVISED} --zero-stage 2 --gradient-checkpointing true {LORA}",
    ),
    "sft, LoRA, ZeRO 3": ("step1_sft.main", f"{SUPERVISED} --zero-stage 3 --zero3-gather once {LORA}"),
    "sft, LoRA, ZeRO 3 by layer": ("step1_sft.main", f"{SUPERVISED} --zero-stage 3 --zero3-gather layers {LORA}"),
    "ppo, LoRA and int8": ("step3_ppo.main", f"{PPO} {PPO_LORA}"),
    "ppo, ZeRO 3": ("step3_ppo.main", f"{PPO} --actor-zero-stage 3 --critic-zero-stage 3"),
}
# What hangs on the model's arithmetic alone.
NAMES = ("loss", "grad_norm", "loss/policy", "loss/value", "actor/grad_norm", "critic/grad_norm", "objective/scores")


def run(case: str, size: int, inputs: Path, folder: Path) -> tuple[list[dict[str, float]], set[str]]:
    """Fused from `size` numbers on: (its steps' numbers, which of KERNELS were compiled for it)."""
    module, flags = CASES[case]
    folder.mkdir()
    for path in inputs.iterdir():
        (folder / path.name).symlink_to(path)
    words = [sys.executable, "-c", RUN, str(size), module, *TINY.split(), *flags.split(), "--output-dir", "out"]
    compiled = {"TRITON_CACHE_DIR": str(folder / "kernels")}
    done = subprocess.run(
        words, cwd=folder, env=environment() | compiled, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (metrics,) = folder.rglob("metrics.jsonl")
    steps = [line for line in read_metrics(metrics.parent) if "step_s" in line]
    names = {path.stem for path in (folder / "kernels").rglob("*.ttir")}
    return [{name: line[name] for name in NAMES if name in line} for line in steps], KERNELS & names


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same(case, folder, tmp_path):
    fused, kernels = run(case, ALWAYS, folder, tmp_path / "fused")
    plain, no_kernels = run(case, NEVER, folder, tmp_path / "plain")
    # A linear layer with an adapter has no kernel with the ReLU after it.
    assert kernels == (KERNELS - {"_relu_gradient"} if "LoRA" in case else KERNELS) and not no_kernels
    assert len(fused) == len(plain) > 1 and len(fused[0]) > 1
    for mine, theirs in zip(fused, plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
