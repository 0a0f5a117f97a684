"""Scales and constants of rewards are those of rows that count."""

import statistics
from dataclasses import replace

import pytest
from support.reward_rows import constants, of_models, rows_of, scores_by_hand

from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.models.engines import Models
from step3_ppo.rewarding import reward_responses, updated_spreads
from step3_ppo.scoring import normalise_by_first

VALID = [True, True, True, False]  # the last row only fills an epoch's last rollout
RAW = [1.0, 4.0, -2.0, 90.0]


def outputs():
    zeros = [[0.0]] * 4
    return scores_by_hand(zeros, zeros, zeros, RAW)


def test_rows_that_fill_a_rollout_are_no_part_of_the_scale():
    responses = rows_of([1] * 4, [True] * 4, VALID)
    ((count, mean, squares),) = updated_spreads(responses, of_models(outputs().judged), None)
    assert (count, mean) == (3, pytest.approx(1.0)) and squares == pytest.approx(statistics.variance(RAW[:3]) * 2)


def test_a_scaled_score_is_divided_by_the_deviation_alone_whatever_the_models_own_was():
    responses, found = rows_of([1] * 4, [True] * 4, VALID), outputs()
    deviation = statistics.stdev(RAW[:3])
    for std in (1.0, 2.0):
        judged = of_models(found.judged, [constants(1.0, 0.5, std)])
        judged = replace(judged, spreads=updated_spreads(responses, judged, None))
        made = reward_responses(responses, found.scores, judged, PPOCoefficients(), kl_coef=0.0)
        expected = [(raw - 0.5) / (deviation + 1e-4) for raw in RAW[:3]]
        assert made.sequence_rewards[:3].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_constants_of_the_first_rollout_are_those_of_rows_that_count():
    models = Models(None, {}, {}, [constants(1.0, 0.0, 1.0, takes_first=True)])
    judged, responses = of_models(outputs().judged, models.rewards), rows_of([1] * 4, [True] * 4, VALID)
    _, constants_of_first = normalise_by_first(models, responses, outputs().scores, judged)
    assert constants_of_first == pytest.approx([1.0, statistics.pstdev(RAW[:3])])
