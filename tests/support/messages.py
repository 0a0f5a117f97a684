"""Compare a message with the parts of it that a user needs, whatever words stand between them."""

import re


class naming(str):
    """Equal to each text that has these parts in this order on one line, as whole words.

    `naming("--steps ... got 0 ... 1 or more")` has three parts, as `naming("--steps", "got 0", "1 or more")` has. It
    is also the pattern of them, for `pytest.raises(match=...)`.
    """

    parts: list[str]

    def __new__(cls, *parts: str) -> "naming":
        split = [part.strip() for part in " ... ".join(parts).split(" ... ")]
        # Atomic groups take the first place of each part, so that no failure takes long.
        made = super().__new__(cls, "(?m)^" + "".join(f"(?>.*?{whole(part)})" for part in split))
        made.parts = split
        return made

    def __repr__(self) -> str:
        return f"naming({', '.join(map(repr, self.parts))})"

    def __eq__(self, text: object) -> bool:
        return isinstance(text, str) and re.search(self, text) is not None

    __hash__ = str.__hash__


def whole(part: str) -> str:
    """Return the pattern of a part: `--steps 1` is neither in `--steps 10` nor in `--steps 1.5`."""
    before = r"(?<![\w-])" if re.match(r"[\w-]", part) else ""
    behind = r"(?![\w-]|\.\d)" if re.search(r"\w$", part) else ""
    return before + re.sub(r"[][.^$*+?{}|()\\]", r"\\\g<0>", part) + behind
