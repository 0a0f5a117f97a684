"""Intervals of means and rates over prompts: coverage by simulation, and slow loops of another kind."""

import random
import statistics

import numpy as np
import pytest

from pipeline.inference.intervals import (
    MIN_PROMPTS,
    bootstrap_mean,
    mean_interval,
    mean_over_prompts,
    rate_over_prompts,
    wilson,
)


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


def coverage(interval, draw, truth: float, num_samples: int = 400) -> float:
    """The share of simulated samples whose interval contains the truth."""
    generator = np.random.default_rng(3)
    found = [interval(draw(generator).tolist()) for _ in range(num_samples)]
    return statistics.fmean(one.low <= truth <= one.high for one in found)


@pytest.mark.parametrize("count", [MIN_PROMPTS, 50])
def test_intervals_cover_the_truth_in_95_of_100_samples(count):
    """400 samples: the standard error of the share is 0.01; percentiles cover 2 % less with the fewest prompts."""

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
    assert mean_over_prompts([1.0]) is None
