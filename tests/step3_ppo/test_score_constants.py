"""Step 3 with a reward model that does not say the mean and std of its scores: those of the first rollout are taken."""

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.ppo_loop import loop_on_random_prompts
from support.ppo_settings import ppo_config

from pipeline.checkpoints import checkpoint
from step3_ppo.build import resume
from step3_ppo.models import saving
from step3_ppo.state import State


def without_constants(folders, folder) -> SimpleNamespace:
    """The same models, of which the reward model does not say what its scores' mean and std are."""
    reward = shutil.copytree(folders.reward, folder / "raw")
    config = json.loads((reward / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in ("score_mean", "score_std")}
    (reward / "config.json").write_text(json.dumps(kept))
    return SimpleNamespace(actor=folders.actor, reward=str(reward))


def test_a_reward_model_without_constants_gets_those_of_the_first_rollout(world, trained_folders, tmp_path, caplog):
    """Then the run is that of a model whose config.json says them: the first values and rewards too."""
    folders = without_constants(trained_folders, tmp_path)
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(folders, ppo_epochs=2))
    loop.evaluate()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    own = np.array([row["score"] for row in samples])
    shaped = ((own - own.mean()) / own.std()).clip(-5, 5) - [1.0 * (not row["finished"]) for row in samples]
    assert loop.course.evaluations[0]["eval_objective/rlhf_reward"] == pytest.approx(shaped.mean(), abs=2e-3)
    assert loop.state.score_constants is None, "an evaluation before the first rollout is on a scale of its own"
    with caplog.at_level(logging.INFO):
        found = loop.iterate()
    scores = loop.judged[:, 0].double().numpy()
    assert loop.state.score_constants == pytest.approx([scores.mean(), scores.std()], rel=1e-6)
    assert sum("--normalise_scores" in line for line in caplog.messages) == 1
    found += loop.iterate()
    assert sum("--normalise_scores" in line for line in caplog.messages) == 1, "once"
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
        assert (judge.mean, judge.std, judge.takes_first) == (mean, std, False) and state.score_constants == constants
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
    assert (judge.mean, judge.std) == (0.25, 3.0)
    assert (critic.score_mean, critic.score_std) == own != (0.0, 1.0)


@pytest.mark.parametrize(
    ("in_folder", "in_checkpoint", "written"),
    [((0.0, 1.0), {"score_constants": [0.25, 3.0]}, (0.25, 3.0)), ((0.0, 1.0), {}, (0.0, 1.0)),
     ((0.5, 2.0), {"score_constants": [0.25, 3.0]}, (0.5, 2.0))],
)  # fmt: skip
def test_an_exported_critic_has_the_constants_of_its_run(
    trained_folders, monkeypatch, in_folder, in_checkpoint, written
):
    mean, std = in_folder
    seen = {}
    monkeypatch.setattr(saving, "save_model", lambda run, role, module, *rest, **more: seen.update({role.name: module}))
    run = SimpleNamespace(resolved=SimpleNamespace(config=ppo_config(trained_folders)))
    offline = SimpleNamespace(
        run=run, saved={"step": 4}, state={"ppo": in_checkpoint}, has_average=False,
        language_model=lambda name, flags: name,
        value_model=lambda name, flags, normalised: SimpleNamespace(score_mean=mean, score_std=std),
    )  # fmt: skip
    saving.export(offline)
    assert seen["actor"] == "actor" and (seen["critic"].score_mean, seen["critic"].score_std) == written
