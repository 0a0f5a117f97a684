"""Intervals by resampling prompts, and a win rate at equal length."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.inference.intervals import MIN_PROMPTS, Interval, mean_interval, wilson

NUM_RESAMPLES, BLOCK = 2000, 100  # resamples of a bootstrap, and how many are in memory at once
SEED = 0  # of the bootstrap, so that the same answers give the same interval
MIN_SHARE = 0.1  # of the prompts, to which each model must have the shorter answer or one as long. Chosen by hand.
RIDGE = 1e-3  # weight of half the squared coefficients; 0.4 % of what a prompt at a rate of 0.5 weighs
MAX_STEP, MAX_NUM_STEPS, TOLERANCE = 1.0, 100, 1e-9  # of Newton's method, in units of the coefficients


def bootstrap(value: float, count: int, estimates: Callable[[Any], Any]) -> Interval:
    """Return a value with the percentile interval of its bootstrap (Efron 1979) over `count` prompts.

    Args:
        estimates: converts (R, count) numbers, how often each of R resamples has each prompt, to (R,) estimates.
    """
    generator, shares = np.random.default_rng(SEED), np.full(count, 1 / count)
    blocks = [estimates(generator.multinomial(count, shares, size=BLOCK)) for _ in range(NUM_RESAMPLES // BLOCK)]
    low, high = np.quantile(np.concatenate(blocks), (0.025, 0.975))
    return Interval(value, float(low), float(high), "a bootstrap over the prompts")


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Return the mean over prompts with its bootstrap interval."""
    return bootstrap(statistics.fmean(values), len(values), lambda counts: counts @ np.asarray(values) / len(values))


def rate_over_prompts(shares: Sequence[float]) -> Interval:
    """Return the mean of shares from 0 to 1, with Wilson's interval for few prompts or if all shares are equal.

    A bootstrap of equal shares would have no width.
    """
    if len(shares) < MIN_PROMPTS or len(set(shares)) == 1:
        return wilson(statistics.fmean(shares), len(shares))
    return bootstrap_mean(shares)


def mean_over_prompts(values: Sequence[float]) -> Interval | None:
    """Return the mean, with the normal interval for few prompts; None for fewer than two."""
    if len(values) < MIN_PROMPTS:
        return mean_interval(values)
    return bootstrap_mean(values)


def length_controlled(wins: Sequence[float], differences: Sequence[float]) -> Interval | None:
    """Return the win rate that a logistic model predicts for two answers of equal length (Dubois et al. 2024).

    The model is p = sigmoid(theta + phi tanh(difference / std)), and sigmoid(theta) is returned. Its interval is a
    bootstrap with the std of all prompts; Wilson's if all wins are equal, since length then explains nothing.

    Args:
        wins: 0, 0.5 or 1 for each prompt, or the mean of these over pairs of answers.
        differences: tokens of the answer minus tokens of the baseline's, for each prompt.

    Returns:
        None for fewer than MIN_PROMPTS prompts, or if one model has the longer answer to nearly every prompt: the
        model would be extrapolated.
    """
    lengths = np.asarray(differences, dtype=float)
    fewest = min((lengths <= 0).sum(), (lengths >= 0).sum())
    if len(lengths) < MIN_PROMPTS or fewest < MIN_SHARE * len(lengths):
        return None
    if len(set(wins)) == 1:
        return wilson(wins[0], len(wins))
    features = np.stack([np.ones_like(lengths), np.tanh(lengths / (lengths.std() or 1.0))])  # (2, N)

    def rates(counts: Any) -> Any:
        return 1 / (1 + np.exp(-fit_logistic(features, np.asarray(wins), counts)[:, 0]))

    return bootstrap(float(rates(np.ones((1, len(lengths))))[0]), len(lengths), rates)


def fit_logistic(features: Any, targets: Any, weights: Any) -> Any:
    """Return (R, F) coefficients that maximise the likelihood of (N,) targets by (F, N) features, minus a ridge.

    Newton's method with steps of at most MAX_STEP. The ridge, RIDGE / 2 times the sum of the squared coefficients,
    keeps them finite where the features separate wins from losses: for 100 prompts that are all won, theta is 9.3.

    Args:
        weights: (R, N) weights of the targets in each of R fits.
    """
    size, products = len(features), (features[:, None] * features).reshape(-1, features.shape[1]).T
    coefficients = np.zeros((len(weights), size))
    for _ in range(MAX_NUM_STEPS):
        rates = 1 / (1 + np.exp(-coefficients @ features))  # (R, N)
        gradient = (weights * (targets - rates)) @ features.T - RIDGE * coefficients
        curvature = ((weights * rates * (1 - rates)) @ products).reshape(-1, size, size) + RIDGE * np.eye(size)
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        coefficients += step / np.maximum(1, np.linalg.norm(step, axis=1, keepdims=True) / MAX_STEP)
        if np.abs(step).max() < TOLERANCE:
            break
    return coefficients
