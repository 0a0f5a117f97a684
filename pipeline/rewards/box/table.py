"""The built-in reward functions by their names, and a check of one with its settings before a run starts."""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.errors import InputError, nearest
from pipeline.redact import masked
from pipeline.rewards.box.answers import exact_match, math_answer, regex_match, right_number
from pipeline.rewards.box.form import format_match, language, length, overlong, repetition, tags
from pipeline.rewards.box.instructions import CHECKS, instructions
from pipeline.rewards.box.judge import judge
from pipeline.rewards.box.reasoning import reasoning_gym
from pipeline.rewards.box.texts import reward_of_text

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    right_number, math_answer, exact_match, regex_match, reasoning_gym,
    format_match, tags, length, overlong, repetition, language,
    judge, instructions, *map(reward_of_text, CHECKS.values()),
)  # fmt: skip
BOX: dict[str, Callable[..., Any]] = {function.__name__: function for function in FUNCTIONS}


def settings_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a built-in function with their defaults: its parameters that have names alone."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Call a built-in function without responses.

    Raises:
        InputError: a setting that it refuses, or a package that it needs.
        EnvironmentFault: a judge whose key is not in the environment.
    """
    defaults = settings_of(BOX[name])
    for setting in settings:
        if setting not in defaults:
            right = f"it has {', '.join(defaults)}" if defaults else "it has no settings"
            raise InputError(f"reward function {name}: no setting {setting!r}{nearest(setting, defaults)}; {right}")
    try:
        scores = BOX[name](prompts=[], completions=[], completion_ids=[], **settings)
        if inspect.iscoroutine(scores):
            asyncio.run(scores)
    except (TypeError, ValueError, re.error) as error:
        raise InputError(f"reward function {name}: {masked(dict(settings))}: {error}") from error
