"""`train.py --step 1 2 3` as a user runs it: the real launcher, real steps, small data and models."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support import forks
from support.messages import naming
from support.source_tree import ROOT
from support.tiny_run import make_folder, read_metrics

pytestmark = pytest.mark.slow

RUNS = {"sft": "sft", "reward": "reward", "ppo": "ppo"}
ALL = {"data_path": "train.jsonl", "eval_data_path": "test.jsonl", "data_split": "none", "max_steps": 2}
LENGTHS = {"sft": {"max_seq_len": 96}, "reward": {"max_seq_len": 96}, "ppo": {"max_prompt_seq_len": 48}}
SIZES = {"per_device_train_batch_size": 4, "dtype": "fp32"}


def train(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    words = [word for stage in RUNS for name, value in (ALL | SIZES | LENGTHS[stage]).items()
             for word in (f"--{stage}.{name}", str(value))]  # fmt: skip
    rollouts = ["--ppo.per-device-generation-batch-size", "4", "--ppo.max-answer-seq-len", "8"]
    command = [sys.executable, str(ROOT / "train.py"), "--step", "1", "2", "3", "--actor-model", "base"]
    command += ["--reward-model", "base", *words, *rollouts, *more]
    environment = forks.environment() | {"PYTHON": sys.executable}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    return folder, train(folder)


def read_settings(folder: Path, stage: str) -> dict[str, Any]:
    settings = json.loads((folder / "output" / "runs" / stage / "config.json").read_text())
    return {name: setting["value"] for name, setting in settings.items()}


def test_three_stages_train_one_after_the_other(finished: Any) -> None:
    folder, done = finished
    assert done.returncode == 0, done.stderr[-3000:]
    assert [done.stdout.count(f"== stage {number}: done in") for number in (1, 2, 3)] == [1, 1, 1]
    for stage, run in RUNS.items():
        steps = [line["step"] for line in read_metrics(folder / "output" / "runs" / run) if "skipped_updates" in line]
        assert steps == [1, 2], stage


def test_each_stage_starts_from_what_those_before_left(finished: Any) -> None:
    folder, _ = finished
    ppo = read_settings(folder, "ppo")
    assert ppo["actor_model_name_or_path"] == "output/sft" and ppo["critic_model_name_or_path"] == "output/reward"
    base, sft, actor = (
        load_file(folder / path / "model.safetensors") for path in ("base", "output/sft", "output/actor")
    )
    moved = [max((one[name] - two[name]).abs().max() for name in one) for one, two in ((base, sft), (sft, actor))]
    assert all(0 < distance < 0.1 for distance in moved), "each is trained, and near to what it started from"


def test_the_same_command_again_trains_nothing(finished: Any) -> None:
    folder, _ = finished
    before = (folder / "output" / "actor" / "model.safetensors").stat().st_mtime_ns
    again = train(folder)
    assert again.returncode == 0 and again.stdout.count("finished already") == 3, again.stderr[-2000:]
    assert (folder / "output" / "actor" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["start", "dry run"])
def test_changed_data_of_the_last_stage_is_refused_before_the_first_one_trains(
    finished: Any, tmp_path: Path, more: tuple[str, ...]
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "all")
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "other.jsonl").write_text("".join(lines[1:]))
    done = train(folder, "--sft.overwrite", "--ppo.data-path", "other.jsonl", "--ppo.max-steps", "3", *more)
    assert done.returncode == 2 and ("== stage 1" in done.stdout) == bool(more), "the plan is shown all the same"
    assert done.stderr.splitlines() == [
        naming("error: --ppo.data-path ... other.jsonl ... checkpoint"),
        naming("error: ppo: output/runs/ppo/checkpoints/step-2", "--ppo.overwrite", "--ppo.force-resume"),
    ]


def test_the_stages_hand_on_adapters_of_quantised_bases(tmp_path: Path) -> None:
    """One command from the base to an adapter that belongs to it, and another that merges it."""
    folder = make_folder(tmp_path)
    flags = ["--quantization", "int8", "--lora-dim", "4", "--ppo.critic-quantization", "int8"]
    flags += ["--ppo.critic-lora-dim", "4"]
    done = train(folder, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("sft", "reward", "actor", "critic"):
        assert not (folder / "output" / name / "model.safetensors").exists()
        adapter = json.loads((folder / "output" / name / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == str((folder / "base").resolve())
    assert train(folder, *flags).stdout.count("finished already") == 3
    merge = [sys.executable, "-m", "rlhf", "merge", "output/actor", "output/merged", "--dtype", "fp32"]
    merged = subprocess.run(merge, cwd=folder, env=forks.environment(), capture_output=True, text=True, timeout=100)
    assert merged.returncode == 0 and "logits of the int8 base" in merged.stdout, merged.stderr
    base, actor = (load_file(folder / path / "model.safetensors") for path in ("base", "output/merged"))
    assert 0 < max((base[name] - actor[name]).abs().max() for name in base) < 0.1
