"""Evaluations of step 3: their random numbers, how much they sample and score at once, what they leave as it was."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ppo_loop import PPOLoop, at_rate, loop_on_random_prompts
from support.ppo_settings import ppo_config

from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from step3_ppo.config import PPOConfig
from step3_ppo.models.hybrid_engine import HybridEngine
from step3_ppo.rollout_metrics import pass_metrics


def config_of(folders, *, samples: int, batch: int = 2, seed: int = 1234, **ppo: Any) -> PPOConfig:
    """The settings of a loop with so many responses to a held-out prompt, `batch` rows of an evaluation at once."""
    config = ppo_config(folders, **ppo)
    parts = {
        "rewards": config.rewards.model_copy(update={"eval_samples_per_prompt": samples}),
        "optimizer": config.optimizer.replace(per_device_eval_batch_size=batch),
        "run": config.run.model_copy(update={"seed": seed}),
    }
    return config.model_copy(update=parts)


def untimed(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step that a second run has again."""
    return {name: x for name, x in values.items() if x == x and not name.startswith(("time/", "generate_tokens"))}


def responses_by_step(loop: PPOLoop) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in map(json.loads, (loop.ppo.run.folder / "samples.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], []).append(line["response"])
    return found


def drawn(loop: PPOLoop, key: RandomKey, num_samples: int) -> list[str]:
    """Responses to the held-out prompts, one prompt after the other, with the random numbers of `key`."""
    sampling = Sampling(loop.ppo.config.sampling.max_answer_seq_len, loop.ppo.config.sampling.temperature)
    prompts = [Prompt(row["prompt_ids"], row["prompt_id"]) for row in loop.ppo.prompts.eval]
    with loop.ppo.hybrid.generation():
        rollout = loop.ppo.hybrid.generate(prompts, num_samples=num_samples, sampling=sampling, key=key)
    return [loop.ppo.models.tokenizer.decode(ids, skip_special_tokens=True) for ids in rollout.responses]


def test_evaluations_draw_with_the_numbers_of_their_own_key_at_each_step(world, opt, tmp_path):
    """By the seed alone: not by step, rollout, training's key or what was drawn before; weights stay as they are."""
    samples = 2
    loop = loop_on_random_prompts(world, tmp_path, config_of(opt, samples=samples, seed=7))
    loop.ppo = at_rate(loop.ppo, 0.0)
    loop.evaluate()
    loop.iterate()
    loop.evaluate()
    first, later = responses_by_step(loop).values()
    assert first == later and len(first) == 3 * samples
    assert first == drawn(loop, RandomKey(7, "eval"), samples)
    for other in (RandomKey(8, "eval"), RandomKey(7, "rollout"), RandomKey(7, "eval", 1)):
        assert first != drawn(loop, other, samples)


@pytest.mark.parametrize(("samples", "batch", "prompts_at_once"), [(1, 3, 3), (2, 5, 2), (3, 2, 1)])
def test_an_evaluation_has_so_many_rows_at_once(world, opt, tmp_path, monkeypatch, samples, batch, prompts_at_once):
    """Several responses to a prompt are rows too; at least one prompt is sampled at a time."""
    sampled, scored, session = list[int](), list[torch.Tensor](), HybridEngine.session

    def watched(hybrid, room):
        sampled.append(room.num_slots)
        return session(hybrid, room)

    loop = loop_on_random_prompts(world, tmp_path, config_of(opt, samples=samples, batch=batch), num_eval=5)
    monkeypatch.setattr(HybridEngine, "session", watched)
    actor = loop.ppo.models.actor.module
    actor.register_forward_pre_hook(lambda module, args, kwargs: scored.append(args[0]), with_kwargs=True)
    loop.evaluate()
    assert loop.control.evaluations[0]["eval_rows"] == 5 * samples
    assert sampled == [prompts_at_once * samples]
    longest = max(ids.shape[1] for ids in scored)
    assert sum(map(len, scored)) >= 5 * samples
    assert (batch - 1) * longest < max(ids.numel() for ids in scored) <= batch * longest, "tokens of so many long rows"


def test_an_evaluation_leaves_the_state_of_training_as_it_was(world, opt, tmp_path):
    """The next rollout and its updates are those of a run that did not evaluate, but for what is known of its step."""
    loops = [loop_on_random_prompts(world, tmp_path, config_of(opt, samples=2, kl_target=5.0)) for _ in range(2)]
    before = asdict(loops[0].state)
    loops[0].evaluate()
    assert asdict(loops[0].state) == before | {"evaluated": 0}
    evaluated, plain = ([numbers for values in loop.iterate() if (numbers := untimed(values))] for loop in loops)
    assert evaluated == plain and len(plain) == 2


def test_the_kl_penalty_of_rewards_has_the_coefficient_in_force(world, trained_folders, tmp_path):
    """An adaptive one has moved away from the flag's value, for a rollout as for an evaluation of the same policy."""
    config = config_of(trained_folders, samples=2, actor_rate=3e-2)
    loop = loop_on_random_prompts(world, tmp_path, config)
    loop.iterate()
    found: list[Mapping[str, float]] = []
    for kl_coef in (0.0, 4.0):
        loop.state.kl_coef, loop.state.evaluated = kl_coef, -1
        rollout = loop.collect()
        loop.evaluate()
        found.append(rollout.metrics | loop.control.evaluations[-1])
    assert found[1]["objective/kl_coef"] == 4.0
    for prefix in ("", "eval_"):
        kl = found[0][f"{prefix}objective/kl"]
        assert abs(kl) > 1e-3
        before, after = (values[f"{prefix}objective/rlhf_reward"] for values in found)
        assert before - after == pytest.approx(4 * kl, rel=1e-2)


def test_a_prompt_counts_by_the_responses_that_have_a_value():
    """Of five prompts one has no value and one is padding; two of the other three have a response that passes."""
    values = [1.0, math.nan, 0.0, math.nan, math.nan, math.nan, 0.0, 1.0, 1.0, 1.0]
    responses = SimpleNamespace(valid=torch.arange(10) < 8)
    rewarded = SimpleNamespace(by_reward={"right": torch.tensor(values)}, failures={"right": None})
    found = pass_metrics(responses, rewarded, group_size=2)
    assert found == {"pass_at_1/right": 2 / 4, "pass_at_k/right": pytest.approx(2 / 3)}
