"""Distillation on a loop of two rollouts, against both models' whole distributions by transformers alone."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.marks import slow_but
from support.ppo_loop import PPOLoop, loop_on_random_prompts
from support.ppo_settings import ppo_config
from support.ppo_updates import TEMPERATURE, weights
from support.reward_rows import constants, of_models, rows_of
from support.tiny_models import give_template, save_tiny
from transformers import AutoModelForCausalLM

from step3_ppo.experience import Collected, Scores
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.models.engines import Models
from step3_ppo.rewarding import reward_responses

VOCABULARY = 400
KINDS = ("reverse_kl", "forward_kl", "jsd")


@pytest.fixture(scope="module")
def teacher(bpe_folder, tmp_path_factory) -> str:
    """A wider model of the same tokenizer, with a longer head."""
    folder = save_tiny(
        "llama", bpe_folder, tmp_path_factory.mktemp("teacher") / "model", seed=8, hidden_size=48, vocab_size=416
    )
    give_template(folder)
    return folder


def loop_of(world, folders, path, teacher: str, **settings: Any) -> PPOLoop:
    given = {"method": "distill", "kl_coef": 0.5, "gamma": 0.0, "whiten_advantages": False, "missing_eos_penalty": 0.0}
    return loop_on_random_prompts(world, path, ppo_config(folders, teacher=teacher, **(given | settings)))


@torch.no_grad()
def distributions(
    loop: PPOLoop, teacher: str, rollout: Collected, *, width: int | None = VOCABULARY
) -> list[tuple[torch.Tensor, torch.Tensor, Any]]:
    """Log-probabilities (tokens, vocabulary) under policy and teacher, and the sampled tokens, of each response.

    width: columns of the heads that count; None: each model's own.
    """
    policy, found = loop.ppo.models.actor.module.model, []
    of_teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    responses = rollout.responses
    for n, (start, length) in enumerate(
        zip(responses.prompt_lengths.tolist(), responses.response_lengths.tolist(), strict=True)
    ):
        ids = responses.sequences[n : n + 1, : start + length]
        logits = [model(ids).logits[0, start - 1 : -1, :width] / TEMPERATURE for model in (policy, of_teacher)]
        found.append((*(torch.log_softmax(one, -1) for one in logits), ids[0, start:]))
    return found


def divergence(p: torch.Tensor, q: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "jsd":
        middle = ((p.exp() + q.exp()) / 2).log()
        return (divergence(p, middle, "reverse_kl") + divergence(q, middle, "reverse_kl")) / 2
    first, second = (p, q) if kind == "reverse_kl" else (q, p)
    return (first.exp() * (first - second)).sum(1)


@pytest.mark.parametrize("aggregation", slow_but(["token_mean"], ["token_mean", "sequence_mean"]))
@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_loss_is_the_divergence_of_the_whole_distributions(
    world, trained_folders, teacher, tmp_path, kind, aggregation
):
    settings = {"kl_in_loss": True, "kl_estimator": kind, "loss_aggregation": aggregation}
    loop = loop_of(world, trained_folders, tmp_path, teacher, **settings)
    assert sorted(loop.ppo.models.named()) == ["actor", "teacher"]
    before = weights(loop.ppo.models.named()["teacher"])
    for _ in range(2):
        rollout = loop.collect()
        assert loop.scores.ref_log_probs is None and not rollout.experience.advantages.any()
        pairs = distributions(loop, teacher, rollout)
        of_rows = [divergence(policy, other, kind) for policy, other, _ in pairs]
        first = of_rows[:2]  # an optimizer step has 2 rows
        expected = (
            torch.cat(first).mean() if aggregation == "token_mean" else torch.stack([r.mean() for r in first]).mean()
        )
        loop.update(loop.restored(rollout))
        steps = loop.control.steps[-2:]
        assert steps[0][1]["loss/kl"] == pytest.approx(0.5 * expected.item(), rel=1e-4)
        assert steps[0][1]["loss/policy"] == 0 < steps[0][1]["actor/grad_norm"]
        assert not {name for name in steps[0][1] if name.startswith("objective/s") or "teacher" in name}
    after = weights(loop.ppo.models.named()["teacher"])
    assert all(after[name].equal(before[name]) for name in before), "the teacher does not learn"


@pytest.mark.parametrize("gamma", [0.0, 0.9])
def test_the_advantage_of_a_token_is_what_the_teacher_finds_it_more_probable(
    world, trained_folders, teacher, tmp_path, gamma
):
    """And, discounted, the tokens after it; by a slow loop."""
    loop = loop_of(world, trained_folders, tmp_path, teacher, gamma=gamma, kl_estimator="k1")
    for _ in range(2):
        rollout, means = loop.collect(), list[float]()
        for n, (policy, other, ids) in enumerate(distributions(loop, teacher, rollout, width=None)):
            assert len(other[0]) > len(policy[0]) == VOCABULARY
            chosen = [one.gather(1, ids[:, None])[:, 0] for one in (policy, other)]
            gains = (chosen[1] - chosen[0]).tolist()
            expected = [
                0.5 * sum(gamma ** (later - t) * gains[later] for later in range(t, len(gains)))
                for t in range(len(gains))
            ]
            found = rollout.experience.advantages[n]
            assert found[: len(gains)].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)
            assert not found[len(gains) :].any()
            means.append(-sum(gains) / len(gains))
        assert rollout.metrics["objective/teacher_kl"] == pytest.approx(sum(means) / len(means), rel=1e-3)
        assert rollout.metrics["objective/scores"] == -rollout.metrics["objective/teacher_kl"]
        loop.update(loop.restored(rollout))
    assert "loss/kl" not in loop.control.steps[0][1]


def test_rewards_are_compared_within_a_prompt_and_added_to_what_the_teacher_says():
    """Two prompts of two responses; row 3 has no finite reward, and the group of one that is left teaches nothing."""
    responses = rows_of([2, 1, 3, 2], [True] * 4)
    generator = torch.Generator().manual_seed(1)
    policy, teacher = (-torch.rand(2, 4, 3, generator=generator)).unbind(0)
    ppo = PPOCoefficients(
        method="distill", kl_coef=0.5, gamma=0.0, whiten_advantages=False, reward_clip=100.0, missing_eos_penalty=0.0
    )
    judged = of_models(torch.tensor([[3.0], [1.0], [5.0], [torch.nan]]), [constants(2.0, 0.0, 1.0)])
    settings = {"kl_coef": 0.5, "group_size": 2}
    scores = Scores(policy, teacher, None, None)
    advantages = reward_responses(responses, scores, judged, ppo, **settings).experience.advantages
    taught = 0.5 * (teacher - policy)
    expected = torch.zeros(4, 3)
    for n, (length, compared) in enumerate([(2, 2.0), (1, -2.0), (3, 0.0), (0, 0.0)]):
        expected[n, :length] = taught[n, :length] + compared
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)


def test_what_an_update_has_gathered_of_the_teacher_is_released(world, trained_folders, teacher, tmp_path, monkeypatch):
    released = []
    monkeypatch.setattr(Models, "release_gathered", lambda self, *names: released.append(names))
    loop = loop_of(world, trained_folders, tmp_path, teacher, kl_in_loss=True, kl_estimator="jsd")
    rollout = loop.collect()
    released.clear()
    loop.update(rollout)
    assert released == [("reference", "teacher")] * len(loop.control.steps)


def test_an_evaluation_scores_by_the_teacher(world, trained_folders, teacher, tmp_path):
    loop = loop_of(world, trained_folders, tmp_path, teacher, kl_in_loss=True, kl_estimator="jsd")
    loop.evaluate()
    (found,) = loop.control.evaluations
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    kl = sum(row["kl"] / row["tokens"] for row in rows) / len(rows)
    assert all(row["tokens"] > 1 for row in rows)
    assert found["eval_objective/teacher_kl"] == pytest.approx(kl, abs=1e-3) != 0
    assert found["eval_objective/scores"] == -found["eval_objective/teacher_kl"]
    assert not found.keys() & {"eval_objective/kl", "eval_objective/rlhf_reward"}


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_an_exact_divergence_also_holds_a_policy_near_its_start(world, trained_folders, tmp_path, kind):
    """Of other methods and with LoRA, whose actor cannot serve as the reference between its own passes."""
    config = ppo_config(
        trained_folders,
        kl_coef=0.5,
        kl_in_loss=True,
        kl_estimator=kind,
        actor={"lora_dim": 2, "lora_learning_rate": 0.05},
    )
    loop = loop_on_random_prompts(world, tmp_path, config)
    assert sorted(loop.ppo.models.named()) == ["actor", "critic", "reference", "reward"]
    first, *_ = loop.iterate()
    assert first["loss/kl"] == pytest.approx(0, abs=1e-6) and "objective/kl" in first
    rollout = loop.collect()
    pairs = distributions(loop, trained_folders.actor, rollout)
    expected = torch.cat([divergence(policy, other, kind) for policy, other, _ in pairs[:2]]).mean().item()
    loop.update(rollout)
    found = loop.control.steps[-2][1]["loss/kl"]
    assert found == pytest.approx(0.5 * expected, rel=1e-3) and found > 1e-4


def test_a_row_that_does_not_count_is_in_no_divergence(world, trained_folders, teacher, tmp_path):
    """Padding of an epoch's last rollout: one of two rows of the step; NaN there would be in the sum."""
    loop = loop_of(world, trained_folders, tmp_path, teacher, kl_in_loss=True, kl_estimator="reverse_kl")
    rollout = loop.collect()
    pairs = distributions(loop, teacher, rollout)
    keep = torch.tensor([False, *[True] * (len(pairs) - 1)])
    mask = rollout.experience.response_mask & keep.unsqueeze(1)
    rollout.experience = replace(rollout.experience, response_mask=mask)
    loop.update(rollout)
    policy, other, _ = pairs[1]
    assert loop.control.steps[0][1]["loss/kl"] == pytest.approx(
        0.5 * divergence(policy, other, "reverse_kl").mean().item(), rel=1e-4
    )
