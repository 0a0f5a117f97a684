"""Step 3's loop on tiny models: ratios, restored rollouts, skipped steps, evaluations, LoRA."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.messages import naming
from support.packed_rows import give_bounds, plain_kernel
from support.ppo_loop import PPOLoop, at_rate, loop_on_random_prompts
from support.ppo_settings import ppo_config
from support.ppo_updates import MEAN, STD, equal_weights, weights
from support.tiny_models import NUM_TOKENS

from pipeline.errors import DivergedError
from pipeline.rewards.rows import Scale
from step3_ppo import training
from step3_ppo.experience import Collected
from step3_ppo.mathematics.losses import value_loss
from step3_ppo.models import engines as models


def test_the_first_ratio_is_one_in_every_rollout(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, ppo_epochs=2))
    for rollout in range(2):
        steps = loop.iterate()
        assert len(steps) == 4 and loop.state.rollout == rollout + 1
        assert [values["policy/first_ratio_error"] for values in steps] == [0.0] * 4  # the rollout's first, on each
        assert steps[0]["policy/ratio_mean"] == 1.0 and steps[-1]["policy/ratio_max"] > 1.0001
        assert steps[0]["policy/sampler_error"] < 1e-4
        assert "objective/kl" in steps[0] and "objective/kl" not in steps[1]
    assert loop.state.step == 8 and loop.control.steps[-1][0] == 8


def test_responses_end_at_every_id_that_generation_config_names(world, trained_folders, tmp_path):
    folder = shutil.copytree(trained_folders.actor, tmp_path / "actor")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(NUM_TOKENS))}))
    folders = SimpleNamespace(actor=str(folder), reward=trained_folders.reward)
    responses = loop_on_random_prompts(world, tmp_path, ppo_config(folders)).collect().responses
    assert responses.response_lengths.tolist() == [1] * 4 and responses.finished.all()


@pytest.mark.parametrize("samples", [1, 4])
def test_rollouts_of_packed_rows_score_and_train_as_padded_ones(world, trained_folders, tmp_path, monkeypatch, samples):
    """With four responses to a prompt, it passes once in each micro-batch, through policy, critic and reward model."""
    config = ppo_config(trained_folders, accumulation=2)
    config = config.model_copy(update={"sampling": config.sampling.replace(num_samples_per_prompt=samples)})
    padded = loop_on_random_prompts(world, tmp_path, config)
    monkeypatch.setattr(models, "enable_packed_attention", give_bounds)
    packed = loop_on_random_prompts(world, tmp_path, config)
    assert packed.ppo.models.pack_rows and not padded.ppo.models.pack_rows
    with plain_kernel() as kernel:
        found = packed.iterate()
    shares = [len(call.args[1]) > len(call.args[0]) for call in kernel.call_args_list]  # more keys than queries
    assert any(shares) == (samples > 1) and kernel.called
    wanted = padded.iterate()
    assert found[0]["policy/first_ratio_error"] == 0.0 and len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            if not name.startswith(("time/", "generate_")) and "per_s" not in name and math.isfinite(value):
                assert mine[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name


def watched_passes(loop: PPOLoop) -> list[bool]:
    """Of each forward pass of the actor from now on, whether it keeps what a backward pass needs."""
    seen: list[bool] = []
    loop.ppo.models.actor.module.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


SAMPLER = {"old_log_probs": "sampler", "accumulation": 2}


def test_the_samplers_log_probs_spare_a_pass_over_each_rollout(world, trained_folders, tmp_path):
    numbers = []
    for settings in ({"accumulation": 2}, SAMPLER):
        loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, **settings))
        seen = watched_passes(loop)
        steps = [values for _ in range(2) for values in loop.iterate()]
        assert len(steps) == 2 and loop.state.rollout == 2
        before = [] if settings is SAMPLER else [False, False]
        assert seen == 2 * [*before, True, True]
        numbers.append(steps)
    plain, spared = numbers
    assert all(values["policy/first_ratio_error"] < 1e-4 for values in spared), "equal up to rounding, or exactly"
    for name, value in plain[0].items():
        if not name.startswith(("time/", "policy/first_ratio", "generate_")) and math.isfinite(value):
            assert spared[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_sampler_of_other_weights_is_found_out(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, **SAMPLER))
    collected = loop.collect()
    with torch.no_grad():
        for parameter in loop.ppo.models.actor.module.parameters():
            parameter.mul_(1.05)
    loop.update(collected)
    assert loop.control.steps[0][1]["policy/first_ratio_error"] > 1e-2


def test_a_restored_rollout_trains_as_the_sampled_one(world, trained_folders, tmp_path):
    kept, restored = (loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, **SAMPLER)) for _ in range(2))
    collected = kept.collect()
    kept.update(collected)
    restored.update(restored.restored(collected))
    for name, engine in kept.ppo.models.trained.items():
        assert equal_weights(weights(engine), weights(restored.ppo.models.trained[name])), name
    assert kept.state == restored.state
    evaluations = []
    for loop in (kept, restored):
        loop.evaluate()
        evaluations += loop.control.evaluations
    assert evaluations[0] == evaluations[1] and "eval_objective/entropy" in evaluations[0]


@pytest.mark.parametrize("settings", [{"accumulation": 1}, {"accumulation": 2, "ppo_epochs": 2}])
def test_the_samplers_log_probs_are_refused_for_several_steps(trained_folders, settings):
    """A second step needs the log-probabilities of the policy before the first."""
    with pytest.raises(ValueError, match=naming("--old-log-probs: sampler ... one optimizer step ... 2")):
        ppo_config(trained_folders, old_log_probs="sampler", **settings)


def test_with_learning_rate_0_the_ratio_stays_one(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, ppo_epochs=2))
    loop.ppo = at_rate(loop.ppo, 0.0)
    found = [values for _ in range(2) for values in loop.iterate()]
    assert max(abs(values["policy/ratio_max"] - 1) for values in found) < 1e-5  # other rows in a batch, other rounding
    assert [values["policy/approx_kl"] for values in found] == pytest.approx([0.0] * 8, abs=1e-9)


def test_at_the_start_there_is_no_kl_and_the_critic_is_on_the_rewards_scale(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    (judge,) = loop.ppo.models.rewards
    assert (judge.weight, judge.scale) == (1.0, Scale(MEAN, STD))
    collected = loop.collect()
    assert abs(collected.metrics["objective/kl"]) < 1e-6
    responses = collected.responses
    values = loop.ppo.models.critic(responses.sequences, responses.attention_mask).detach()
    last = responses.attention_mask.sum(1) - 1
    raw = loop.judged[:, 0]
    torch.testing.assert_close(values[torch.arange(4), last], (raw - MEAN) / STD, rtol=1e-4, atol=1e-4)
    plain = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, normalise_scores=False))
    assert (plain.ppo.models.critic.module.score_mean, plain.ppo.models.rewards[0].scale.std) == (0.0, 1.0)


def test_skipped_updates_are_counted_and_too_many_in_a_row_end_the_run(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    collected = loop.collect()
    bad = torch.where(collected.experience.response_mask, math.nan, 0.0)
    targets = replace(collected.experience.targets, returns=bad)
    spoiled = replace(collected.experience, targets=targets)
    before = weights(loop.ppo.models.actor)
    with pytest.raises(DivergedError, match="2 steps in a row"):
        loop.update(replace(collected, experience=spoiled))
    assert (loop.state.step, loop.state.skipped_updates) == (2, 2)
    assert loop.control.steps[0][1]["skipped_updates"] == 1
    assert equal_weights(weights(loop.ppo.models.actor), before)
    loop.state.update = 0
    loop.iterate()
    assert (loop.state.step, loop.state.skipped_updates, loop.state.bad_in_a_row) == (4, 2, 0)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_gradient_that_is_not_finite_holds_back_all_models(world, trained_folders, tmp_path, role):
    """Losses are finite, and of one model's gradient one number is not."""
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    engines = loop.ppo.models.trained
    before = {name: weights(engine) for name, engine in engines.items()}
    *_, last = engines[role].module.parameters()
    hook = last.register_hook(lambda gradient: torch.where(torch.arange(gradient.numel()) == 0, math.inf, gradient))
    with pytest.raises(DivergedError, match="2 steps in a row"):
        loop.iterate()
    assert all(
        math.isfinite(values[name]) for _, values in loop.control.steps for name in ("loss/policy", "loss/value")
    )
    assert all(equal_weights(weights(engine), before[name]) for name, engine in engines.items())
    hook.remove()
    loop.state.update = 0
    loop.iterate()
    assert not any(equal_weights(weights(engine), before[name]) for name, engine in engines.items())


def test_a_loss_that_is_not_finite_holds_back_all_models(world, trained_folders, tmp_path, monkeypatch):
    """A constant is added to the critic's: all gradients are finite."""

    def infinite(*args, **settings):
        loss, clipped = value_loss(*args, **settings)
        return loss + math.inf, clipped

    monkeypatch.setattr("step3_ppo.objectives.value_loss", infinite)
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    before = {name: weights(engine) for name, engine in loop.ppo.models.trained.items()}
    with pytest.raises(DivergedError, match="2 steps in a row"):
        loop.iterate()
    assert all(math.isfinite(values[f"{name}/grad_norm"]) for _, values in loop.control.steps for name in before)
    assert all(equal_weights(weights(engine), before[name]) for name, engine in loop.ppo.models.trained.items())


def test_the_average_does_not_move_in_a_step_that_was_skipped(world, trained_folders, tmp_path):
    """After other steps: the first average is the actor itself, towards which it could not move."""
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, enable_ema=True, ema_decay=0.5))
    loop.iterate()

    def averages() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in loop.ppo.models.average.averages.items()}

    def step(rollout: Collected) -> bool:
        return training.step_objectives(loop.ppo, rollout, loop.state, loop.control).stepped

    before, rollout = averages(), loop.collect()
    spoiled = rollout.experience.map(lambda tensor: tensor if tensor.dtype == torch.bool else tensor * math.nan)
    assert not step(replace(rollout, experience=spoiled)) and equal_weights(averages(), before)
    assert step(rollout) and not equal_weights(averages(), before)


def test_the_first_steps_may_be_the_critics_alone(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, critic_warmup_steps=2))
    actor, critic = weights(loop.ppo.models.actor), weights(loop.ppo.models.critic)
    loop.iterate()
    assert equal_weights(weights(loop.ppo.models.actor), actor)
    assert not equal_weights(weights(loop.ppo.models.critic), critic)
    loop.iterate()
    assert not equal_weights(weights(loop.ppo.models.actor), actor)


@pytest.mark.parametrize("steps", [3, 4])
def test_rollouts_of_the_critics_first_steps_have_monte_carlo_returns(world, trained_folders, tmp_path, steps):
    """Discounted rewards to come by a loop, whatever the critic says; then, and for the advantages, gae_lambda."""
    settings = {"gamma": 0.9, "gae_lambda": 0.5, "kl_coef": 0.3, "whiten_advantages": False, "normalise_scores": False}
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, critic_warmup_steps=steps, **settings))
    lambdas = []
    for _ in range(3):  # of two steps each: the warm-up ends within the second, or with it
        rollout = loop.collect()
        known, finished = rollout.experience, rollout.responses.finished
        for n, length in enumerate(rollout.responses.response_lengths.tolist()):
            rewards = (-0.3 * (loop.scores.log_probs - loop.scores.ref_log_probs))[n, :length].tolist()
            rewards[-1] += loop.judged[n].clamp(-5, 5).item() - (0.0 if finished[n] else 1.0)
            values = [*known.targets.values[n, :length].tolist(), 0.0]
            for name, found in (("returns", known.targets.returns), ("advantages", known.advantages)):
                decay = 0.9 if name == "returns" and loop.state.step < steps else 0.9 * 0.5
                errors = [rewards[t] + 0.9 * values[t + 1] - values[t] for t in range(length)]
                for t in range(length):
                    expected = sum(decay ** (k - t) * errors[k] for k in range(t, length))
                    if name == "returns" and decay == 0.9:
                        expected = sum(0.9 ** (k - t) * rewards[k] for k in range(t, length))
                    elif name == "returns":
                        expected += values[t]
                    assert found[n, t].item() == pytest.approx(expected, rel=1e-3, abs=1e-4), (name, n, t)
        lambdas.append(loop.state.step < steps)
        loop.update(rollout)
    assert lambdas == [True, True, False]


def test_a_model_that_does_not_learn_in_a_step_keeps_no_gathered_weights(world, trained_folders, tmp_path, monkeypatch):
    """Scoring gathered the actor's (ZeRO stage 3); the updates of the critic's warm-up do not read them."""
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, critic_warmup_steps=1, ppo_epochs=2))
    rollout, released = loop.collect(), list[str]()
    for name, engine in loop.ppo.models.trained.items():
        monkeypatch.setattr(engine, "release_gathered", partial(released.append, name))
    for step in range(2):
        update = training.step_objectives(loop.ppo, rollout, loop.state, loop.control)
        assert [objective.role for objective in update.objectives] == (["actor"] if step else []) + ["critic"]
        loop.state.step += 1
        loop.state.update += 1
    assert released.count("actor") == 1


def test_an_adaptive_coefficient_follows_the_kl(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, kl_target=5.0, kl_horizon=100))
    loop.iterate()  # KL 0 against a target of 5: the error is clipped at -20 %, of 4 sequences in 100
    assert loop.state.kl_coef == pytest.approx(0.1 * (1 - 0.2 * 4 / 100))


def test_the_kl_in_the_loss_has_the_coefficient_in_force(world, trained_folders, tmp_path):
    """An adaptive one has moved from the flag's value: the policy's loss follows it, by the KL that both share."""
    settings = {"kl_in_loss": True, "kl_estimator": "k2", "kl_coef": 0.0, "log_kl": True}
    config = ppo_config(trained_folders, ppo_epochs=2, actor_rate=0.1, **settings)
    losses = []
    for kl_coef in (0.0, 100.0):
        loop = loop_on_random_prompts(world, tmp_path, config)
        loop.state.kl_coef = kl_coef
        (*_, last) = loop.iterate()
        losses.append((loop.state.step, last["actor/grad_norm"]))
    assert losses[0][0] == losses[1][0] and losses[1][1] > 2 * losses[0][1]


def test_evaluations_repeat_and_train_nothing(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    before = weights(loop.ppo.models.actor)
    loop.evaluate()
    loop.evaluate()  # the same step: nothing to do
    assert len(loop.control.evaluations) == 1
    loop.state.evaluated = -1
    loop.evaluate()
    first, second = loop.control.evaluations
    assert first == second and "eval_objective/scores" in first
    assert equal_weights(weights(loop.ppo.models.actor), before)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 6 and samples[:3] == samples[3:] and set(samples[0]) >= {"prompt", "response", "score"}


def test_scores_of_evaluations_are_no_part_of_the_scale_of_rewards(world, trained_folders, tmp_path):
    config = ppo_config(trained_folders)
    config = config.model_copy(update={"rewards": config.rewards.model_copy(update={"reward_scaling": "running"})})
    loop = loop_on_random_prompts(world, tmp_path, config)
    loop.evaluate()
    assert loop.state.tallies == {}
    loop.collect()
    ((count, mean, squares),) = loop.state.tally_of_rollout("spreads")
    assert (count, mean) == (4, pytest.approx(loop.judged.mean().item(), rel=1e-5))
    loop.state.evaluated = -1
    loop.evaluate()
    assert loop.state.tally_of_rollout("spreads") == [[count, mean, squares]]


def test_with_lora_the_reference_is_the_actor_without_adapters(world, trained_folders, tmp_path):
    actor = {"lora_dim": 4, "lora_learning_rate": 3e-2}
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, actor=actor))
    assert "reference" not in loop.ppo.models.frozen
    start = loop.collect()
    assert abs(start.metrics["objective/kl"]) < 1e-5  # the reference is scored in other batches: other rounding
    before = weights(loop.ppo.models.actor)
    loop.update(start)
    after = weights(loop.ppo.models.actor)
    assert {name for name in after if not after[name].equal(before[name])} <= {n for n in after if "lora_" in n}
    assert abs(loop.collect().metrics["objective/kl"]) > 1e-4
    assert loop.control.steps[0][1]["policy/first_ratio_error"] == 0.0


def test_each_rollout_has_a_ratio_error_of_its_own(world, trained_folders, tmp_path, monkeypatch):
    """The sampler's log-probabilities are off by so much in each rollout: far more than by rounding."""
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, **SAMPLER))
    off, sampled = (0.25, 0.5, 0.125), training.sample

    def sample(ppo, state, control):
        responses = sampled(ppo, state, control)
        return replace(responses, sampler_log_probs=responses.sampler_log_probs + off[state.rollout])

    monkeypatch.setattr(training, "sample", sample)
    steps = [values for _ in range(3) for values in loop.iterate()]
    for name in ("policy/first_ratio_error", "policy/sampler_error"):
        assert [values[name] for values in steps] == pytest.approx(off, abs=1e-4), name
