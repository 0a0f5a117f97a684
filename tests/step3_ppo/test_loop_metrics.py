"""Metrics of step 3's loop: what is counted, and what is null or absent because nothing was computed."""

import json
import logging
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import naming
from support.ppo_loop import loop_on_random_prompts
from support.ppo_settings import ppo_config
from support.ppo_updates import TEMPERATURE, text_step
from support.tiny_models import EOS, PAD

from pipeline.data.counts import Counts
from pipeline.data.loader import Step
from pipeline.errors import DivergedError
from pipeline.training.health import RULES, History
from step3_ppo import training
from step3_ppo.mathematics.estimators import next_kl_coef
from step3_ppo.rollout_metrics import row_values
from step3_ppo.state import PPO

OF_THE_POLICY = {
    "loss/policy", "policy/ratio_mean", "policy/ratio_max", "policy/clipfrac", "policy/approx_kl", "actor/grad_norm",
    "actor/learning_rate", "loss/ptx",
}  # fmt: skip


class TextLoader:
    """Gives the same ptx text at each step, and keeps the steps that asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def step(self, number: int):
        self.asked.append(number)
        return text_step()

    def resized(self, step: Step, micro_batch_size: int) -> Step:
        """Nothing is halved here."""
        assert step.micro_batch_size == micro_batch_size
        return step


@pytest.fixture
def fast_device(monkeypatch) -> float:
    """A device of 1000 operations per second, so that MFU is known on a CPU; each phase takes a second."""
    monkeypatch.setattr("pipeline.models.flops.peak_flops", lambda device: 1000.0)
    return 1000.0


def test_a_warm_up_step_has_no_metrics_of_the_policy_and_reads_no_text(world, trained_folders, tmp_path):
    text = TextLoader()
    config = ppo_config(trained_folders, critic_warmup_steps=3)
    loop = loop_on_random_prompts(world, tmp_path, config, text=text)
    warm_up, mixed = loop.iterate(), loop.iterate()
    for values in (*warm_up, mixed[0]):
        assert not OF_THE_POLICY & set(values) and values["loss/value"] > 0
        assert math.isnan(values["policy/first_ratio_error"])
    assert set(mixed[1]) >= OF_THE_POLICY and text.asked == [3]
    assert math.isnan(mixed[1]["policy/first_ratio_error"]), "of the rollout's first update, which trained no policy"


def test_a_first_update_without_a_reward_has_no_ratio(world, trained_folders, tmp_path):
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    loop.iterate()
    rollout = loop.collect()
    mask = rollout.experience.response_mask.clone()
    mask[:2] = False  # the rows of the first of two updates
    before = len(loop.control.steps)
    loop.update(replace(rollout, experience=replace(rollout.experience, response_mask=mask)))
    errors = [values["policy/first_ratio_error"] for _, values in loop.control.steps[before:]]
    assert len(errors) == 2 and all(map(math.isnan, errors)), "not the error of the rollout before"
    assert loop.state.skipped_updates == 1


def test_shares_of_off_policy_weights_are_of_the_trainers_pass(world, trained_folders, tmp_path):
    """Without that pass, with the sampler's log-probabilities, they are absent, and not 0."""
    shares = {"policy/weights_cut", "policy/weights_rejected"}
    for old, found in (("trainer", shares), ("sampler", set())):
        settings = {"off_policy_weights": "token_truncate", "accumulation": 2, "old_log_probs": old}
        loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, **settings))
        assert shares & set(loop.iterate()[0]) == found


def test_rates_and_mfu_count_the_real_tokens_of_each_step(world, trained_folders, tmp_path, fast_device):
    """Three prompts fill three quarters of a rollout of four; the text of the ptx loss is trained on as well."""
    text = TextLoader()
    config = ppo_config(trained_folders, critic_warmup_steps=1)
    loop = loop_on_random_prompts(world, tmp_path, config, num_prompts=3, text=text)
    rollout = loop.collect()
    responses = rollout.responses
    loop.update(rollout)
    assert responses.valid.tolist() == [True, True, True, False]
    lengths = (responses.prompt_lengths + responses.response_lengths).tolist()
    steps = [lengths[:2], lengths[2:3]]
    actor, critic = loop.ppo.models.actor.work, loop.ppo.models.critic.work
    expected = []
    for rows in steps:
        expected.append(critic.flops(num_tokens=sum(rows), num_squares=sum(length**2 for length in rows)))
    expected[1] += actor.flops(
        num_tokens=lengths[2], num_squares=lengths[2] ** 2, num_head_tokens=int(responses.response_lengths[2])
    )
    expected[1] += actor.flops(num_tokens=14, num_squares=6 * 6 + 3 * 3 + 5 * 5, num_head_tokens=8)
    assert loop.control.column("mfu") == pytest.approx([flops / fast_device for flops in expected])
    assert [rates["num_tokens"] for rates in loop.control.rates] == [sum(steps[0]), sum(steps[1]) + 14]
    assert [rates["num_rows"] for rates in loop.control.rates] == [2, 1]


def test_the_adaptive_coefficient_counts_the_sequences_whose_kl_was_seen(world, trained_folders, tmp_path):
    config = ppo_config(trained_folders, kl_target=5.0, kl_horizon=10)
    loop = loop_on_random_prompts(world, tmp_path, config, num_prompts=3)
    rollout = loop.collect()
    mask = rollout.experience.response_mask.clone()
    mask[1] = False
    rollout = replace(rollout, experience=replace(rollout.experience, response_mask=mask))
    training.adapt_kl(loop.ppo, rollout, loop.state)
    expected = next_kl_coef(0.1, rollout.metrics["objective/kl"], target=5.0, horizon=10, num_sequences=2)
    assert loop.state.kl_coef == expected == pytest.approx(0.1 * (1 - 0.2 * 2 / 10))


def test_the_adaptive_coefficient_waits_for_the_policys_first_step(world, trained_folders, tmp_path):
    """In the critic's warm-up the KL is 0 whatever the coefficient is."""
    config = ppo_config(trained_folders, kl_target=5.0, kl_horizon=10, critic_warmup_steps=4)
    loop = loop_on_random_prompts(world, tmp_path, config)
    seen = [(loop.iterate(), loop.state.step, loop.state.kl_coef)[1:] for _ in range(3)]
    assert seen == [(2, 0.1), (4, 0.1), (6, pytest.approx(0.1 * (1 - 0.2 * 4 / 10)))]


def spoiled_scores(monkeypatch, **parts: float) -> None:
    """Let the models say other numbers: each given field of Scores is filled with its value."""
    true_scores = training.score_responses

    def spoiled(*args, **settings):
        scores = true_scores(*args, **settings)
        return replace(scores, **{name: torch.full_like(getattr(scores, name), value) for name, value in parts.items()})

    monkeypatch.setattr(training, "score_responses", spoiled)


def test_metrics_of_masked_rewards_are_not_numbers(world, trained_folders, tmp_path, monkeypatch):
    judge = training.reward_model_scores
    monkeypatch.setattr(training, "reward_model_scores", lambda *a, **s: torch.full_like(judge(*a, **s), math.inf))
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, kl_target=5.0))
    rollout = loop.collect()
    assert rollout.metrics["rows_masked"] == 4
    for name, value in rollout.metrics.items():
        known = name.startswith(("time/", "generate_")) or name in ("rows_masked", "objective/kl_coef", "epoch")
        assert known or name == "num_tokens" or math.isnan(value), name
    training.adapt_kl(loop.ppo, rollout, loop.state)
    assert loop.state.kl_coef == 0.1, "no KL was observed"
    loop.evaluate()
    (evaluation,) = loop.control.evaluations
    assert evaluation.pop("eval_rows") == evaluation.pop("eval_rows_masked") == len(loop.ppo.prompts.eval)
    assert "eval_objective/score_clipfrac" in evaluation and all(map(math.isnan, evaluation.values()))
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    for line in samples:
        sample = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert sample["score"] is None and sample["kl"] is None


def test_an_evaluation_is_of_the_rows_that_were_asked_for(world, trained_folders, tmp_path, monkeypatch):
    """A function that gives no value for some responses: the rows stay the same ones, in their order."""
    judge, missing = training.reward_model_scores, [1]

    def judged(*args, **settings):
        found = judge(*args, **settings)
        found[missing] = math.nan
        return found

    monkeypatch.setattr(training, "reward_model_scores", judged)
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders), num_eval=5)
    loop.evaluate()
    loop.state.step, missing[:] = 1, [0, 3]
    loop.evaluate()
    first, last = loop.control.evaluations
    assert first["eval_rows"] == last["eval_rows"] == 5
    assert (first["eval_rows_masked"], last["eval_rows_masked"]) == (1, 2)
    whole, part = ([math.isnan(x) for x in rows["eval_objective/scores"]] for rows in loop.control.row_values)
    assert (whole, part) == ([False, True, False, False, False], [True, False, False, True, False])
    for values, rows in zip(loop.control.evaluations, loop.control.row_values, strict=True):
        for name in ("eval_objective/scores", "eval_completions/truncated_fraction"):
            assert values[name] == pytest.approx(sum(x for x in rows[name] if x == x) / sum(rows["weight"]))


def test_values_of_rows_are_those_of_their_prompts_in_any_order_of_ranks():
    """Two responses to each of three prompts as two ranks and padding mix them, one without a value."""
    responses: Any = SimpleNamespace(
        row_index=torch.tensor([2, 0, 1, 2, 0, 1, 0]),
        finished=torch.tensor([True, False, True, True, True, True, False]),
    )
    rewarded: Any = SimpleNamespace(
        valid=torch.tensor([True, True, False, True, True, True, False]), scores=torch.tensor([4.0, 1, 9, 6, 2, 7, 9])
    )
    found = row_values(responses, rewarded, num_prompts=4)
    assert found["weight"] == [2, 1, 2, 0] and found["eval_objective/scores"][:3] == [1.5, 7.0, 5.0]
    assert math.isnan(found["eval_objective/scores"][3])
    assert found["eval_completions/truncated_fraction"][:3] == [0.5, 0.0, 0.0]


def test_a_policy_whose_weights_became_nan_ends_the_run_as_diverged(world, trained_folders, tmp_path):
    """It is sampled from and scored as ever: its rows are masked, its steps skipped."""
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    with torch.no_grad():
        next(loop.ppo.models.actor.module.parameters())[:] = math.nan
    with pytest.raises(DivergedError, match="2 steps in a row"):
        loop.iterate()
    assert loop.state.skipped_updates == 2 and loop.control.steps[0][1]["rows_masked"] == 4


def findings(loop) -> set[str]:
    """The rules of health that find something in the steps of a loop."""
    history = History(total_steps=100)
    for step, values in loop.control.steps:
        history.add(step, values)
    return {rule.name for rule in RULES if rule(history)}


@pytest.mark.parametrize(("reference", "found"), [(0.0, True), (-9.0, False)])
def test_a_negative_kl_is_found(world, trained_folders, tmp_path, monkeypatch, reference, found):
    spoiled_scores(monkeypatch, ref_log_probs=reference)
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    loop.iterate()
    assert ("negative_kl" in findings(loop)) == found


@pytest.mark.parametrize(("log_probs", "found"), [(-9.0, True), (None, False)])
def test_a_sampler_of_another_model_is_found(world, trained_folders, tmp_path, monkeypatch, log_probs, found):
    spoiled_scores(monkeypatch, **({} if log_probs is None else {"log_probs": log_probs}))
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders))
    loop.iterate()
    assert ("sampler_apart" in findings(loop)) == found


def test_the_values_of_sampling_are_logged_at_the_start(world, trained_folders, tmp_path, caplog):
    folder = shutil.copytree(trained_folders.actor, tmp_path / "actor")
    settings = {"eos_token_id": [EOS, 9], "pad_token_id": PAD, "temperature": 0.6, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    folders = SimpleNamespace(actor=str(folder), reward=trained_folders.reward)
    with caplog.at_level(logging.INFO):
        loop_on_random_prompts(world, tmp_path, ppo_config(folders))
    assert (
        f"sampling: temperature {TEMPERATURE}, top_p 1, top_k off, no other filter; at most 8 tokens, ended by id "
        f"{EOS}, 9; one response per prompt; ignored in generation_config.json: "
    ) in caplog.text
    (unused,) = re.findall("ignored in generation_config.json: (.*)", caplog.text)
    assert set(unused.split(", ")) == {"do_sample True", "temperature 0.6", "top_k 20"}


def test_the_terminal_shows_approx_kl_only_where_it_moves(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(training, "RunControl", lambda *args, shown, **settings: seen.append(shown))
    for steps in (1, 2):
        schedule = SimpleNamespace(total_steps=4, steps_per_rollout=steps)
        models, rows = SimpleNamespace(named=dict), SimpleNamespace(counts=Counts())
        config = SimpleNamespace(compares_in_updates=steps == 1)
        training.make_control(
            SimpleNamespace(
                run=None,
                config=config,
                fingerprint=None,
                schedule=schedule,
                models=models,
                hybrid=None,
                rewards=[],
                prompts=rows,
            ),
            resumed_step=None,
        )
    assert ["policy/approx_kl" in shown for shown in seen] == [False, True]
    assert ["loss/kl" in shown for shown in seen] == [True, False], "all that distillation without rewards shows"


def test_an_evaluation_takes_batches_on_each_rank(world, trained_folders, tmp_path):
    config = ppo_config(trained_folders)
    config = config.model_copy(update={"run": config.run.model_copy(update={"eval_iters": 1})})
    loop = loop_on_random_prompts(world, tmp_path, config, num_eval=5)
    loop.evaluate()
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2, "one batch of per_device_eval_batch_size"


def test_the_first_rollout_logs_how_many_answers_were_unfinished(world, trained_folders, tmp_path, monkeypatch, caplog):
    sample = PPO.sample

    def two_unfinished(ppo, state, *, batch_size):
        responses = sample(ppo, state, batch_size=batch_size)
        assert responses.valid.tolist() == [True, True, True, False]
        return replace(responses, finished=torch.tensor([True, False, False, False]))

    monkeypatch.setattr(PPO, "sample", two_unfinished)
    loop = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders), num_prompts=3)
    with caplog.at_level(logging.INFO):
        loop.iterate()
        loop.iterate()
    assert [line for line in caplog.messages if "first rollout" in line] == [
        naming("2 of 3 answers ... 8 tokens ... --max-answer-seq-len")
    ]
