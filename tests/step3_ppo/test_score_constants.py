"""Step 3 with a reward model that does not say the mean and std of its scores: those of the first rollout are taken."""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.model_folders import assert_same_folder
from support.ppo_loop import loop_on_random_prompts
from support.ppo_settings import ppo_config
from support.run_words import run_stage, run_words, start_flags
from support.tiny_run import make_folder

from pipeline.checkpoints import checkpoint
from pipeline.rewards.rows import Scale
from rlhf.models import export
from step3_ppo import training
from step3_ppo.build import resume
from step3_ppo.rewarding import fitted_scales
from step3_ppo.state import State


def without_constants(folders, folder) -> SimpleNamespace:
    """The same models, of which the reward model does not say what its scores' mean and std are."""
    reward = shutil.copytree(folders.reward, folder / "raw")
    forget_constants(reward)
    return SimpleNamespace(actor=folders.actor, reward=str(reward))


def forget_constants(reward: Path) -> None:
    config = json.loads((reward / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in ("score_mean", "score_std")}
    (reward / "config.json").write_text(json.dumps(kept))


def test_padding_of_the_first_rollout_is_not_in_the_constants(world, trained_folders, tmp_path):
    """Its rows have scores too: those of the first prompt's responses, sampled once more."""
    config = ppo_config(without_constants(trained_folders, tmp_path))
    loop = loop_on_random_prompts(world, tmp_path, config, num_prompts=3)
    responses = training.sample(loop.ppo, loop.state, loop.control)
    judged = training.score_rewards(loop.ppo, responses, loop.ppo.prompts.train, loop.state, loop.control)
    (fitted,) = fitted_scales(responses, judged)
    rollout = loop.collect()
    scores = loop.judged[:3, 0].double().numpy()
    assert [fitted.mean, fitted.std] == pytest.approx([scores.mean(), scores.std()], rel=1e-6)
    assert rollout.responses.valid.tolist() == [True] * 3 + [False] and loop.judged[3, 0] != 0
    assert loop.state.score_constants == pytest.approx([scores.mean(), scores.std()], rel=1e-6)
    cut = 1.0 - rollout.responses.finished[:3].double().numpy()
    shaped = ((scores - scores.mean()) / scores.std()).clip(-5, 5) - cut
    assert rollout.metrics["objective/rlhf_reward"] == pytest.approx(shaped.mean(), abs=2e-3)


def test_a_reward_model_without_constants_gets_those_of_the_first_rollout(world, trained_folders, tmp_path, caplog):
    """Then the run is that of a model whose config.json says them: the first values and rewards too."""
    folders = without_constants(trained_folders, tmp_path)
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(folders, ppo_epochs=2))
    loop.evaluate()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    own = np.array([row["score"] for row in samples])
    shaped = ((own - own.mean()) / own.std()).clip(-5, 5) - [1.0 * (not row["finished"]) for row in samples]
    assert loop.control.evaluations[0]["eval_objective/rlhf_reward"] == pytest.approx(shaped.mean(), abs=2e-3)
    assert loop.state.score_constants is None, "an evaluation before the first rollout is on a scale of its own"
    with caplog.at_level(logging.INFO):
        found = loop.iterate()
    scores = loop.judged[:, 0].double().numpy()
    assert loop.state.score_constants == pytest.approx([scores.mean(), scores.std()], rel=1e-6)
    assert sum("--normalise-scores" in line for line in caplog.messages) == 1
    found += loop.iterate()
    assert sum("--normalise-scores" in line for line in caplog.messages) == 1, "once"
    mean, std = loop.state.score_constants
    path = Path(folders.reward) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"score_mean": mean, "score_std": std}))
    told = loop_on_random_prompts(world, tmp_path, ppo_config(folders, ppo_epochs=2))
    for mine, theirs in zip(found, told.iterate() + told.iterate(), strict=True):
        for name in [name for name in theirs if name.startswith(("objective/", "loss/", "value/", "actor/grad"))]:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6, nan_ok=True), name


def test_the_constants_of_the_first_rollout_come_back_with_a_checkpoint(world, trained_folders, tmp_path):
    folders = without_constants(trained_folders, tmp_path)
    for constants in ([0.25, 3.0], None):  # None: written by a version that took raw scores
        loop = loop_on_random_prompts(world, tmp_path, ppo_config(folders))
        saved = {"ppo": asdict(State(step=4, rollout=1, score_constants=constants))}
        state, _ = resume(loop.ppo, checkpoint.Resumed(saved, {}, {}))
        mean, std = constants or (0.0, 1.0)
        (judge,), critic = loop.ppo.models.rewards, loop.ppo.models.critic.module
        assert judge.scale == Scale(mean, std) and state.score_constants == constants
        assert (critic.score_mean, critic.score_std) == (mean, std)


def test_a_critic_with_constants_of_its_own_keeps_them(world, trained_folders, tmp_path):
    """A resumed job with another reward model, which does not say its own."""
    folders = without_constants(trained_folders, tmp_path)
    config = ppo_config(trained_folders).replace(reward_model_name_or_path=folders.reward)
    loop = loop_on_random_prompts(world, tmp_path, config)
    critic = loop.ppo.models.critic.module
    own = critic.score_mean, critic.score_std
    saved = {"ppo": asdict(State(step=4, rollout=1, score_constants=[0.25, 3.0]))}
    resume(loop.ppo, checkpoint.Resumed(saved, {}, {}))
    (judge,) = loop.ppo.models.rewards
    assert judge.scale == Scale(0.25, 3.0)
    assert (critic.score_mean, critic.score_std) == own != (0.0, 1.0)


def test_an_exported_critic_says_the_constants_of_the_first_rollout(tmp_path):
    """As that of the finished run does, of one step on a rollout of all 4 prompts."""
    folder = make_folder(tmp_path, num_train=4, num_test=2)
    forget_constants(folder / "scorer")
    flags = start_flags("ppo", folder) | {
        "eval_data_path": None, "max_steps": 1, "save_steps": 1, "output_dir": folder / "whole",
        "per_device_generation_batch_size": 4, "per_device_train_batch_size": 4,
    }  # fmt: skip
    assert run_stage("ppo", run_words(folder, **flags)) == 0
    run = folder / "whole/runs/ppo"
    assert export.main([str(run), "--output", str(folder / "out")]) == 0
    config = json.loads((folder / "out/critic/config.json").read_text())
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert config["score_mean"] == pytest.approx(first["objective/scores"], rel=1e-5) and config["score_std"] != 1.0
    assert_same_folder(folder / "out/critic", folder / "whole/critic")
