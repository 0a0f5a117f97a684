"""Flags of small runs on several hosts, and what they leave."""

import subprocess
import sys
from pathlib import Path

from cluster import ROOT, environment

STEPS = 60


def flags(disk: Path, output: str, *more: object) -> list[str]:
    """Flags of train.py for a small run of all stages."""
    data = disk / "data"
    common = ["--actor-model", data / "base", "--reward-model", data / "base", "--output-dir", output]
    common += ["--data-path", data / "train.jsonl", "--eval-data-path", data / "test.jsonl", "--data-split", "none"]
    common += ["--data-output-path", disk / "cache", "--dtype", "fp32", "--per-device-train-batch-size", 4]
    common += ["--sft.max-seq-len", 96, "--reward.max-seq-len", 96]
    return [str(word) for word in [*common, "--enable-tensorboard", "false", *more]]


def one_stage(disk: Path, output: str, *more: object) -> list[str]:
    fixed = ("--step", 1, "--max-steps", STEPS, "--save-steps", 10, "--sft.num-train-epochs", 1000)
    return flags(disk, output, *fixed, *more)


def on_one_machine(disk: Path, *words: object) -> None:
    """The same run with two ranks on this machine."""
    command = [sys.executable, ROOT / "train.py", "--deployment-type", "single_node", "--num-gpus", 2, *words]
    done = subprocess.run(
        [*map(str, command)], cwd=disk, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def assert_same(one: Path, other: Path, *models: str) -> None:
    for model in models:
        assert (one / model / "model.safetensors").read_bytes() == (other / model / "model.safetensors").read_bytes()
