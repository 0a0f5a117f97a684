"""Estimates over prompts with their 95 % intervals: rates and means.

A prompt is the unit: answers to one prompt depend on each other, so their average is one value. The module imports
neither torch nor numpy; `bootstrap.py` resamples prompts.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile
# Prompts below which Wilson's and the normal interval replace the bootstrap, whose percentiles cover too little there:
# in 1,000 samples of normal values they contained the mean in 92 % with 10 prompts, and in 93 % with 20.
MIN_PROMPTS = 20


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % confidence interval; `method` names how the interval was estimated."""

    value: float
    low: float
    high: float
    method: str = ""


def wilson(rate: float, count: int, *, z: float = Z_95) -> Interval:
    """Return Wilson's score interval (1927) of a rate over `count` trials; ties may count as half a success."""
    if count < 1 or not 0 <= rate <= 1:
        raise ValueError(f"a rate of {rate} over {count} trials")
    scale = 1 + z * z / count
    centre = (rate + z * z / (2 * count)) / scale
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / scale
    return Interval(rate, max(centre - half, 0.0), min(centre + half, 1.0), "Wilson's formula")


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean and its normal interval, from the sample variance; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = Z_95 * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, "the normal distribution")
