"""Compare a message with the parts of it that a user needs, whatever words stand between them."""

import re


class naming(str):
    """Equal to each text that has these parts in this order on one line, as whole words.

    `naming("--steps ... got 0 ... 1 or more")` has three parts, as `naming("--steps", "got 0", "1 or more")` has. It
    is also the pattern of them, for `pytest.raises(match=...)`.
    """

    def __new__(cls, *parts: str) -> "naming":
        escaped = [re.sub(r"[][.^$*+?{}|()\\]", r"\\\g<0>", part) for part in " ... ".join(parts).split(" ... ")]
        return super().__new__(cls, ".*?".join(rf"(?<![\w-]){part}(?![\w-]|\.\d)" for part in escaped))

    def __eq__(self, text: object) -> bool:
        return isinstance(text, str) and re.search(self, text) is not None

    __hash__ = str.__hash__
