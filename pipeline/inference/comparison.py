"""Compare answers of several models to the same prompts: mean scores, win rates and their intervals. Imports no torch.

The first model is the baseline. The unit of every interval is the prompt: several answers to one prompt depend on each
other, so they are averaged first. Tables are in `comparison_report.py`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

Z_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """An answer in a comparison; num_tokens includes its end token; score is None without a reward model."""

    text: str
    num_tokens: int
    finished: bool
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model in a comparison; answers[i] are those to prompt i, equally many for each prompt and model."""

    label: str
    path: str
    answers: tuple[tuple[AnswerRow, ...], ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class HeadToHead:
    """A model against the baseline over `num_prompts` prompts: pairs of answers, win rate, score difference."""

    num_prompts: int
    wins: int
    ties: int
    losses: int
    win_rate: Interval
    difference: Interval | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's figures; mean_score and against are None without a reward model, against also for the baseline."""

    mean_tokens: float
    finished_share: float
    mean_score: float | None
    against: HeadToHead | None


def wilson(rate: float, count: int, *, z: float = Z_95) -> Interval:
    """Return Wilson's score interval (1927) of a rate over `count` trials; ties may count as half a success."""
    if count < 1 or not 0 <= rate <= 1:
        raise ValueError(f"a rate of {rate} over {count} trials")
    scale = 1 + z * z / count
    centre = (rate + z * z / (2 * count)) / scale
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / scale
    return Interval(rate, max(centre - half, 0.0), min(centre + half, 1.0))


def mean_interval(values: Sequence[float], *, z: float = Z_95) -> Interval | None:
    """Return the mean and its normal interval, from the sample variance; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = z * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def scores(contestant: Contestant) -> list[list[float]]:
    """Return a model's scores as [prompt][answer], empty if its answers have none."""
    rows = [[row.score for row in answers if row.score is not None] for answers in contestant.answers]
    return rows if all(rows) else []


def compare(first: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> HeadToHead:
    """Compare `other` with `first`, scores [prompt][answer]; within a prompt every answer meets every answer."""
    meetings = [
        [(theirs > ours) - (theirs < ours) for ours, theirs in product(a, b)] for a, b in zip(first, other, strict=True)
    ]
    rate = statistics.fmean(0.5 + 0.5 * statistics.fmean(results) for results in meetings)
    every = [result for results in meetings for result in results]
    differences = [statistics.fmean(b) - statistics.fmean(a) for a, b in zip(first, other, strict=True)]
    return HeadToHead(
        num_prompts=len(meetings),
        wins=every.count(1),
        ties=every.count(0),
        losses=every.count(-1),
        win_rate=wilson(rate, len(meetings)),
        difference=mean_interval(differences),
    )


def summarise(contestants: Sequence[Contestant]) -> list[Summary]:
    """Summarise every model, in order."""
    return [summary(contestant, None if index == 0 else contestants[0]) for index, contestant in enumerate(contestants)]


def summary(contestant: Contestant, first: Contestant | None) -> Summary:
    """Return a model's averages, and its wins against `first`."""
    rows = [row for answers in contestant.answers for row in answers]
    own = scores(contestant)
    return Summary(
        mean_tokens=statistics.fmean(row.num_tokens for row in rows),
        finished_share=statistics.fmean(row.finished for row in rows),
        mean_score=statistics.fmean(map(statistics.fmean, own)) if own else None,
        against=compare(scores(first), own) if own and first is not None else None,
    )


def to_json(prompts: Sequence[str], contestants: Sequence[Contestant], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a whole comparison as one JSON object."""
    models = [
        {"label": contestant.label, "path": contestant.path, **asdict(figures)}
        for contestant, figures in zip(contestants, summarise(contestants), strict=True)
    ]
    answers = [
        {contestant.label: [asdict(row) for row in contestant.answers[index]] for contestant in contestants}
        for index in range(len(prompts))
    ]
    return {
        "settings": settings,
        "models": models,
        "prompts": [{"prompt": text, "answers": each} for text, each in zip(prompts, answers, strict=True)],
    }
