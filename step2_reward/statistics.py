"""Statistics of a reward model's scores on pairs of answers: pure functions on numbers and texts, no torch.

`chosen` and `rejected` are the scores of the two answers of each pair, in the same order. A pair with equal
scores counts as half a success everywhere.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CALIBRATION_BINS = 10
SIMILAR_LENGTH = 0.1  # two answers are of similar length up to this share of the longer one
LENGTH_BUCKETS = ("shorter_wins", "similar", "longer_wins")
# A word of text. Chinese and Japanese have no spaces, so each of their characters counts as a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `count` pairs; `standard_error` is None for fewer than two."""

    mean: float
    standard_error: float | None
    count: int


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Comparisons whose predicted probability lies in [low, high).

    low: lower bound.
    high: upper bound.
    count: number of comparisons.
    predicted: mean predicted probability; None where there is no comparison.
    observed: share of comparisons won; None where there is no comparison.
    """

    low: float
    high: float
    count: int
    predicted: float | None
    observed: float | None

    @property
    def error(self) -> float:
        return 0.0 if self.predicted is None or self.observed is None else abs(self.predicted - self.observed)


@dataclass(frozen=True, slots=True)
class Calibration:
    """`expected_error` is the mean of |predicted - observed| over the bins, weighted by their counts."""

    bins: tuple[CalibrationBin, ...]
    expected_error: float


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its standard error, from the sample variance (divided by n - 1)."""
    count = len(values)
    error = statistics.stdev(values) / math.sqrt(count) if count > 1 else None
    return Estimate(statistics.fmean(values), error, count)


def success(first: float, second: float) -> float:
    """Return 1 if the first is larger, 0.5 on a tie, else 0."""
    return 0.5 + 0.5 * ((first > second) - (first < second))


def accuracy(chosen: Sequence[float], rejected: Sequence[float]) -> Estimate:
    """Return the share of pairs whose chosen answer scores higher."""
    return estimate([success(c, r) for c, r in zip(chosen, rejected, strict=True)])


def mean_margin(chosen: Sequence[float], rejected: Sequence[float]) -> Estimate:
    """Return the mean of score(chosen) - score(rejected)."""
    return estimate([c - r for c, r in zip(chosen, rejected, strict=True)])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def calibration(chosen: Sequence[float], rejected: Sequence[float]) -> Calibration:
    """Compare the predicted P(first answer wins) = sigmoid(margin) with how often it won, in bins of equal width.

    Every pair enters in both orders, as (p, won) and (1 - p, lost). With the chosen answer always first, the observed
    rate would be 1 in every bin.
    """
    members: list[list[tuple[float, int]]] = [[] for _ in range(CALIBRATION_BINS)]
    for c, r in zip(chosen, rejected, strict=True):
        for predicted, won in ((sigmoid(c - r), 1), (sigmoid(r - c), 0)):
            members[min(int(predicted * CALIBRATION_BINS), CALIBRATION_BINS - 1)].append((predicted, won))
    bins = tuple(calibration_bin(index, points) for index, points in enumerate(members))
    return Calibration(bins, math.fsum(row.count * row.error for row in bins) / (2 * len(chosen)))


def calibration_bin(index: int, points: Sequence[tuple[float, int]]) -> CalibrationBin:
    """Return a bin of its comparisons, (predicted probability, 1 if the first answer won) each."""
    low, high, count = index / CALIBRATION_BINS, (index + 1) / CALIBRATION_BINS, len(points)
    if not count:
        return CalibrationBin(low, high, 0, None, None)
    predicted = math.fsum(p for p, _ in points) / count
    return CalibrationBin(low, high, count, predicted, sum(won for _, won in points) / count)


def length_bucket(chosen_length: int, rejected_length: int) -> str:
    """Return the LENGTH_BUCKET of a pair: did people prefer its shorter or its longer answer?"""
    difference = chosen_length - rejected_length
    if abs(difference) <= SIMILAR_LENGTH * max(chosen_length, rejected_length):
        return "similar"
    return "longer_wins" if difference > 0 else "shorter_wins"


def accuracy_by_length(
    chosen: Sequence[float],
    rejected: Sequence[float],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
) -> dict[str, Estimate]:
    """Return the accuracy in each length bucket that has pairs.

    A model that reads only the length is near 0 in 'shorter_wins'.

    Args:
        chosen_lengths, rejected_lengths: lengths of the answers alone, both in the same unit.
    """
    groups: dict[str, list[float]] = {name: [] for name in LENGTH_BUCKETS}
    for c, r, c_length, r_length in zip(chosen, rejected, chosen_lengths, rejected_lengths, strict=True):
        groups[length_bucket(c_length, r_length)].append(success(c, r))
    return {name: estimate(values) for name, values in groups.items() if values}


def num_distinct_words(text: str) -> int:
    return len({word.lower() for word in WORD.findall(text)})


TRIVIAL_RULES: dict[str, Callable[[str], float]] = {
    "longer wins": len,
    "shorter wins": lambda text: -len(text),
    "more distinct words": num_distinct_words,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison of a reward model with the most accurate rule that needs no model, pair by pair.

    rule: name of that rule.
    gain: accuracy of the model minus that of the rule.
    is_better: the gain exceeds 0 by two standard errors.
    """

    rule: str
    gain: Estimate
    is_better: bool


def verdict(
    chosen: Sequence[float], rejected: Sequence[float], chosen_texts: Sequence[str], rejected_texts: Sequence[str]
) -> Verdict:
    """Compare the model's scores with the rule that does best on the same pairs."""
    rules = trivial_rules(chosen_texts, rejected_texts)
    name = max(rules, key=lambda rule: rules[rule].mean)
    rule = TRIVIAL_RULES[name]
    pairs = zip(chosen, rejected, chosen_texts, rejected_texts, strict=True)
    gain = estimate([success(c, r) - success(rule(good), rule(bad)) for c, r, good, bad in pairs])
    return Verdict(name, gain, gain.standard_error is not None and gain.mean > 2 * gain.standard_error)


def trivial_rules(chosen_texts: Sequence[str], rejected_texts: Sequence[str]) -> dict[str, Estimate]:
    """Return the accuracy of each rule that a reward model must beat; the texts are the answers alone."""
    return {
        name: accuracy([rule(text) for text in chosen_texts], [rule(text) for text in rejected_texts])
        for name, rule in TRIVIAL_RULES.items()
    }
