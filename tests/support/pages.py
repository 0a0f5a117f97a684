"""The fenced blocks of pages, and the commands in them."""

import re
import shlex
from collections.abc import Iterator


def blocks(text: str, language: str) -> Iterator[tuple[str, str]]:
    """(title, content) of the fenced blocks of a language; the title stands behind the language's name."""
    for info, content in re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        name, _, title = info.strip().partition(" ")
        if name == language:
            yield title, content


def commands_in(content: str) -> Iterator[list[str]]:
    """The commands of a `bash` block as words, without comments; each side of a pipe is one."""
    for line in content.replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("<this repository>", "URL"), comments=True)
        start = 0
        for end in [index for index, word in enumerate(words) if word == "|"] + [len(words)]:
            if words[start:end]:
                yield words[start:end]
            start = end + 1
