"""Responses with what models and rewards say of them, made by hand or at random, and the rewards that follow."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from pipeline.rewards.rows import Scale
from step3_ppo.experience import Responses, RewardScores, Scores, span_mask
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.rewarding import reward_responses


def rows_of(lengths: list[int], finished: list[bool], valid: list[bool] | None = None) -> Responses:
    """Responses with one prompt token each."""
    count, width = len(lengths), max(lengths)
    return Responses(
        sequences=torch.full((count, width + 1), 7), sampler_log_probs=torch.zeros(count, width),
        trained=span_mask(torch.ones(count, dtype=torch.int64), torch.tensor(lengths), width + 1),
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


def constants(weight: float, mean: float, std: float, *, takes_first: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name="by hand", weight=weight, scale=Scale(mean, std, takes_first))


def of_models(judged: torch.Tensor, rewards: Any = None) -> RewardScores:
    """Raw scores (N, R) of reward models, without functions."""
    return RewardScores.of(rewards or [constants(1.0, 0.0, 1.0)], judged, [[]] * len(judged), width=1)


def rewarded(responses: Responses, outputs: Outputs, *, mean: float = 0.0, std: float = 1.0, rewards=None, **ppo):
    settings = {"gae_lambda": 1.0, "gamma": 1.0, "whiten_advantages": False} | ppo
    kl_coef, judged = settings.pop("kl_coef", 0.5), of_models(outputs.judged, rewards or [constants(1.0, mean, std)])
    return reward_responses(responses, outputs.scores, judged, PPOCoefficients(**settings), kl_coef=kl_coef)


def random_scores(lengths: list[int], seed: int = 0) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    parts = [torch.where(mask, torch.randn(len(lengths), width, generator=generator), 0) for _ in range(4)]
    return Outputs(Scores(*parts), torch.randn(len(lengths), 1, generator=generator))


LENGTHS = [3, 1, 5, 2, 4]
