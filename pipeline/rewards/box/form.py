"""Rewards for the form of a completion: its layout, tags, length, repetitions and language."""

import functools
import re
from collections.abc import Sequence
from typing import Any, Literal

from pipeline.errors import InputError, nearest
from pipeline.rewards.box.texts import Messages, Scores, missing_package, reward_of_text, text_of

Unit = Literal["tokens", "words"]
THINK_THEN_ANSWER = (
    r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)*</answer>\s*"
)


@reward_of_text
def format_match(text: str, *, pattern: str = THINK_THEN_ANSWER) -> float:
    """Return 1 if the pattern matches the whole text, else 0.

    Args:
        pattern: a regular expression whose `.` matches line ends too. The default one is
            `<think>...</think><answer>...</answer>`, each tag once, with white space around both.
    """
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)


@reward_of_text
def tags(text: str, *, names: Sequence[str] = ("think", "answer")) -> float:
    """Return the share of right tags: those that occur exactly once, after the right tags that precede them.

    Args:
        names: each has two tags, `<name>` and `</name>`, in this order.
    """
    end, right, expected = 0, 0, [tag for name in names for tag in (f"<{name}>", f"</{name}>")]
    for tag in expected:
        if text.count(tag) == 1 and (start := text.index(tag)) >= end:
            end, right = start + len(tag), right + 1
    return right / len(expected)


def units(
    completions: Sequence[str | Messages], completion_ids: Sequence[Sequence[int]], unit: Unit
) -> list[Sequence[Any]]:
    """Return the tokens of each completion, or its words, which white space parts."""
    if unit not in ("tokens", "words"):
        raise InputError(f"reward function: unit {unit!r} is neither tokens nor words")
    return list(completion_ids) if unit == "tokens" else [text_of(completion).split() for completion in completions]


def length(
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    *,
    low: int = 0,
    high: int = 256,
    margin: int = 100,
    unit: Unit = "tokens",
    **columns: Any,
) -> Scores:
    """Return 1 for a length from `low` to `high`; outside it falls linearly, to 0 at a distance of `margin`.

    Args:
        low: least length.
        high: greatest length, above 0; the default is that of --max-answer-seq-len.
        margin: above 0.
        unit: tokens (the token that ends a response is one) or words, which white space parts.
    """
    if margin <= 0 or not 0 <= low <= high or not high:
        raise InputError(f"reward function length: needs 0 <= low <= high, margin > 0; has {low}, {high}, {margin}")
    lengths = map(len, units(completions, completion_ids, unit))
    return [max(0.0, 1 - max(low - number, number - high, 0) / margin) for number in lengths]


def overlong(
    completion_ids: Sequence[Sequence[int]], *, max_length: int = 0, margin: int = 0, **columns: Any
) -> Scores:
    """Return 0 up to `max_length - margin` tokens, then a linear fall to -1 at `max_length`, and -1 above.

    Equation 13 of Yu et al. 2025 (DAPO), arXiv 2503.14476. Tokens include the one that ends a response.

    Args:
        max_length: L_max of the paper (there 20480), in tokens, up to the length at which sampling stops; needed.
        margin: L_cache of the paper (there 4096), in tokens; 0: -1 above `max_length` alone.
    """
    if not 0 <= margin <= max_length or not max_length:
        raise InputError(
            f"reward function overlong: needs max_length, and a margin up to it; has {max_length}, {margin}"
        )
    over = [len(ids) - (max_length - margin) for ids in completion_ids]
    return [0.0 if number <= 0 else -1.0 if number >= margin else -number / margin for number in over]


def repetition(
    completions: Sequence[str | Messages],
    completion_ids: Sequence[Sequence[int]],
    *,
    size: int = 3,
    unit: Unit = "tokens",
    **columns: Any,
) -> Scores:
    """Return minus the share of n-grams that repeat an earlier one: 0 without repetitions, near -1 for one word only.

    Args:
        size: tokens or words of an n-gram; a shorter completion has 0.
        unit: tokens or words, which white space parts.
    """
    if size < 1:
        raise InputError(f"reward function repetition: size {size}: at least 1")

    def score(parts: Sequence[Any]) -> float:
        grams = [tuple(parts[start : start + size]) for start in range(len(parts) - size + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return [score(parts) for parts in units(completions, completion_ids, unit)]


@reward_of_text
def language(text: str, *, code: str = "en", among: Sequence[str] = ()) -> float | None:
    """Return 1 if py3langid finds the language the most likely one, else 0; None for a text without letters.

    It needs the extra `language`, which knows 139 languages offline.

    Args:
        code: the language's code in ISO 639, `en`.
        among: codes of the languages that can occur, with `code`; () for all. Fewer are told apart more surely: of
            1000 Chinese answers, py3langid 0.4 found 49 to be Wu or Cantonese.
    """
    identifier = language_identifier(tuple(among))
    if code not in (codes := identifier.nb_classes):
        raise InputError(f"reward function language: code {code!r} is none of {', '.join(codes)}{nearest(code, codes)}")
    return float(identifier.classify(text)[0] == code) if any(map(str.isalpha, text)) else None


@functools.cache
def language_identifier(among: tuple[str, ...]) -> Any:
    """Return py3langid's identifier of these languages, () for all."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise missing_package("language", "language", error) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    if among:
        identifier.set_languages(among)
    return identifier
