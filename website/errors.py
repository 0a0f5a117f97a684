"""The pages of errors by message, from errors.yaml beside this file, and of exit codes.

Its entries name a file and words that stand in one of its messages; `missing` tells which do not any more.
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rlhf.train import MEANING
from website.tables import row

ROOT = Path(__file__).resolve().parent.parent

INTRODUCTION = """# Errors by message

Search for some words of the line that you got. Names, numbers and paths of your own stand where the dots and the
words in capitals are. An error is one line that begins with `error: `, and the command ends with an
[exit code](../reference/exit_codes.md). `--debug` adds the traceback, and each rank has a log:
`log/rank-<r>.txt` in the run's folder.
"""
EXIT_CODES = """# Exit codes

Every command ends with one of these, also a rank that is started by another launcher. [Errors by
message](../trouble/errors.md) lists the lines that go with them.

| code | meaning |
|---|---|
"""
AFTER_CODES = """
The first Ctrl-C or SIGTERM stops a training run between two steps, with 75 and a checkpoint. A second one, two
seconds or more later, kills it: 130 if it was Ctrl-C, 143 if it was SIGTERM. What was trained since the last checkpoint
is then lost.
"""
CODES = {0: "done", **MEANING}
WARNINGS = 0  # the key of the lines that end no run
Messages = Mapping[int, Sequence[Mapping[str, str]]]


def read_messages() -> Messages:
    """Return the entries of errors.yaml by exit code."""
    messages: Messages = yaml.safe_load(Path(__file__).with_name("errors.yaml").read_text(encoding="utf-8"))
    return messages


def texts_of(file: str) -> list[str]:
    """Return the constant texts of a Python file without its docstrings; the parts of an f-string each by itself."""
    nodes = list(ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [node.value for node in texts if isinstance(node.value, str)]


def missing(messages: Messages) -> list[str]:
    """Return `file: words` of each message that its file does not have any more."""
    entries = [entry for lines in messages.values() for entry in lines]
    return [
        f"{entry['file']}: {entry['words']}"
        for entry in entries
        if not any(entry["words"] in text for text in texts_of(entry["file"]))
    ]


def shown(line: Mapping[str, str]) -> str:
    """Return the part of a message that the page shows: its form if the entry has one, else its words."""
    return line["shown"] if "shown" in line else f"... {line['words'].strip(' :;,(')}"


def section(code: int, lines: Sequence[Mapping[str, str]]) -> str:
    """Return the section of an exit code, or of the warnings."""
    title = "Warnings, which end no run" if code == WARNINGS else f"Code {code}: {CODES[code].partition(';')[0]}"
    rows = [row(f"`{shown(line)} ...`", line["cause"], line["cure"]) for line in lines]
    return "\n".join([f"## {title}\n", "| the line has | because | what to do |", "|---|---|---|", *rows])


def page() -> str:
    """Return the text of trouble/errors.md."""
    sections = [section(code, lines) for code, lines in read_messages().items()]
    return "\n\n".join([INTRODUCTION.strip(), *sections]) + "\n"


def exit_codes() -> str:
    """Return the text of reference/exit_codes.md."""
    return EXIT_CODES + "".join(row(str(code), meaning) + "\n" for code, meaning in sorted(CODES.items())) + AFTER_CODES
