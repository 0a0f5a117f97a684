"""Runs whose responses functions reward: alone and beside a reward model, with each method."""

from pathlib import Path
from typing import Any

import pytest
from support.in_process import undone_afterwards
from support.tiny_run import make_folder, read_metrics

from step3_ppo.main import main

FUNCTIONS = """
def length(completions, **columns):
    return [len(text) / 10 for text in completions]

def tokens(completion_ids):
    return [[0.1] * len(ids) for ids in completion_ids]

def odd(prompts, completions):
    return [None if len(text) % 2 else 1.0 for text in completions]

def wrong(completions):
    return ["good"] * len(completions)

def raises(completions):
    raise RuntimeError("no luck")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("functions"), num_train=16, num_test=4)
    (folder / "rewards.py").write_text(FUNCTIONS)
    return folder


def trained(folder: Path, out: Path, *functions: str, **changes: Any) -> int:
    flags = {
        "actor_model_name_or_path": folder / "base",
        "data_path": folder / "train.jsonl", "eval_data_path": folder / "test.jsonl", "data_split": "none",
        "data_output_path": folder / "cache", "output_dir": out, "max_prompt_seq_len": 48, "max_answer_seq_len": 8,
        "rollout_batch_size": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "dtype": "fp32",
        "actor_learning_rate": 1e-3, "max_steps": 3, "lr_scheduler_type": "constant", "enable_tensorboard": "false",
        "method": "reinforce_pp",
    } | changes  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    with undone_afterwards():
        return main([*words, "--reward_function", *(f"{folder}/rewards.py:{name}" for name in functions)])


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("method", ["ppo", "grpo", "rloo", "reinforce_pp"])
def test_functions_alone_reward_with_each_method(folder, tmp_path, method):
    changes = {"num_samples_per_prompt": 4} if method in ("grpo", "rloo") else {}
    assert trained(folder, tmp_path, "length", "tokens:0.5", "odd", method=method, **changes) == 0
    lines = [line for line in read_metrics(tmp_path / "runs/ppo") if "step_s" in line]
    assert len(lines) == 3 and all(line["reward_failures/length"] == 0 for line in lines)
    assert all(line["reward/odd"] == 1.0 for line in lines if line["reward/odd"] is not None)
    folders = {"actor", "runs"} | ({"critic"} if method == "ppo" else set())
    assert {path.name for path in tmp_path.iterdir()} == folders


def test_a_wrong_value_ends_the_run_with_2_and_all_saved(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, "wrong") == 2
    (line,) = errors(capsys)
    assert "wrong" in line and "'good'" in line and "prompt" in line
    assert (tmp_path / "runs/ppo/checkpoints/step-0").is_dir()


def test_failures_end_the_run_with_2_and_their_first_cause(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, "raises") == 2
    (line,) = errors(capsys)
    assert "no luck" in line and "8 of the last 8" in line
