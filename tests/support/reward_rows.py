"""Responses with what models and rewards say of them, made by hand or at random, and the rewards that follow."""

from typing import NamedTuple

import torch

from pipeline.rewards.rows import WeightedReward
from step3_ppo.experience import Responses, Scores
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.rewarding import Terms, reward_responses


def rows_of(lengths: list[int], finished: list[bool], valid: list[bool] | None = None) -> Responses:
    """Responses with one prompt token each."""
    count, width = len(lengths), max(lengths)
    return Responses(
        sequences=torch.full((count, width + 1), 7), prompt_lengths=torch.ones(count, dtype=torch.int64),
        response_lengths=torch.tensor(lengths), sampler_log_probs=torch.zeros(count, width),
        finished=torch.tensor(finished), valid=torch.tensor(valid or [True] * count),
        row_index=torch.arange(count), order=torch.arange(count),
    )  # fmt: skip


class Outputs(NamedTuple):
    """What the models and the rewards (judged: (N, R)) say of responses."""

    scores: Scores
    judged: torch.Tensor


def scores_by_hand(log_probs, ref_log_probs, values, scores) -> Outputs:
    made = [torch.tensor(part, dtype=torch.float32) for part in (log_probs, ref_log_probs, values, scores)]
    found = Scores(log_probs=made[0], ref_log_probs=made[1], entropy=torch.ones_like(made[0]), values=made[2])
    return Outputs(found, made[3].reshape(len(made[0]), -1))


def constants(weight: float, mean: float, std: float) -> WeightedReward:
    return WeightedReward("by hand", reward=None, weight=weight, mean=mean, std=std)


def rewarded(responses: Responses, outputs: Outputs, *, mean: float = 0.0, std: float = 1.0, rewards=None, **ppo):
    settings = {"gae_lambda": 1.0, "gamma": 1.0, "whiten_advantages": False} | ppo
    kl_coef, terms = settings.pop("kl_coef", 0.5), Terms(rewards or [constants(1.0, mean, std)])
    return reward_responses(
        responses, outputs.scores, outputs.judged, PPOCoefficients(**settings), kl_coef=kl_coef, terms=terms
    )


def random_scores(lengths: list[int], seed: int = 0) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    parts = [torch.where(mask, torch.randn(len(lengths), width, generator=generator), 0) for _ in range(4)]
    return Outputs(Scores(*parts), torch.randn(len(lengths), 1, generator=generator))


LENGTHS = [3, 1, 5, 2, 4]
