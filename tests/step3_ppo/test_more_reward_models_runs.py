"""Runs with several reward models, by the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.in_process import error_lines
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.tiny_run import read_metrics
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.configuration.flags import parse
from pipeline.errors import InputError
from step3_ppo.config import PPOConfig
from step3_ppo.stage import STAGE

FOLDER_SIZES = {"num_train": 16, "num_test": 4}


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    # Another reward model: without constants, and a head of the other sign.
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scorer")
    model.score.weight.data.neg_()
    for name in ("score_mean", "score_std"):
        vars(model.config).pop(name, None)
    model.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(folder / "scorer").save_pretrained(folder / "other")
    return folder


def words(folder: Path, out: Path, *entries: str, **changes: Any) -> list[str]:
    flags = {
        "reward_model_name_or_path": folder / "scorer", "critic_model_name_or_path": folder / "scorer",
        "per_device_generation_batch_size": 8, "ppo_epochs": 2, "max_steps": 4,
    }  # fmt: skip
    given = ppo_words(folder, out, **flags | changes)
    return [*given, *(("--more-reward-models", *entries) if entries else ())]


@pytest.mark.slow
def test_a_run_goes_on_exactly_and_is_compared_by_its_models(folder, tmp_path, capsys):
    entry = f"{folder}/other:0.5"
    for name, steps in (("whole", 4), ("parts", 3), ("parts", 4)):
        assert run_ppo(words(folder, tmp_path / name, entry, max_steps=steps)) == 0
    weights = [(tmp_path / name / "actor/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["actor", "critic", "runs"]
    assert all("reward/reward model 2" in line for line in read_metrics(tmp_path / "whole/runs/ppo") if "epoch" in line)
    state = json.loads((tmp_path / "whole/runs/ppo/checkpoints/step-4/state.json").read_text())
    assert "reward model 2" in " ".join(state["fingerprints"]) or "reward_2 model" in state["fingerprints"]
    capsys.readouterr()
    assert run_ppo(words(folder, tmp_path / "parts", f"{folder}/other:0.25", max_steps=6)) == 2
    assert any("--more-reward-models" in line for line in error_lines(capsys.readouterr().err))


def test_what_is_planned_and_checked_of_them(folder, tmp_path):
    config = parse(PPOConfig, words(folder, tmp_path, f"{folder}/base", f"{folder}/other:2"), section="ppo").config
    names = ["actor", "critic", "reference", "reward model", "reward model 2", "reward model 3"]
    needs = STAGE.needs(config, {}, "bf16", 1)
    assert [use.role for use in needs.models] == names
    assert {one.role for one in needs.phases["score"]} == set(names)
    flags = [(model.flag, model.path) for model in STAGE.start_models(config, {})]
    lora = {"critic_lora_dim": 2, "only_optimize_lora": "true"}
    served = parse(PPOConfig, words(folder, tmp_path, f"{folder}/scorer", **lora), section="ppo").config
    held = [role.name for role in served.held_roles]
    assert "reward" not in held and "reward_2" in held, "the critic without its adapters is the first one alone"
    assert flags[-2:] == [("--more-reward-models", f"{folder}/base"), ("--more-reward-models", f"{folder}/other")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--more-reward-models", "a:b"], "--more-reward-models: a:b ... 'b' ... finite number"),
        (["--more-reward-models", "a:inf"], "--more-reward-models: a:inf ... 'inf'"),
        (["--more-reward-models", "a", "--reward-function", "exact_match"], "--more-reward-models ... no reward model"),
    ],
)
def test_what_names_no_model_is_refused(given, expected):
    with pytest.raises(InputError, match=naming(expected)):
        parse(PPOConfig, ["--actor-model-name-or-path", "a", "--critic-model-name-or-path", "c", *given], section="ppo")


def test_a_missing_folder_is_named_with_its_flag(folder, tmp_path, capsys):
    assert run_ppo(words(folder, tmp_path, f"{tmp_path}/none:2")) == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert f"--more-reward-models: {tmp_path}/none: no such folder" in line
