"""Inputs of reward functions: texts and columns; and a decorator that makes one of a function of a single text."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import InputError

Messages = Sequence[Mapping[str, Any]]
Scores = list[float | None]


def text_of(completion: str | Messages) -> str:
    """Return the text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def column_of(function: str, columns: Mapping[str, Any], column: str, rows: Sequence[Any]) -> list[Any]:
    """Return the values of a column, None where a row has none; [] where there are no rows.

    Raises InputError where no row has it, which a run finds before it starts.
    """
    if rows and column not in columns:
        raise InputError(f"reward function {function}: no prompt has a column {column!r}")
    return list(columns.get(column, []))


def missing_package(function: str, extra: str, error: ImportError) -> InputError:
    """Return the error of a function whose package cannot be imported."""
    return InputError(f"reward function {function}: {error}; pip install '.[{extra}]' in the project's folder")


def reward_of_text(score: Callable[..., float | None]) -> Callable[..., Scores]:
    """Convert a score of one text to a reward function; the score's keyword arguments are its settings.

    Called with no rows, it scores an empty text, which checks the settings.
    """
    settings = list(inspect.signature(score).parameters.values())[1:]
    names = {setting.name for setting in settings}

    @functools.wraps(score)
    def reward(completions: Sequence[str | Messages], **others: Any) -> Scores:
        given = {name: others[name] for name in names & others.keys()}
        if not completions:
            score("", **given)
        scores = [score(text_of(completion), **given) for completion in completions]
        return [None if value is None else float(value) for value in scores]

    completions = inspect.Parameter("completions", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    reward.__signature__ = inspect.Signature([completions, *settings])  # type: ignore[attr-defined]
    return reward
