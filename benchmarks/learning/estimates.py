"""Estimates of the report: best-of-n without bias, win rates at equal length, and how much texts repeat themselves."""

import math
import statistics
from collections.abc import Sequence

import numpy as np


def best_of(k: int, proxy: Sequence[float], gold: Sequence[float]) -> tuple[float, float]:
    """Return the expected proxy and gold score of the best by proxy among `k` of a prompt's N answers.

    Over all subsets of size k: the answer of rank i from below is the best of C(i - 1, k - 1) of C(N, k) of them
    (Nakano et al. 2021, appendix I).
    """
    count, order = len(proxy), np.argsort(proxy, kind="stable")
    weights = np.array([math.comb(rank, k - 1) / math.comb(count, k) for rank in range(count)])
    return float(weights @ np.asarray(proxy)[order]), float(weights @ np.asarray(gold)[order])


def best_of_kl(k: int) -> float:
    """Return the KL of best-of-k from the policy that is sampled, in nats: log k - (k - 1) / k, an upper bound."""
    return math.log(k) - (k - 1) / k


def length_controlled(
    first: Sequence[float], other: Sequence[float], lengths: Sequence[int], other_lengths: Sequence[int]
) -> float:
    """Return the win rate at equal lengths: a logistic regression of wins on the standardised difference of lengths.

    As in length-controlled AlpacaEval (Dubois et al. 2024), with the term of the length alone: the difference is
    divided by its standard deviation and bent by tanh. A small ridge keeps the fit finite where one side always wins.
    """
    wins = np.array([(a > b) + (a == b) / 2 for a, b in zip(first, other, strict=True)])
    return rate_at_equal_length(wins, np.subtract(lengths, other_lengths).astype(float))


def rate_at_equal_length(wins: np.ndarray, apart: np.ndarray) -> float:
    """Return `length_controlled` of wins (0, 1/2 or 1) and differences of lengths, both (N,)."""
    spread = apart.std()
    columns = np.stack([np.ones_like(apart), np.tanh(apart / spread) if spread else np.zeros_like(apart)], axis=1)
    weights = np.zeros(2)
    for _ in range(50):
        rates = 1 / (1 + np.exp(-columns @ weights))
        hessian = (columns * (rates * (1 - rates))[:, None]).T @ columns + 1e-3 * np.eye(2)
        step = np.linalg.solve(hessian, columns.T @ (wins - rates) - 1e-3 * weights)
        weights += step
        if np.abs(step).max() < 1e-10:
            break
    return float(1 / (1 + math.exp(-weights[0])))


def distinct(texts: Sequence[str], n: int) -> float:
    """Return the share of different word n-grams among all of the texts."""
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds, and the standard deviation (NaN for a single seed)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan
