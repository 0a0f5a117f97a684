"""Methods without a critic: nothing is loaded, planned, saved or asked for one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.in_process import error_lines
from support.ppo_runs import ppo_words, run_ppo
from support.tiny_run import read_metrics

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flags import parse
from step3_ppo.config import PPOConfig
from step3_ppo.mathematics.estimators import estimate_advantages
from step3_ppo.stage import STAGE

FOLDER_SIZES = {"num_train": 16, "num_test": 4}
STEPS = 4
OF_A_CRITIC = {"loss/value", "value/clipfrac", "value/explained_variance", "critic/grad_norm", "critic/learning_rate"}


def words(folder: Path, out: Path, **changes: Any) -> list[str]:
    flags = {
        "reward_model_name_or_path": folder / "scorer", "per_device_generation_batch_size": 8, "ppo_epochs": 2,
        "max_steps": STEPS, "method": "reinforce_pp",
    }  # fmt: skip
    return ppo_words(folder, out, **flags | changes)


def trained(folder: Path, out: Path, **changes: Any) -> int:
    return run_ppo(words(folder, out, **changes))


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["reinforce_pp", "grpo", "rloo"])
def test_it_trains_saves_and_resumes(folder, tmp_path, method):
    changes = {"method": method} | ({} if method == "reinforce_pp" else {"num_samples_per_prompt": 2})
    assert trained(folder, tmp_path / "whole", **changes) == 0
    assert trained(folder, tmp_path / "parts", max_steps=STEPS - 1, **changes) == 0
    assert trained(folder, tmp_path / "parts", **changes) == 0
    run = tmp_path / "whole/runs/ppo"
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["actor", "runs"]
    files = {path.name for path in (run / f"checkpoints/step-{STEPS}").iterdir()}
    assert any("actor" in name for name in files) and not any("critic" in name for name in files)
    whole, parts = ([line for line in read_metrics(tmp_path / name / "runs/ppo") if "step_s" in line]
                    for name in ("whole", "parts"))  # fmt: skip
    assert [line["step"] for line in whole] == [1, 2, 3, 4] and not OF_A_CRITIC & set().union(*whole)
    for name in ("loss/policy", "actor/grad_norm", "policy/approx_kl"):
        assert [line[name] for line in parts] == [line[name] for line in whole], name
    assert all(line["actor/grad_norm"] > 0 for line in whole) and whole[0]["policy/first_ratio_error"] < 1e-6
    before, after = ((tmp_path / "whole/actor" if n else folder / "base") / "model.safetensors" for n in (0, 1))
    assert before.read_bytes() != after.read_bytes()


def test_with_the_critic_its_start_is_asked_for(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, method="ppo") == 2
    assert any("--critic-model-name-or-path" in line for line in error_lines(capsys.readouterr().err))


def test_nothing_is_planned_checked_or_compared_for_it(folder, tmp_path):
    resolved = parse(PPOConfig, words(folder, tmp_path), section="ppo")
    config, place = resolved.config, Placement(device="cuda", dtype="bf16", ranks=1, run_dir=tmp_path, one_node=True)
    assert list(config.engine_jsons(resolved.origins, place)) == ["actor", "reference", "reward model"]
    assert [role.name for role in config.held_roles] == ["actor", "reference", "reward"]
    flags = [model.flag for model in STAGE.start_models(config, {})]
    assert flags == ["--actor-model-name-or-path", "--reward-model-name-or-path"]
    assert [path.name for path in config.outputs] == ["actor"]
    needs = STAGE.needs(config, {}, "bf16", 1)
    assert [use.role for use in needs.models] == ["actor", "reference", "reward model"]
    asked = {each.role for passes in needs.phases.values() for each in passes}
    assert asked == {"actor", "reference", "reward model"}
    assert trained(folder, tmp_path, max_steps=1) == 0
    state = json.loads((tmp_path / "runs/ppo/checkpoints/step-1/state.json").read_text())
    assert list(state["engines"]) == ["actor"]
    assert sorted(state["fingerprints"]) == ["actor model", "prompts", "reward model"]


def test_advantages_without_values_are_the_discounted_rewards_to_come():
    """Williams 1992, by a loop over tokens; `gae_lambda` is not read."""
    rewards = torch.randn(3, 6, generator=torch.Generator().manual_seed(4))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    advantages, returns = estimate_advantages(rewards, None, mask, gamma=0.9, gae_lambda=0.5)
    for n, length in enumerate((6, 2, 0)):
        for t in range(length):
            expected = sum(0.9 ** (later - t) * rewards[n, later].item() for later in range(t, length))
            assert advantages[n, t].item() == pytest.approx(expected, rel=1e-5)
        assert (advantages[n, length:] == 0).all()
    assert advantages.equal(returns)


def test_the_reward_model_has_the_flags_of_the_actor():
    """And of its own; with a critic those of the critic."""
    given = ["--actor-model-name-or-path", "a", "--actor-quantization", "int8", "--reward-model-zero-stage", "3"]
    given += ["--method", "reinforce_pp", "--reward-model-name-or-path", "r"]
    config = parse(PPOConfig, given, section="ppo").config
    flags = config.flags_of(next(role for role in config.roles if role.name == "reward"))
    assert (flags.quantization, flags.zero_stage) == ("int8", 3)
