"""Intervals of means and rates over prompts: coverage by simulation, and slow loops of another kind."""

import math
import random
import statistics

import numpy as np
import pytest
import torch

from pipeline.inference.bootstrap import (
    MIN_PROMPTS,
    RIDGE,
    bootstrap_mean,
    fit_logistic,
    length_controlled,
    mean_over_prompts,
    rate_over_prompts,
)
from pipeline.inference.intervals import mean_interval, wilson


def slow_percentiles(values: list[float], num_resamples: int) -> tuple[float, float]:
    """The bootstrap with Python's random numbers, one prompt at a time; no interpolation between order statistics."""
    numbers = random.Random(7)
    means = sorted(sum(numbers.choice(values) for _ in values) / len(values) for _ in range(num_resamples))
    return means[round(0.025 * num_resamples)], means[round(0.975 * num_resamples)]


@pytest.mark.parametrize("kind", ["wins", "scores"])
def test_percentiles_equal_those_of_a_slow_loop(kind):
    """Both have 2,000 or more random resamples; a percentile's standard error is 0.03 of the interval's half width."""
    numbers = random.Random(1)
    wins = [numbers.choices((0.0, 0.5, 1.0), (0.3, 0.1, 0.6))[0] for _ in range(60)]
    values = wins if kind == "wins" else [numbers.lognormvariate(0, 1) for _ in range(60)]
    found, expected = bootstrap_mean(values), slow_percentiles(values, 4000)
    half = (found.high - found.low) / 2
    assert found.value == statistics.fmean(values)
    assert (found.low, found.high) == pytest.approx(expected, abs=0.15 * half)
    assert found == bootstrap_mean(values)  # the same values give the same interval


def coverage(interval, draw, truth: float, num_samples: int = 300) -> float:
    """The share of simulated samples whose interval contains the truth."""
    generator = np.random.default_rng(3)
    found = [interval(draw(generator).tolist()) for _ in range(num_samples)]
    return statistics.fmean(one.low <= truth <= one.high for one in found)


@pytest.mark.parametrize("count", [MIN_PROMPTS, 50])
def test_intervals_cover_the_truth_in_95_of_100_samples(count):
    """300 samples: the standard error of the share is 0.013; percentiles cover 2 % less with the fewest prompts."""

    def wins(numbers):
        return numbers.choice([0.0, 0.5, 1.0], p=[0.3, 0.2, 0.5], size=count)

    low = 0.90 if count == MIN_PROMPTS else 0.925
    assert low < coverage(rate_over_prompts, wins, 0.6) < 0.98
    assert low < coverage(mean_over_prompts, lambda numbers: numbers.normal(2, 3, count), 2.0) < 0.98


def test_few_prompts_or_equal_shares_have_wilsons_interval():
    few, mixed = [0.0, 1.0, 0.5] * 6, [0.0, 1.0] * 10
    assert len(few) < MIN_PROMPTS <= len(mixed)
    assert rate_over_prompts(few) == wilson(0.5, 18) and mean_over_prompts(few) == mean_interval(few)
    assert rate_over_prompts([1.0] * 50) == wilson(1.0, 50)
    assert rate_over_prompts(mixed) == mean_over_prompts(mixed) == bootstrap_mean(mixed)
    methods = [one.method for one in (rate_over_prompts(few), mean_over_prompts(few), rate_over_prompts(mixed))]
    assert methods == ["Wilson's formula", "the normal distribution", "a bootstrap over the prompts"]
    assert mean_over_prompts([1.0]) is None


# ---- the win rate at equal length ----


def slow_fit(wins: list[float], differences: list[float]) -> float:
    """sigmoid(theta) by gradient ascent with torch, in float64 and without second derivatives."""
    outcomes, lengths = torch.tensor(wins, dtype=torch.float64), torch.tensor(differences, dtype=torch.float64)
    length_term = torch.tanh(lengths / lengths.std(correction=0))
    theta, phi = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.LBFGS([theta, phi], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        logits = theta + phi * length_term
        total = torch.nn.functional.binary_cross_entropy_with_logits(logits, outcomes, reduction="sum")
        total = total + RIDGE / 2 * (theta**2 + phi**2)
        total.backward()
        return total

    optimizer.step(loss)
    return torch.sigmoid(theta).item()


def simulated(theta: float, phi: float, count: int, *, mean_length: float = 0.0, seed: int = 0):
    """Wins by the model itself, with differences of length whose mean is `mean_length` standard deviations."""
    numbers = np.random.default_rng(seed)
    lengths = np.round(numbers.normal(40 * mean_length, 40, count))
    rates = 1 / (1 + np.exp(-theta - phi * np.tanh(lengths / lengths.std())))
    return (numbers.random(count) < rates).astype(float).tolist(), lengths.tolist()


@pytest.mark.parametrize(("theta", "phi", "mean_length"), [(0.0, 3.0, 0.5), (1.0, -2.0, 0.3), (-2.0, 0.5, -1.0)])
def test_the_fit_agrees_with_a_slow_one(theta, phi, mean_length):
    wins, lengths = simulated(theta, phi, 150, mean_length=mean_length)
    wins[:10] = [0.5] * 10
    found = length_controlled(wins, lengths)
    assert found.value == pytest.approx(slow_fit(wins, lengths), abs=1e-4)
    assert found.low < found.value < found.high


def test_where_length_alone_decides_the_rate_is_a_half():
    """The model is longer by half a standard deviation on average; the plain rate calls it far better."""
    wins, lengths = simulated(0.0, 4.0, 4000, mean_length=0.5)
    assert statistics.fmean(wins) > 0.6
    assert length_controlled(wins, lengths).value == pytest.approx(0.5, abs=0.04)  # 2 standard errors: 0.03


def test_where_quality_alone_decides_it_is_the_plain_rate():
    """Each length occurs with both signs and the same outcome, so the length term has no effect in the sample."""
    wins, lengths = [1.0, 1.0, 1.0, 0.0, 0.5] * 20, [float(n) for n in range(1, 101)]
    found = length_controlled(wins * 2, [*lengths, *(-n for n in lengths)])
    assert found.value == pytest.approx(0.7, abs=1e-4)
    equal = length_controlled(wins, [0.0] * 100)  # no difference at all
    assert equal.value == pytest.approx(0.7, abs=1e-4)
    assert (equal.low, equal.high) == pytest.approx((bootstrap_mean(wins).low, bootstrap_mean(wins).high), abs=1e-3)


@pytest.mark.parametrize("longer_wins", [True, False])
def test_outcomes_that_length_separates_do_not_diverge(longer_wins):
    _, lengths = simulated(0.0, 0.0, 100)
    wins = [float((length > 0) is longer_wins) for length in lengths]
    found = length_controlled(wins, lengths)
    assert all(map(math.isfinite, (found.value, found.low, found.high)))
    assert found.value == pytest.approx(slow_fit(wins, lengths), abs=1e-4)


def test_equal_outcomes_do_not_diverge():
    _, lengths = simulated(0.0, 0.0, 100)
    assert length_controlled([1.0] * 100, lengths) == wilson(1.0, 100)
    # A resample may have wins alone: 100 / (1 + exp(theta)) = 0.001 theta, whose solution is 9.28449.
    theta = fit_logistic(np.ones((1, 100)), np.ones(100), np.ones((1, 100)))
    assert theta.item() == pytest.approx(9.28449, abs=1e-4)


@pytest.mark.slow
def test_the_interval_at_equal_length_covers_the_truth():
    """120 samples: the standard error of the share is 0.02."""
    samples = [simulated(0.5, 2.0, 60, mean_length=0.3, seed=seed) for seed in range(120)]
    found = [length_controlled(*sample) for sample in samples]
    truth = 1 / (1 + math.exp(-0.5))
    assert 0.89 < statistics.fmean(one.low <= truth <= one.high for one in found) < 0.99


def test_no_rate_at_equal_length_without_data_for_it():
    wins = [0.0, 1.0] * (MIN_PROMPTS // 2)
    assert length_controlled(wins, [*range(1, MIN_PROMPTS + 1)]) is None  # always the longer one
    assert length_controlled(wins, [*range(-MIN_PROMPTS, 0)]) is None
    assert length_controlled(wins, [*range(-1, MIN_PROMPTS - 1)]) is not None
    assert length_controlled(wins[1:], [*range(-1, MIN_PROMPTS - 2)]) is None  # too few prompts
