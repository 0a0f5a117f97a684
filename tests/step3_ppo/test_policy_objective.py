"""The loss and the metrics of a policy that is not the one that sampled, with masked rows and cut responses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.reward_rows import rewarded, rows_of, scores_by_hand

from pipeline.models.forward.causal_lm import TokenStatistics
from pipeline.training.micro_batches import MicroBatch
from step3_ppo.experience import Experience
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.objectives import PolicyObjective, StepSize, Sums
from step3_ppo.rollout_metrics import rollout_metrics


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_weights_are_of_the_policy_before_the_updates_and_rows_count_over_the_whole_step(aggregation):
    """In a later update of a rollout the policy is not `old` any more; row 1 is masked; a slow loop over tokens."""
    generator, lengths = torch.Generator().manual_seed(3), [3, 1, 2]
    new, old, sampled, advantages = torch.randn(4, 3, 3, generator=generator).unbind(0)
    responses = replace(rows_of(lengths, [True] * 3), sampler_log_probs=sampled)
    mask = responses.response_mask & torch.tensor([True, False, True]).unsqueeze(1)
    known = Experience(mask, old, old, advantages, None)
    new.requires_grad_(True)

    def engine(*_, **settings):
        return TokenStatistics(log_probs=new, entropy=None)

    objective = PolicyObjective(
        engine=engine, kl_coef=0.0, temperature=1.0, unsup_coef=0.0, world=None, longest=8,
        ppo=PPOCoefficients(off_policy_weights="token_truncate", off_policy_cap=1.5, loss_aggregation=aggregation),
        size=StepSize(9, 0, 0, 40, num_trained=30, num_trained_rows=7),
    )  # fmt: skip
    loss = objective.loss(MicroBatch((0, 1, 2), 4, 3, 6), responses, known, Sums())
    expected = 0.0
    for n in (0, 2):
        factor = {"token_mean": 1.0, "sequence_mean": 30 / (7 * lengths[n]), "constant": 30 / (7 * 8)}[aggregation]
        for t in range(lengths[n]):
            weight = min(math.exp(old[n, t] - sampled[n, t]), 1.5)
            ratio, advantage = math.exp(new[n, t].item() - old[n, t].item()), advantages[n, t].item()
            expected -= factor * weight * min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_kl_and_entropy_in_the_loss_are_means_over_rows_as_it_is(aggregation, estimator):
    """Off-policy weights are the clipped loss's alone; values and gradients by a slow loop over tokens."""
    generator, lengths = torch.Generator().manual_seed(5), [3, 1, 2]
    new, old, reference, advantages = torch.randn(4, 3, 3, generator=generator).unbind(0)
    entropy = torch.rand(3, 3, generator=generator)
    responses = replace(rows_of(lengths, [True] * 3), sampler_log_probs=old - 0.3)
    mask = responses.response_mask
    known = Experience(mask, old, reference, advantages, None)
    new.requires_grad_(True)
    entropy.requires_grad_(True)

    def engine(*_, **settings):
        return TokenStatistics(log_probs=new, entropy=entropy)

    objective = PolicyObjective(
        engine=engine, kl_coef=0.7, temperature=1.0, unsup_coef=0.0, world=None, longest=8,
        ppo=PPOCoefficients(
            kl_in_loss=True, kl_estimator=estimator, entropy_coef=0.2,
            loss_aggregation=aggregation, off_policy_weights="token_truncate",
        ),
        size=StepSize(9, 0, 0, 40, num_trained=30, num_trained_rows=7),
    )  # fmt: skip
    sums = Sums()
    loss = objective.loss(MicroBatch((0, 1, 2), 4, 3, 6), responses, known, sums)
    kl = bonus = 0.0
    of_new, of_entropy = torch.zeros(3, 3), torch.zeros(3, 3)
    for n, length in enumerate(lengths):
        factor = {"token_mean": 1.0, "sequence_mean": 30 / (7 * length), "constant": 30 / (7 * 8)}[aggregation]
        for t in range(length):
            d = new[n, t].item() - reference[n, t].item()
            kl += 0.7 * factor * (0.5 * d * d if estimator == "k2" else math.exp(-d) - 1 + d)
            bonus += 0.2 * factor * entropy[n, t].item()
            of_new[n, t] = 0.7 * factor * d
            of_entropy[n, t] = -0.2 * factor
    found = {name: sums.sums[name].item() for name in ("kl", "entropy_bonus")}
    assert found == pytest.approx({"kl": kl, "entropy_bonus": bonus}, rel=1e-5)
    assert loss.item() - sums.sums["policy"].item() == pytest.approx(kl - bonus, rel=1e-4)
    alone = PPOCoefficients(loss_aggregation=aggregation, off_policy_weights="token_truncate")
    of_policy = replace(objective, ppo=alone)
    plain = of_policy.loss(MicroBatch((0, 1, 2), 4, 3, 6), responses, known, Sums())
    (gradient,) = torch.autograd.grad(plain, new)
    loss.backward()
    torch.testing.assert_close(new.grad - gradient, of_new, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy.grad, of_entropy)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_an_exact_divergence_is_a_mean_over_rows_that_count(aggregation):
    """Neither off-policy weights nor row 1, which is masked, have a part in it; its gradient by a slow loop."""
    generator, lengths = torch.Generator().manual_seed(6), [3, 1, 2]
    new, old, advantages = torch.randn(3, 3, 3, generator=generator).unbind(0)
    divergence = torch.rand(3, 3, generator=generator).requires_grad_(True)
    responses = replace(rows_of(lengths, [True] * 3), sampler_log_probs=old - 0.3)
    mask = responses.response_mask & torch.tensor([True, False, True]).unsqueeze(1)

    def engine(*_, **settings):
        return TokenStatistics(log_probs=new, divergence=divergence)

    objective = PolicyObjective(
        engine=engine, kl_coef=0.7, temperature=1.0, unsup_coef=0.0, world=None, longest=8,
        ppo=PPOCoefficients(
            kl_in_loss=True, kl_estimator="jsd", loss_aggregation=aggregation, off_policy_weights="token_truncate"
        ),
        size=StepSize(9, 0, 0, 40, num_trained=30, num_trained_rows=7),
    )  # fmt: skip
    sums = Sums()
    objective.loss(
        MicroBatch((0, 1, 2), 4, 3, 6), responses, Experience(mask, old, None, advantages, None), sums
    ).backward()
    expected, total = torch.zeros(3, 3), 0.0
    for n in (0, 2):
        factor = {"token_mean": 1.0, "sequence_mean": 30 / (7 * lengths[n]), "constant": 30 / (7 * 8)}[aggregation]
        expected[n, : lengths[n]] = 0.7 * factor
        total += 0.7 * factor * divergence[n, : lengths[n]].sum().item()
    torch.testing.assert_close(divergence.grad, expected)
    assert sums.sums["kl"].item() == pytest.approx(total, rel=1e-5)


def test_a_cut_response_of_one_token_is_no_empty_one():
    scores = scores_by_hand([[-1.0, 0]] * 3, [[-1.0, 0]] * 3, [[0.0, 0]] * 3, [1.0, 2.0, 3.0])
    responses = rows_of([1, 1, 2], [True, False, True])
    metrics = rollout_metrics(responses, scores.scores, rewarded(responses, scores), PPOCoefficients())
    assert metrics["completions/empty_fraction"] == pytest.approx(1 / 3)


def test_what_tells_sampler_and_trainer_apart_is_measured_by_the_update_itself():
    """--old-log-probs sampler, of a policy that differs by some nats; by numpy over the tokens that count."""
    generator, lengths = torch.Generator().manual_seed(4), [3, 1, 2]
    new, sampled, advantages = torch.randn(3, 3, 3, generator=generator).unbind(0)
    responses = replace(rows_of(lengths, [True] * 3), sampler_log_probs=sampled)
    mask, entropy = responses.response_mask, torch.rand(3, 3, generator=generator)
    known = Experience(mask, torch.where(mask, sampled, 0), torch.zeros(3, 3), advantages, None)

    objective = PolicyObjective(
        engine=None, kl_coef=0.0, temperature=1.0, unsup_coef=0.0, world=None, longest=8,
        ppo=PPOCoefficients(old_log_probs="sampler"), size=StepSize(3, 0, 0, 6, num_trained=6, num_trained_rows=3),
    )  # fmt: skip
    sums = Sums()
    for row in range(3):  # a micro-batch each: the largest difference is not in the last
        part, index = responses.select(torch.tensor([row])), torch.tensor([row])

        def engine(*_, row=row, **settings):
            return TokenStatistics(log_probs=new[row : row + 1], entropy=entropy[row : row + 1])

        objective.engine = engine
        objective.loss(MicroBatch((row,), 4, 3, lengths[row]), part, known.select(index), sums)
    found = objective.metrics(sums.over_ranks(), 6)
    d = (new - sampled)[mask].double().numpy()
    ratios = np.exp(d)
    expected = {
        "policy/effective_share": ratios.sum() ** 2 / (6 * (ratios**2).sum()),
        "policy/sampler_kl": np.mean(ratios - 1 - d),
        "policy/sampler_error": abs(d).max(), "policy/sampler_mean_error": abs(d).mean(),
        "objective/entropy": entropy[mask].double().mean().item(), "policy/ratio_max": 1.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert abs(ratios.sum() / 6 - expected["policy/effective_share"]) > 0.05
