"""Scales and constants of rewards are those of rows that count."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.reward_rows import constants, rows_of, scores_by_hand

from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.models.engines import Models
from step3_ppo.rewarding import Terms, reward_responses, spreads
from step3_ppo.state import PPO, State

VALID = [True, True, True, False]  # the last row only fills an epoch's last rollout
RAW = [1.0, 4.0, -2.0, 90.0]


def outputs():
    zeros = [[0.0]] * 4
    return scores_by_hand(zeros, zeros, zeros, RAW)


def test_rows_that_fill_a_rollout_are_no_part_of_the_scale():
    responses = rows_of([1] * 4, [True] * 4, VALID)
    ((count, mean, squares),) = spreads(responses, outputs().judged, Terms([constants(1.0, 0.5, 2.0)]), None)
    assert (count, mean) == (3, pytest.approx(1.0)) and squares == pytest.approx(statistics.variance(RAW[:3]) * 2)


def test_a_scaled_score_is_divided_by_the_deviation_alone_whatever_the_models_own_was():
    responses, found = rows_of([1] * 4, [True] * 4, VALID), outputs()
    deviation = statistics.stdev(RAW[:3])
    for std in (1.0, 2.0):
        terms = Terms([constants(1.0, 0.5, std)])
        terms = Terms(terms.models, spreads=spreads(responses, found.judged, terms, None))
        made = reward_responses(responses, found.scores, found.judged, PPOCoefficients(), kl_coef=0.0, terms=terms)
        expected = [(raw - 0.5) / (deviation + 1e-4) for raw in RAW[:3]]
        assert made.sequence_rewards[:3].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_constants_of_the_first_rollout_are_those_of_rows_that_count():
    judged, responses = outputs().judged, rows_of([1] * 4, [True] * 4, VALID)
    models = Models(None, {}, {}, [replace(constants(1.0, 0.0, 1.0), takes_first=True)])
    ppo, state = SimpleNamespace(models=models), State()
    PPO.normalise_by_first(ppo, responses, outputs().scores, judged, state)
    assert state.score_constants == pytest.approx([1.0, statistics.pstdev(RAW[:3])])
