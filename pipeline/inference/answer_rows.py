"""An answer with its scores, its row in a file of `rlhf sample`, and sums over the scores of many answers.

A row has all answers to a prompt, or the best one as a row of stage 1, or a pair as a row of stage 2. No torch is
imported.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.data.turns import Turns, is_transcript, parse_transcript, split_tools
from pipeline.rewards.pool import Failure, Value

RowLayout = Literal["answers", "sft", "pairs"]
NAMES = {"user": "Human", "assistant": "Assistant"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a prompt.

    text: without special tokens, and without white space around it.
    ids: its tokens, with the end token, or the token that completes a stop string, if there is one.
    finish_reason: "end" = ended by the model, "stop" by a stop string, "limit" = truncated at the number of new tokens.
    log_prob: sum of the log-probabilities of its tokens at the temperature, before top_p and top_k; for greedy answers
        at 1. None for an answer of transformers' `generate`.
    scores: name of a reward function or model -> its value, summed if per token; None = it failed or does not apply.
    reward: the weighted sum of the scores; None = a function failed, or none applies.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: Literal["end", "stop", "limit"]
    log_prob: float | None = field(default=None, compare=False)  # its last bits depend on the batch
    scores: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None

    @property
    def num_tokens(self) -> int:
        """The number of its tokens, the end token included."""
        return len(self.ids)

    @property
    def is_finite(self) -> bool:
        """True if the log-probabilities of its tokens are finite."""
        return self.log_prob is not None and math.isfinite(self.log_prob)

    @property
    def finished(self) -> bool:
        """True if the model or a stop string has ended it; False if it was truncated."""
        return self.finish_reason != "limit"

    def row(self) -> dict[str, Any]:
        """Return it as rows of `rlhf sample` have it."""
        names = ("text", "num_tokens", "log_prob", "finish_reason", "scores", "reward")
        return {name: getattr(self, name) for name in names}

    def scored(self, values: Mapping[str, Value], weights: Mapping[str, float]) -> "Answer":
        """Return it with its scores and its reward by the values of functions and models, by name."""
        scores = {name: float(sum(value)) if isinstance(value, list) else value for name, value in values.items()}
        numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
        is_known = bool(numbers) and not any(isinstance(value, Failure) for value in values.values())
        terms = [weight * numbers[name] for name, weight in weights.items() if name in numbers]
        by_name = {name: numbers.get(name) for name in scores}
        return replace(self, scores=by_name, reward=sum(terms) if is_known else None)


def prompt_columns(messages: Turns, *, is_conversation: bool) -> dict[str, Any]:
    """Return `prompt`, and `tools` if there are any: as text if the data has texts and it parses to the same turns.

    Args:
        is_conversation: the data has lists of messages.
    """
    tools, turns = split_tools(messages)
    text, spoken = turns[0]["content"], messages[bool(tools) :]
    is_text = not is_conversation
    if len(turns) > 1 or is_transcript(text):
        text = "".join(f"\n\n{NAMES.get(turn.role)}: {turn.content}" for turn in spoken) + "\n\nAssistant:"
        is_text = is_text and parse_transcript(text) == spoken
    return {"prompt": text if is_text else turns} | ({"tools": tools} if tools else {})


def row_of(layout: RowLayout, prompt: Mapping[str, Any], answers: Sequence[Answer]) -> dict[str, Any] | str:
    """Return the row of a prompt's answers, or the reason why there is none.

    A chosen answer must have ended by itself: a truncated one would teach models to end there.

    Args:
        prompt: columns of the row with the prompt.
    """
    if layout == "answers":
        return {**prompt, "answers": [answer.row() for answer in answers]}
    usable = [
        one for one in answers if one.text and "\0" not in one.text and (one.reward is not None or not one.scores)
    ]
    ended = [one for one in usable if one.finished]
    if not ended:
        return "no answer that ended has a text and a score" if usable else "no answer has a text and a score"
    best = max(ended, key=_reward)
    if layout == "sft":
        return {**prompt, "response": best.text}
    if len({_reward(one) for one in usable}) == 1:
        return "all scores are equal"
    worse = [one for one in usable if _reward(one) < _reward(best) and one.text != best.text]
    if not worse:
        return "no answer scores less than the best that ended"
    return {**prompt, "chosen": _side(best.text), "rejected": _side(min(worse, key=_reward).text)}


def _reward(answer: Answer) -> float:
    return answer.reward or 0.0


def _side(text: str) -> str | list[dict[str, str]]:
    """Return one side of a pair as its column stores it; text that looks like a transcript would be parsed as one."""
    return [{"role": "assistant", "content": text}] if is_transcript(text) else text


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

    def add(self, answers: Sequence[Answer]) -> None:
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
