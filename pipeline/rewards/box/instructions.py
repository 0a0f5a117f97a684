"""Rewards for instructions that a program can check, in the style of Zhou et al. 2023 (IFEval), arXiv 2311.07911."""

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from pipeline.errors import InputError, nearest
from pipeline.rewards.box.texts import Messages, Scores, column_of, text_of

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*|\n+")
FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL | re.IGNORECASE)


def number_of_words(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Return 1 if the number of words, separated by white space, is within the limits."""
    return _within(len(text.split()), at_least, at_most)


def number_of_sentences(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Return 1 if the number of sentences is within the limits: each ends a line, or with `.`, `!`, `?` and a space."""
    return _within(len([part for part in SENTENCE_END.split(text) if re.search(r"\w", part)]), at_least, at_most)


def number_of_paragraphs(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Return 1 if the number of paragraphs, separated by blank lines, is within the limits."""
    return _within(len([part for part in re.split(r"\n\s*\n", text) if part.strip()]), at_least, at_most)


def number_of_bullets(text: str, *, at_least: int = 0, at_most: int | None = None) -> bool:
    """Return 1 if the number of lines that begin with `* ` or `- ` is within the limits."""
    return _within(len(re.findall(r"^\s*[*-]\s+\S", text, re.MULTILINE)), at_least, at_most)


def all_capitals(text: str) -> bool:
    """Return 1 for a text with letters that are all capitals."""
    return text.isupper()


def all_lower_case(text: str) -> bool:
    """Return 1 for a text with letters that are all lower case."""
    return text.islower()


def title(text: str) -> bool:
    """Return 1 for a text with a title in `<<...>>` on one line."""
    return any(match.strip() for match in re.findall(r"<<([^<>\n]+)>>", text))


def json_output(text: str) -> bool:
    """Return 1 for a text that is JSON and nothing else, alone or in a block of three backticks."""
    fenced = FENCE.fullmatch(text.strip())
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def keywords(text: str, *, words: Sequence[str] = ()) -> bool:
    """Return 1 for a text that has all these words, in upper or lower case."""
    return all(_count(text, word) for word in words)


def forbidden_words(text: str, *, words: Sequence[str] = ()) -> bool:
    """Return 1 for a text that has none of these words, in upper or lower case."""
    return not any(_count(text, word) for word in words)


def keyword_frequency(text: str, *, word: str = "", at_least: int = 0, at_most: int | None = None) -> bool:
    """Return 1 if the number of times a word occurs, in upper or lower case, is within the limits."""
    return _within(_count(text, word), at_least, at_most)


def end_phrase(text: str, *, phrase: str = "") -> bool:
    """Return 1 for a text that ends with this phrase, in upper or lower case; spaces and quotation marks may follow."""
    return text.rstrip().rstrip("\"'”’").casefold().endswith(phrase.strip().casefold())


def _within(number: int, at_least: int, at_most: int | None) -> bool:
    return at_least <= number and (at_most is None or number <= at_most)


def _count(text: str, word: str) -> int:
    """Count a word or phrase in a text, not inside another word."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


CHECKS = {
    check.__name__: check
    for check in (
        number_of_words, number_of_sentences, number_of_paragraphs, number_of_bullets, all_capitals, all_lower_case,
        title, json_output, keywords, forbidden_words, keyword_frequency, end_phrase,
    )
}  # fmt: skip


def instructions(
    completions: Sequence[str | Messages], *, column: str = "instructions", strict: bool = False, **columns: Any
) -> Scores:
    """Return the share of a row's instructions that its completion follows; None for a row without instructions.

    Args:
        column: holds a list as `[{"name": "number_of_words", "at_most": 50}, {"name": "title"}]`: names of this
            module's checks, each with its settings.
        strict: return 1 if the completion follows all, else 0.
    """

    def score(text: str, row_instructions: Any) -> float | None:
        if not row_instructions:
            return None
        followed = [_is_followed(text, instruction) for instruction in row_instructions]
        return float(all(followed)) if strict else sum(followed) / len(followed)

    lists = column_of("instructions", columns, column, completions)
    return [score(text_of(text), row_instructions) for text, row_instructions in zip(completions, lists, strict=True)]


def _is_followed(text: str, instruction: Any) -> bool:
    """Return True if a text follows one instruction of a row."""
    wrong = f"reward function instructions: {json.dumps(instruction)}"
    if not isinstance(instruction, dict) or (name := instruction.get("name")) not in CHECKS:
        near = nearest(str(instruction.get("name")), CHECKS) if isinstance(instruction, dict) else ""
        raise InputError(f'{wrong}: not {{"name": ...}} of {", ".join(CHECKS)}{near}')
    # A reader of Parquet gives the objects of a list the same fields, null where they have none.
    settings = {setting: value for setting, value in instruction.items() if setting != "name" and value is not None}
    check: Any = CHECKS[name]
    try:
        return bool(check(text, **settings))
    except TypeError as error:
        raise InputError(f"{wrong}: {error}; its settings: {inspect.signature(check)}") from error
