"""Without a weight of the KL no reference is loaded, planned, run or logged; rewards and losses are the same."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from support.marks import slow_but
from support.ppo_loop import PPOLoop, loop_on_random_prompts
from support.ppo_settings import make_run, ppo_config
from support.ppo_updates import equal_weights, weights
from transformers import AutoModelForCausalLM

from pipeline.models.lora import START
from step3_ppo.models.engines import make_models, make_sources

KL = {"objective/kl", "objective/kl_k3", "objective/kl_coef"}
LORA = {"lora_dim": 2}


def loop_of(world, folders, path: Path, *, log_kl: bool, **settings: Any) -> PPOLoop:
    return loop_on_random_prompts(world, path, ppo_config(folders, kl_coef=0.0, log_kl=log_kl, **settings))


CASES = {
    "in the loss": {"kl_in_loss": True, "kl_estimator": "k3"},
    "in the reward": {},
    "in the loss, LoRA": {"kl_in_loss": True, "kl_estimator": "k2", "actor": LORA},
}


@pytest.mark.parametrize("case", slow_but(["in the loss"], CASES))
def test_rewards_losses_and_weights_are_the_same_to_the_bit(world, trained_folders, tmp_path, case):
    settings = CASES[case]
    with_it, without = (loop_of(world, trained_folders, tmp_path, log_kl=given, **settings) for given in (True, False))
    lora = "actor" in settings
    assert sorted(without.ppo.models.named()) == ["actor", "critic", "reward"]
    assert sorted(with_it.ppo.models.named()) == ["actor", "critic", *(() if lora else ["reference"]), "reward"]
    for _ in range(2):
        rollouts = [loop.collect() for loop in (with_it, without)]
        known, plain = (rollout.experience for rollout in rollouts)
        assert plain.ref_log_probs is None is without.scores.ref_log_probs and known.ref_log_probs is not None
        assert known.advantages.equal(plain.advantages) and known.targets.returns.equal(plain.targets.returns)
        for loop, rollout in zip((with_it, without), rollouts, strict=True):
            loop.update(loop.restored(rollout))
    steps, plain_steps = ([values for _, values in loop.control.steps] for loop in (with_it, without))
    for values, plain_values in zip(steps, plain_steps, strict=True):
        assert values.keys() - plain_values.keys() <= KL | {"loss/kl"} and not plain_values.keys() & (KL | {"loss/kl"})
        assert {name: values[name] for name in plain_values} == plain_values
    assert abs(steps[-2]["objective/kl"]) > 0, "the second rollout's policy has moved"
    for role in ("actor", "critic"):
        assert equal_weights(*(weights(loop.ppo.models.trained[role]) for loop in (with_it, without)))


def test_an_evaluation_has_samples_without_a_divergence(world, trained_folders, tmp_path):
    loop = loop_of(world, trained_folders, tmp_path, log_kl=False)
    loop.evaluate()
    (found,) = loop.control.evaluations
    assert "eval_objective/scores" in found and not any("kl" in name for name in found)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all("score" in row and "kl" not in row for row in rows)


def test_an_adapter_that_goes_on_is_copied_for_a_reference_alone(world, trained_folders, tmp_path):
    folder = Path(trained_folders.actor)
    base = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "adapter")
    for log_kl in (False, True):
        folders = SimpleNamespace(actor=str(tmp_path / "adapter"), reward=trained_folders.reward)
        config = ppo_config(folders, actor=LORA, kl_coef=0.0, log_kl=log_kl)
        run = make_run(world, tmp_path, config)
        models = make_models(run, config, make_sources(run, config))
        assert (START in models.actor.module.model.peft_config) == log_kl
