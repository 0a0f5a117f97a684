"""Rows of `rlhf sample`: all answers to a prompt, the best one as a row of stage 1, or a pair as a row of stage 2."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipeline.data.turns import Turns, is_transcript, parse_transcript, split_tools
from pipeline.rewards.pool import Failure, Value

RowLayout = Literal["answers", "sft", "pairs"]
NAMES = {"user": "Human", "assistant": "Assistant"}


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """An answer to a prompt.

    text: without special tokens, and without white space around it.
    num_tokens: tokens that were sampled, the end token included.
    log_prob: sum of their log-probabilities at the temperature, before top_p and top_k; for greedy answers at 1.
    finish_reason: "end" = ended by the model, "stop" by a stop string, "limit" = truncated at the number of new tokens.
    scores: name of a reward function or model -> its value, summed if per token; None = it failed or does not apply.
    reward: the weighted sum of the scores; None = a function failed, or none applies.
    """

    text: str
    num_tokens: int
    log_prob: float
    finish_reason: str
    scores: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None


def scores_of(
    values: Mapping[str, Value], weights: Mapping[str, float]
) -> tuple[dict[str, float | None], float | None]:
    """Return the scores of an answer by name, and its reward, as in `SampledAnswer`."""
    scores = {name: float(sum(value)) if isinstance(value, list) else value for name, value in values.items()}
    numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
    is_known = bool(numbers) and not any(isinstance(value, Failure) for value in values.values())
    reward = sum(weight * numbers[name] for name, weight in weights.items() if name in numbers) if is_known else None
    return {name: numbers.get(name) for name in scores}, reward


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


def row_of(layout: RowLayout, prompt: Mapping[str, Any], answers: Sequence[SampledAnswer]) -> dict[str, Any] | str:
    """Return the row of a prompt's answers, or the reason why there is none.

    A chosen answer must have ended by itself: a truncated one would teach models to end there.

    Args:
        prompt: columns of the row with the prompt.
    """
    if layout == "answers":
        return {**prompt, "answers": [asdict(answer) for answer in answers]}
    usable = [
        one for one in answers if one.text and "\0" not in one.text and (one.reward is not None or not one.scores)
    ]
    ended = [one for one in usable if one.finish_reason != "limit"]
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


def _reward(answer: SampledAnswer) -> float:
    return answer.reward or 0.0


def _side(text: str) -> str | list[dict[str, str]]:
    """Return one side of a pair as its column stores it; text that looks like a transcript would be parsed as one."""
    return [{"role": "assistant", "content": text}] if is_transcript(text) else text
