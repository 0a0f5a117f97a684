"""Several reward models: each has its own scores, constants and weight, and none of them learns."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ppo_loop import PPOLoop, loop_on_random_prompts
from support.ppo_settings import ppo_config
from support.ppo_updates import MEAN, STD
from support.reward_rows import constants
from support.tiny_models import give_template, save_tiny
from transformers import AutoModelForSequenceClassification

from pipeline.rewards.rows import Scale
from step3_ppo.models.engines import Models
from step3_ppo.state import State

SECOND = {"score_mean": 0.4, "score_std": 2.0}


@pytest.fixture(scope="module")
def further(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two more reward models: of another family with constants of step 2, and of another seed without."""
    parent = tmp_path_factory.mktemp("further")
    second = save_tiny("llama", bpe_folder, parent / "second", reward=True, seed=5, **SECOND)
    third = save_tiny("opt", bpe_folder, parent / "third", reward=True, seed=6)
    give_template(second, third)
    return SimpleNamespace(second=second, third=third)


def scores_of(folder: str, loop: PPOLoop, responses: Any) -> torch.Tensor:
    """The raw scores by transformers, row by row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    found = []
    for n in range(len(responses.sequences)):
        row = responses.sequences[n : n + 1, : int(responses.prompt_lengths[n] + responses.response_lengths[n])]
        with torch.no_grad():
            hidden = model.base_model(row).last_hidden_state
            found.append(model.score(hidden)[0, -1, 0].item())
    return torch.tensor(found)


def loop_with(world: Any, folder: Path, folders: Any, entries: list[str], **ppo: Any) -> PPOLoop:
    config = ppo_config(folders, gamma=1.0, gae_lambda=1.0, **ppo)
    config = config.replace(rewards=config.rewards.replace(more_reward_models=entries).model_dump())
    return loop_on_random_prompts(world, folder, config)


def test_each_scores_as_transformers_says_and_the_sum_is_weighted(world, trained_folders, further, tmp_path):
    loop = loop_with(world, tmp_path, trained_folders, [f"{further.second}:-0.5"], reward_clip=0.8)
    rollout = loop.collect()
    responses, judged = rollout.responses, loop.judged
    first, second = (scores_of(folder, loop, responses) for folder in (trained_folders.reward, further.second))
    torch.testing.assert_close(judged, torch.stack([first, second], 1), rtol=1e-4, atol=1e-5)
    assert rollout.metrics["objective/scores"] == pytest.approx((first - 0.5 * second).mean().item(), rel=1e-4)
    assert rollout.metrics["reward/reward model"] == pytest.approx(first.mean().item(), rel=1e-4)
    assert rollout.metrics["reward/reward model 2"] == pytest.approx(second.mean().item(), rel=1e-4)
    for n in range(len(first)):
        total = min(max((first[n].item() - MEAN) / STD, -0.8), 0.8)
        total -= 0.5 * min(max((second[n].item() - 0.4) / 2.0, -0.8), 0.8) + (0 if responses.finished[n] else 1.0)
        kl = (rollout.experience.log_probs - rollout.experience.ref_log_probs)[n].sum().item()
        assert rollout.experience.targets.returns[n, 0].item() == pytest.approx(total - 0.1 * kl, rel=1e-3, abs=1e-4)


def test_one_without_constants_takes_those_of_the_first_rollout_and_keeps_them(
    world, trained_folders, further, tmp_path
):
    entries = [further.second, f"{further.third}:2"]
    loop = loop_with(world, tmp_path, trained_folders, entries)
    critic = loop.ppo.models.critic.module
    values = (critic.score_mean, critic.score_std)
    rollout = loop.collect()
    third = loop.judged[:, 2]
    mean, std = third.mean().item(), third.std(correction=0).item()
    assert loop.state.score_constants == pytest.approx([MEAN, STD, 0.4, 2.0, mean, std], rel=1e-4)
    assert (critic.score_mean, critic.score_std) == values, "the critic keeps the scale of the first one"
    loop.update(rollout)
    again = State(**json.loads(json.dumps(asdict(loop.state))))
    fresh = loop_with(world, tmp_path / "again", trained_folders, entries)
    assert [one.scale.takes_first for one in fresh.ppo.models.rewards] == [False, False, True]
    fresh.ppo.models.normalise_by(again.score_constants)
    assert [(one.scale, one.weight) for one in fresh.ppo.models.rewards] == [
        (one.scale, one.weight) for one in loop.ppo.models.rewards
    ]
    assert not any(one.scale.takes_first for one in fresh.ppo.models.rewards)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_critic_takes_the_scale_of_the_first_one_alone(is_first):
    """And only where that one takes it from the first rollout: else the critic's is known."""
    critic = SimpleNamespace(module=SimpleNamespace(score_mean=0.0, score_std=1.0))
    rewards = [constants(1.0, 0.5, 2.0, takes_first=is_first), constants(1.0, 0.0, 1.0, takes_first=True)]
    models = Models(None, {"critic": critic}, {}, rewards)
    assert models.normalise_by([3.0, 4.0, 5.0, 6.0]) == is_first
    assert (critic.module.score_mean, critic.module.score_std) == ((3.0, 4.0) if is_first else (0.0, 1.0))
    assert [one.scale for one in rewards] == [Scale(3.0, 4.0), Scale(5.0, 6.0)]
