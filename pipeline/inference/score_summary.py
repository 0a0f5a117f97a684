"""Summarise the scores of sampled answers: mean, standard deviation, and the worth of one more token."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.inference.sample_rows import SampledAnswer


@dataclass(slots=True)
class Sums:
    """Sums over the scores of one name.

    count: number of scores.
    mean: mean of the scores.
    squares: sum of the squares of (score - mean).
    rising: sum of (tokens - mean tokens) (score - mean score), with means over the answers to the same prompt.
    token_squares: sum of the squares of (tokens - mean tokens).
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    rising: float = 0.0
    token_squares: float = 0.0


class ScoreSummary:
    """Sums over the scores of answers, by name; answers are not stored.

    Args:
        deviations: standard deviations of reward models' scores by name, as stage 2 has measured them.
        max_tokens: limit of an answer.
    """

    def __init__(self, deviations: Mapping[str, float], *, max_tokens: int) -> None:
        self._sums, self._deviations, self._max_tokens = defaultdict[str, Sums](Sums), deviations, max_tokens

    def add(self, answers: Sequence[SampledAnswer]) -> None:
        """Add all answers to one prompt; scores that are None do not count."""
        for name in answers[0].scores:
            points = [(one.num_tokens, score) for one in answers if (score := one.scores[name]) is not None]
            sums, middle = self._sums[name], sum(tokens for tokens, _ in points) / max(len(points), 1)
            for tokens, score in points:
                sums.count, before = sums.count + 1, score - sums.mean
                sums.mean += before / sums.count
                sums.squares += before * (score - sums.mean)  # Welford 1962
                sums.rising += (tokens - middle) * score  # the term of the mean score sums to 0
                sums.token_squares += (tokens - middle) ** 2

    def lines(self) -> list[str]:
        """Return a line for each name that has a score."""
        return [f"{name}: {words_of(sums)}{self._slope(name, sums)}" for name, sums in self._sums.items() if sums.count]

    def _slope(self, name: str, sums: Sums) -> str:
        """Return the least-squares slope over tokens; for a reward model also in units to weigh a missing EOS by."""
        if not sums.token_squares:
            return ""
        slope = sums.rising / sums.token_squares
        worth = f"; {slope:+.2g} a token among the answers to a prompt"
        if name in self._deviations:
            earned = slope * self._max_tokens / self._deviations[name]
            worth += f", {earned:+.2g} of stage 2's deviations in {self._max_tokens} tokens"
        return worth


def words_of(sums: Sums) -> str:
    """Return mean and population standard deviation as text."""
    deviation = math.sqrt(sums.squares / sums.count)
    return f"mean {sums.mean:.4g}, standard deviation {deviation:.3g} over {sums.count:,} answers"
