"""Advantages of methods that compare responses, by a slow loop: masked ones in a group, whole groups, tiny spreads."""

from statistics import fmean, stdev

import pytest
import torch

from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.pool import Failure
from step3_ppo.experience import Responses, RewardScores, Scores, span_mask
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.rewarding import reward_responses

SIZE, KL_COEF = 3, 0.5
FAILED, NONE = "failed", None
# Of each response what the rewarding function gives; the function of weight 0 applies to all but the last but one.
GIVEN = [
    [1.0, FAILED, 4.0],  # a masked response inside a group
    [FAILED, FAILED, FAILED],
    [0.5, 0.5 + 2**-20, 0.5],  # a deviation that is below the epsilon
    [3.0, 3.0, 3.0],
    [FAILED, 2.0, FAILED],  # nothing is left to compare with
    [NONE, NONE, -1.0],  # the first has 0, as the function of weight 0 applies; none does for the second
]
FLAT = [value for group in GIVEN for value in group]
WATCHED = len(FLAT) - 2
LENGTHS = torch.tensor([2, 1, 3, 1, 2, 1, 3, 1, 2, 1, 1, 7, 2, 2, 1, 3, 1, 2])


def responses() -> Responses:
    number, width = len(FLAT), int(LENGTHS.max())
    return Responses(
        sequences=torch.full((number, width + 1), 7), sampler_log_probs=torch.zeros(number, width),
        trained=span_mask(torch.ones(number, dtype=torch.int64), LENGTHS, width + 1),
        finished=torch.ones(number, dtype=torch.bool), valid=torch.ones(number, dtype=torch.bool),
        row_index=torch.arange(number), order=torch.arange(number),
    )  # fmt: skip


def kl_of_tokens() -> list[list[float]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(len(FLAT), int(LENGTHS.max()), generator=generator).tolist()


def advantages_by_hand(**ppo) -> list[list[float] | None]:
    """Of each response the advantages of its tokens; None for a masked one."""
    kl, found = kl_of_tokens(), list[list[float] | None]()
    for first in range(0, len(FLAT), SIZE):
        rows = [n for n in range(first, first + SIZE) if FLAT[n] != FAILED and n != WATCHED]
        rewards = {n: 2.0 * (FLAT[n] or 0.0) for n in rows}
        if ppo.get("replace_equal_groups") and len(set(rewards.values())) == 1:
            rewards = {}
        totals = dict(rewards)
        if ppo["method"] == "rloo":
            totals = {n: rewards[n] - KL_COEF * sum(kl[n][: LENGTHS[n]]) for n in rewards}
        for n in range(first, first + SIZE):
            if n not in rewards:
                found.append(None)
                continue
            others = [totals[m] for m in totals if m != n]
            length = int(LENGTHS[n])
            if ppo["method"] == "reinforce_pp":
                base = fmean(totals.values()) if others else totals[n]
                found.append([totals[n] - base - KL_COEF * sum(kl[n][t:length]) for t in range(length)])
                continue
            advantage = totals[n] - (
                fmean(totals.values()) if ppo["method"] == "grpo" else fmean(others or [totals[n]])
            )
            if ppo["method"] == "grpo" and ppo.get("scale_by_group", True) and others:
                advantage /= stdev(totals.values()) + 1e-4
            found.append([advantage if others else 0.0] * length)
    return found


@pytest.mark.parametrize(
    "ppo",
    [
        {"method": "grpo", "kl_in_loss": True, "kl_estimator": "k3"},
        {"method": "grpo", "kl_in_loss": True, "kl_estimator": "k3", "scale_by_group": False},
        {"method": "grpo", "kl_in_loss": True, "kl_estimator": "k3", "replace_equal_groups": True},
        {"method": "rloo"},
        {"method": "rloo", "replace_equal_groups": True},
        {"method": "reinforce_pp", "group_baseline": True},
    ],
    ids=lambda ppo: "-".join(str(value) for value in ppo.values()),
)
def test_responses_are_compared_with_those_of_their_prompt_that_count(ppo):
    kl, rows = torch.tensor(kl_of_tokens()), responses()
    scores = Scores(log_probs=kl, ref_log_probs=torch.zeros_like(kl), entropy=None, values=None)
    rewards = [RewardFunction("rewarding", "rewarding", 2.0), RewardFunction("watching", "watching", 0.0)]
    failure = Failure("raised", "")
    values = [[failure if one == FAILED else one, None if n == WATCHED else 9.0] for n, one in enumerate(FLAT)]
    judged = RewardScores.of(rewards, kl[:, :0], values, width=kl.shape[1])
    settings = PPOCoefficients(**{"whiten_advantages": False, "missing_eos_penalty": 0.0} | ppo)
    found = reward_responses(rows, scores, judged, settings, kl_coef=KL_COEF, group_size=SIZE)
    for n, expected in enumerate(advantages_by_hand(**ppo)):
        length = 0 if expected is None else int(LENGTHS[n])
        assert int(found.experience.response_mask[n].sum()) == length, n
        assert found.experience.advantages[n, :length].tolist() == pytest.approx(expected or [], rel=1e-5, abs=1e-6), n
        assert not found.experience.advantages[n, length:].any(), n
    assert found.equal_share == pytest.approx(2 / 5), "of groups with a response that counts"
