"""Rewards for right answers: by mathematics, by text, by a pattern."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from pipeline.errors import InputError
from pipeline.rewards.box.matching import last_match
from pipeline.rewards.box.texts import Messages, Scores, column_of, missing_package, reward_of_text, text_of

# The words before a final answer: the text after the last of them holds it.
FINAL = re.compile(r"####|\\boxed\s*\{|\banswer\b(?:\s*(?:is|=|:|\*+))+", re.IGNORECASE)
NUMBER = re.compile(r"(?:(?<![\w.)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+(?![\d.]))?")
MAX_DIGITS = 300
AFTER_BOX = re.compile(rf"\}}[ \t]*=[ \t]*({NUMBER.pattern})")
SENTENCE = re.compile(r"\n|[.!?](?=\s|$)|\}(?!\{)")  # ends of the part that holds a final answer
LATEX = re.compile(r"\$|\\boxed|\\\(|\\\[")


def math_answer(
    completions: Sequence[str | Messages],
    *,
    column: str = "answer",
    plain: bool = False,
    timeout_s: int = 5,
    **columns: Any,
) -> Scores:
    """Return 1 if math-verify finds the answer equal to the right one, else 0; None if it cannot parse the right one.

    It needs the extra `math`, and the main thread of its process, because math-verify's limits are alarms (SIGALRM).

    Args:
        column: holds the right answer alone, 42 or `\\frac{1}{3}`; or a text with it in `$...$` or `\\boxed{...}`, or
            behind `####` as in GSM8K.
        plain: also accept the last number of a text. Else an answer is in `\\boxed{...}`, or LaTeX behind "answer is".
        timeout_s: seconds for reading one text, and for one comparison.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise missing_package("math_answer", "math", error) from error
    latex = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    kinds = (latex, ExprExtractionConfig()) if plain else (latex,)

    def score(text: str, gold: Any) -> float | None:
        right = "" if gold is None else str(gold).rpartition("####")[2].strip()
        right = right if LATEX.search(right) else f"\\boxed{{{right}}}"
        parsed = parse(right, [LatexExtractionConfig()], parsing_timeout=timeout_s)
        if not parsed:
            return None
        answer = parse(text, kinds, extraction_mode="first_match", parsing_timeout=timeout_s)
        return float(verify(parsed, answer, timeout_seconds=timeout_s))

    golds = column_of("math_answer", columns, column, completions)
    return [score(text_of(text), gold) for text, gold in zip(completions, golds, strict=True)]


def right_number(completions: Sequence[str | Messages], *, column: str = "answer", **columns: Any) -> Scores:
    """Return 1 if the final number of the text is that of the right answer, as in GSM8K; None for a row without one.

    The final number stands behind the last `####`, `\\boxed{` or "answer is", and there behind the last "=", if there
    is one. That of a box with several numbers may stand behind the box, as in `\\boxed{9 - 2} = 7`. Without these words
    it is the last number of the text. 1,000 is 1000.0, $5 and 5% are 5, and 1/2 is 0.5.

    Args:
        column: holds the right answer, alone or as the final number of a text.
    """
    golds = [final_number(str(gold)) for gold in column_of("right_number", columns, column, completions)]
    texts = [text_of(text) for text in completions]
    return [None if gold is None else float(final_number(one) == gold) for one, gold in zip(texts, golds, strict=True)]


def final_number(text: str) -> Fraction | None:
    """Return the final number of a text, None without one; see `right_number`."""
    text = re.sub(r"\\d?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", re.sub(r"\{,\}|\\[,!$]|\*\*", "", text))
    *_, start = (0, *(match.end() for match in FINAL.finditer(text)))
    rest = text[start:].lstrip() if start else ""
    answer = SENTENCE.split(rest, maxsplit=1)[0]
    if numbers := NUMBER.findall(answer.rpartition("=")[2]):
        behind = AFTER_BOX.match(rest, len(answer)) if len(numbers) > 1 else None
        return value_of(behind[1] if behind else numbers[0])
    numbers = NUMBER.findall(text)
    return value_of(numbers[-1]) if numbers else None


def value_of(number: str) -> Fraction | None:
    """Return the value of a match of NUMBER; None for a division by zero and for more digits than answers have."""
    if len(number) > MAX_DIGITS:
        return None
    top, _, bottom = re.sub(r"[$,]", "", number).partition("/")
    return Fraction(top) / Fraction(bottom or 1) if Fraction(bottom or 1) else None


def exact_match(
    completions: Sequence[str | Messages],
    *,
    column: str = "answer",
    pattern: str = "",
    keep_case: bool = True,
    keep_space: bool = False,
    **columns: Any,
) -> Scores:
    """Return 1 if the text is the right one, else 0; None for a row without a right text.

    Args:
        column: holds the right text, or a list of right ones.
        pattern: only the last match of this regular expression is compared, of its first group where it has one.
        keep_case: False compares without upper and lower case.
        keep_space: False makes each run of white space one space, and drops it at both ends.
    """
    search = re.compile(pattern, re.DOTALL)

    def plain(text: Any) -> str:
        cased = str(text) if keep_case else str(text).casefold()
        return cased if keep_space else " ".join(cased.split())

    def score(text: str, gold: Any) -> float | None:
        if gold is None:
            return None
        answer = last_match(search, text) if pattern else text
        golds = gold if isinstance(gold, list) else [gold]
        return float(answer is not None and plain(answer) in [plain(right) for right in golds])

    golds = column_of("exact_match", columns, column, completions)
    return [score(text_of(text), gold) for text, gold in zip(completions, golds, strict=True)]


@reward_of_text
def regex_match(text: str, *, pattern: str = "") -> float:
    """Return 1 if the pattern occurs in the text, else 0.

    Args:
        pattern: a regular expression, found anywhere; `(?s)` at its start lets `.` match line ends.
    """
    if not pattern:
        raise InputError("reward function regex_match: needs a pattern")
    return float(re.search(pattern, text) is not None)
