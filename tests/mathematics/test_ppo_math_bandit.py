"""Expected first gradients of methods without a critic on a bandit, by enumeration of all groups that may be drawn."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.ragged import every_token, gradient

from pipeline.tensor_ops import finish_moments, moments, whiten
from step3_ppo.mathematics.estimators import (
    estimate_advantages,
    group_advantages,
    kl_estimate,
    leave_one_out_advantages,
    token_rewards,
)
from step3_ppo.mathematics.losses import cispo_loss, policy_loss

K = 3
LOGITS, REFERENCE = torch.tensor([0.3, -0.8, 1.1]), torch.tensor([0.0, 0.5, 0.2]).log_softmax(0)
REWARDS = torch.tensor([1.0, -2.0, 0.5])
Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # scores (k,), mask (k, 1) -> advantages (k, 1)


def spread(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What stage 3 makes of sequence advantages: token rewards and the rewards to come."""
    rewards = token_rewards(advantages, torch.zeros_like(mask, dtype=torch.float32), mask, kl_coef=0.0)
    return estimate_advantages(rewards, None, mask, gamma=1.0, gae_lambda=0.95)[0]


def whitened(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    advantages = spread(scores, mask)
    mean, variance = finish_moments(moments(advantages, mask))
    return whiten(advantages, mask, mean=mean, var=variance)


ESTIMATORS: dict[str, Estimator] = {
    "RLOO": lambda s, m: spread(leave_one_out_advantages(s, m[:, 0], group_size=len(s)), m),
    "GRPO": lambda s, m: spread(group_advantages(s, m[:, 0], group_size=len(s), scale=True), m),
    "Dr.GRPO": lambda s, m: spread(group_advantages(s, m[:, 0], group_size=len(s), scale=False), m),
    "REINFORCE": spread,
    "REINFORCE++": whitened,
}


def expected_gradient(
    name: str, logits: torch.Tensor, rewards: torch.Tensor, size: int, *, cispo: bool = False
) -> torch.Tensor:
    """Mean over all groups of the gradient of the loss that is divided by the number of tokens."""
    leaf = logits.clone().requires_grad_()
    total, mask = torch.zeros_like(logits), every_token(size, 1)
    for arms in itertools.product(range(len(logits)), repeat=size):
        new = leaf.log_softmax(0)[list(arms)].unsqueeze(1)
        advantages = ESTIMATORS[name](rewards[list(arms)], mask)
        if cispo:
            loss, _ = cispo_loss(new, new.detach(), advantages, mask, ratio_cap=5.0)
        else:
            loss, _ = policy_loss(new, new.detach(), advantages, mask, policy_clip=0.2)
        total += new.detach().sum().exp() * gradient(loss / size, leaf)
    return total


def ascent() -> np.ndarray:
    """Gradient of the expected reward: p_a (r_a - mean reward)."""
    p, r = LOGITS.double().softmax(0).numpy(), REWARDS.double().numpy()
    return p * (r - p @ r)


def by_loop(size: int, advantage_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The mean over groups of sum_i A_i (indicator - p) / size, without autograd."""
    p, r = LOGITS.double().softmax(0).numpy(), REWARDS.double().numpy()
    total = np.zeros(3)
    for arms in itertools.product(range(3), repeat=size):
        for arm, advantage in zip(arms, advantage_of(r[list(arms)]), strict=True):
            total += np.prod(p[list(arms)]) * advantage * ((np.arange(3) == arm) - p) / size
    return total


@pytest.mark.parametrize("name", ["RLOO", "REINFORCE", "Dr.GRPO"])
@pytest.mark.parametrize("cispo", [False, True])
def test_these_are_the_gradient_of_the_expected_reward(name, cispo):
    """Dr.GRPO has a score in its own mean, which leaves (k - 1) / k of it."""
    share = (K - 1) / K if name == "Dr.GRPO" else 1
    found = expected_gradient(name, LOGITS, REWARDS, K, cispo=cispo)
    np.testing.assert_allclose(found, -share * ascent(), rtol=1e-5, atol=1e-7)


def test_a_divided_advantage_gives_the_mean_over_groups_of_its_formula():
    def scaled(r: np.ndarray) -> np.ndarray:
        return (r - r.mean()) / (r.std(ddof=1) + 1e-4)

    def over_batch(r: np.ndarray) -> np.ndarray:
        return (r - r.mean()) / np.sqrt(r.var() + 1e-8)

    for name, formula in (("GRPO", scaled), ("REINFORCE++", over_batch)):
        expected = by_loop(K, formula)
        np.testing.assert_allclose(expected_gradient(name, LOGITS, REWARDS, K), -expected, rtol=1e-4, atol=1e-6)
        assert np.abs(expected / ascent() - 1).max() > 0.1  # it is no gradient of the expected reward


def test_two_arms_and_two_samples_by_hand():
    # Arm 0 has probability p = e / (1 + e) and reward 1, the other 0. Only a group of both, of probability 2 p (1 - p),
    # has advantages, +-A; by the first logit its gradient is A ((1 - p) + p) / 2. A = 1 (RLOO), 1/2 (Dr.GRPO),
    # 1/2 / (sqrt(1/2) + 1e-4) (GRPO), 1 (REINFORCE++, deviation 1/2 of the batch).
    p = math.e / (1 + math.e)
    advantages = {"RLOO": 1, "Dr.GRPO": 0.5, "GRPO": 0.5 / (math.sqrt(0.5) + 1e-4), "REINFORCE++": 1}
    for name, advantage in advantages.items():
        found = expected_gradient(name, torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), 2)
        expected = p * (1 - p) * advantage
        assert found.tolist() == pytest.approx([-expected, expected], rel=1e-5), name


def test_reinforce_with_the_kl_in_the_token_rewards_climbs_reward_minus_kl():
    """d/dz E[r - beta KL]: the mean of (r - beta log p/ref) grad log p, since E[grad log p] = 0."""
    beta, leaf = 0.3, LOGITS.clone().requires_grad_()
    log_probs = leaf.log_softmax(0)
    exact = gradient((log_probs.exp() * (REWARDS - beta * (log_probs - REFERENCE))).sum(), leaf)
    total, mask = torch.zeros(3), every_token(1, 1)
    for arm in range(3):
        new = leaf.log_softmax(0)[arm].view(1, 1)
        kl = kl_estimate(new.detach(), REFERENCE[arm].view(1, 1), estimator="k1")
        rewards = token_rewards(REWARDS[arm].view(1), kl, mask, kl_coef=beta)
        advantages, _ = estimate_advantages(rewards, None, mask, gamma=1.0, gae_lambda=0.95)
        loss, _ = policy_loss(new, new.detach(), advantages, mask, policy_clip=0.2)
        total += new.detach().exp().item() * gradient(loss, leaf)
    torch.testing.assert_close(total, -exact, rtol=1e-5, atol=1e-6)
