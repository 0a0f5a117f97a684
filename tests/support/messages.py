"""Compare a message with the parts of it that a user needs, whatever words stand between them."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.errors import InputError


class naming(str):
    """Equal to each text with a line that has these parts in this order, as whole words, numbers and paths.

    `naming("--steps ... got 0 ... 1 or more")` has three parts, as `naming("--steps", "got 0", "1 or more")` has. It
    is also the pattern of them, for `pytest.raises(match=...)`. Other lines are not looked at: a test that there is but
    one compares `text.splitlines()` with a list.
    """

    parts: list[str]

    def __new__(cls, *parts: str) -> "naming":
        split = [part.strip() for part in " ... ".join(parts).split(" ... ")]
        if not all(split):
            raise ValueError(f"{parts}: a part is empty")
        # Atomic groups take the first place of each part, so that no failure takes long.
        made = super().__new__(cls, "(?m)^" + "".join(f"(?>.*?{whole(part)})" for part in split))
        made.parts = split
        return made

    def __repr__(self) -> str:
        return f"naming({', '.join(map(repr, self.parts))})"

    def __eq__(self, text: object) -> bool:
        return isinstance(text, str) and re.search(self, text) is not None

    def __ne__(self, text: object) -> bool:
        return not self == text

    __hash__ = str.__hash__


def whole(part: str) -> str:
    """Return the pattern of a part: `--steps 1` is in none of `--steps 10`, `--steps 1.5`, `--steps 1,000`."""
    before = r"(?<![\w-])" if re.match(r"[\w-]", part) else ""
    before += r"(?<!\d[.,])" if re.match(r"\d", part) else ""
    behind = r"(?![\w-]|[.,]\d)" if re.search(r"\w$", part) else ""
    behind += r"(?!/\w|\.\w)" if "/" in part else ""
    return before + re.sub(r"[][.^$*+?{}|()\\]", r"\\\g<0>", part) + behind


def refusal(call: Callable[..., object], *args: object, error: type[Exception] = InputError, **named: Any) -> list[str]:
    """Return the lines of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*args, **named)
    return str(caught.value).splitlines()
