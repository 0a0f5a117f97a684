"""Rollouts with tools where something goes wrong or repeats: padding, other prompts, lost responses, memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.in_process import error_lines
from support.messages import naming
from support.packed_rows import give_bounds, plain_kernel
from support.ppo_runs import run_ppo
from support.tiny_run import read_metrics
from support.tool_run import make_tool_folder, tool_words

from pipeline.data.batching import epoch_order
from pipeline.generation import eager
from step3_ppo.models import engines
from step3_ppo.stage import starts

pytestmark = pytest.mark.slow
TEXT = 'return f" You are at {number}."'
HANGS = "time.sleep(60)\n        return float(self.position)"


def world_folder(folder: Path, *names: str, change: tuple[str, str] = ("", ""), **sizes: int) -> tuple[Path, str]:
    """A folder of `make_tool_folder` whose environment is changed, and the flag of the environment."""
    folder.mkdir()
    made, (old, new) = make_tool_folder(folder, *names, **sizes), change
    code = (made / "tools.py").read_text()
    assert old in code
    (made / "tools.py").write_text(code.replace(old, new) if old else code)
    return made, f"{made}/tools.py:World"


def steps(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out / "runs/ppo") if "tools/turns" in line]


def test_rows_that_fill_a_rollout_share_no_prompt_with_the_row_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have its plain prompt, and the row itself has the environment's text behind it.

    By this seed a row that fills the rollout is longer than the row, which would take the prompt's states from it.
    """
    seed = [seed for seed in range(1, 50) if 0 in epoch_order(seed, 0, 6).tolist()[4:]][1]
    folder, world = world_folder(tmp_path / "f", "look", "add", change=(TEXT, 'return " red"'), num_train=6)
    monkeypatch.setattr(engines, "enable_packed_attention", give_bounds)
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "rollout_batch_size": 16}
    with plain_kernel():
        assert run_ppo(tool_words(folder, tmp_path, environment=world, reward_function=None, method="rloo",
                                  max_turns=5, seed=seed, eval_interval=0, **sizes)) == 0  # fmt: skip
    errors = [line["policy/sampler_error"] for line in steps(tmp_path)]
    assert len(errors) > 2 and max(errors) < 1e-4


def test_equal_groups_are_replaced_where_an_environment_and_a_function_reward(tmp_path: Path) -> None:
    folder, world = world_folder(tmp_path / "f", "add", "look")
    words = tool_words(folder, tmp_path, environment=world, replace_equal_groups="true", max_steps=2)
    assert run_ppo(words) == 0
    assert {"reward/World", "reward/calls"} <= steps(tmp_path)[0].keys()


def ended(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: Path, *names: str, **flags: Any) -> str:
    """The line that a run ends with, by exit code 2."""
    assert run_ppo(tool_words(folder, tmp_path, *names, eval_interval=0, **flags)) == 2
    return error_lines(capsys.readouterr().err)[-1]


def test_a_run_whose_responses_are_all_lost_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = world_folder(tmp_path / "f", "slow", change=("time.sleep(60)", "os._exit(1)"))
    flags = {"method": "rloo", "max_turns": 2, "max_reward_failures": 0.01, "num_samples_per_prompt": 8}
    line = ended(tmp_path, capsys, folder, "slow", rollout_batch_size=64, **flags)
    assert line == naming("--tools ... calls ... worker died")
    assert (tmp_path / "runs/ppo/checkpoints/step-0").is_dir()


def test_a_reward_that_hangs_names_its_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, world = world_folder(tmp_path / "f", "look", change=("return float(self.position)", HANGS))
    line = ended(tmp_path, capsys, folder, environment=world, reward_function=None, reward_timeout_s=1)
    assert line == naming("--environment ... World ... 16 timed out")


def test_a_reset_that_needs_a_missing_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, world = world_folder(tmp_path / "f", "look", change=("number=0", "numbers, prompt"))
    assert ended(tmp_path, capsys, folder, environment=world) == naming("--environment ... 'numbers' ... number")


def test_texts_that_differ_end_a_run_once_it_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In its second rollout, of the row of number 5 or more."""
    change = (TEXT, 'return f" {id(self) if number > 3 else 0}"')
    folder, world = world_folder(tmp_path / "f", "look", change=change)
    line = ended(tmp_path, capsys, folder, environment=world, reward_function=None, max_steps=8)
    assert line == naming("--environment ... different texts ... row alone")
    assert any((tmp_path / "runs/ppo/checkpoints").glob("step-*"))


def test_a_prompt_that_its_environment_makes_too_long_loses_its_responses(tmp_path: Path) -> None:
    change = (TEXT, 'return " red" * (200 if number == 5 else 1)')
    folder, world = world_folder(tmp_path / "f", "look", change=change)
    flags = {"max_prompt_seq_len": 400, "max_reward_failures": 1, "max_steps": 4}
    assert run_ppo(tool_words(folder, tmp_path, environment=world, reward_function=None, **flags)) == 0
    lines = steps(tmp_path)
    assert sorted(line["tools/lost"] for line in lines) == [0.0, 0.25]
    assert all(line["rows_masked"] == 16 * line["tools/lost"] for line in lines)


def test_a_rollout_that_is_repeated_after_out_of_memory_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, world = world_folder(tmp_path / "f", "add", "look")
    assert run_ppo(tool_words(folder, tmp_path / "whole", "add", environment=world)) == 0
    step, calls = eager.Batch.step, list[int]()

    def fails_once(batch: eager.Batch) -> Any:
        calls.append(len(batch.running))
        if len(calls) == 60:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return step(batch)

    monkeypatch.setattr(eager.Batch, "step", fails_once)
    assert run_ppo(tool_words(folder, tmp_path / "again", "add", environment=world)) == 0
    names = ("objective/scores", "tools/turns", "tools/calls", "completions/mean_length", "objective/entropy")
    whole, again = ([[line[name] for name in names] for line in steps(tmp_path / out)] for out in ("whole", "again"))
    assert len(calls) > 60 and again == [pytest.approx(line, abs=1e-5) for line in whole]


def test_the_model_card_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    folder, world = world_folder(tmp_path / "f", "add", "look")
    assert run_ppo(tool_words(folder, tmp_path, "add", environment=world, max_steps=1)) == 0
    card = (tmp_path / "actor/README.md").read_text()
    assert "tools.py:add" in card and "tools.py:World" in card and str(tmp_path) not in card


def test_an_environment_needs_no_reward_model() -> None:
    for method in ("grpo", "ppo"):
        found = starts({"method": method, "environment": "game.py:Guess"})
        assert all(start.follows == "actor" for start in found.values()) and "reward_model_" not in found


def test_samples_show_where_turns_begin(tmp_path: Path) -> None:
    folder, world = world_folder(tmp_path / "f", "look")
    assert run_ppo(tool_words(folder, tmp_path, environment=world, reward_function=None, max_steps=1)) == 0
    samples = [json.loads(line) for line in (tmp_path / "runs/ppo/samples.jsonl").read_text().splitlines()]
    assert any("<|im_start|>tool\n" in one["response"] for one in samples)
