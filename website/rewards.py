"""The page of the built-in reward functions, from their signatures and docstrings."""

import inspect
from collections.abc import Callable
from typing import Any

from pipeline.rewards.box.table import BOX, settings_of
from website.tables import escaped, row

INTRODUCTION = """# Built-in reward functions

`--ppo.reward-function NAME` uses one; the scores of several are summed, each with an optional weight (`NAME:0.5`). They
have the signature of TRL's reward functions. [Your own function](../guides/own_reward.md) shows how to give settings.
`rlhf reward` tries a function on rows of your data before a run. Some need an extra, which the error names:
`pip install '.[math]'`.

| function | returns | settings and defaults |
|---|---|---|
"""


def function_row(name: str, function: Callable[..., Any]) -> str:
    """Return the row of a function."""
    meaning = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    settings = ", ".join(f"`{setting}` ({default!r})" for setting, default in settings_of(function).items())
    return row(f"`{name}`", escaped(meaning), settings)


def page() -> str:
    """Return the text of reference/rewards.md."""
    return INTRODUCTION + "\n".join(function_row(name, function) for name, function in BOX.items()) + "\n"
