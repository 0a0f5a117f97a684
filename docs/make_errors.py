"""Write docs/errors.md, errors by message, from docs/errors.yaml: `make reference`.

Its entries name a file and words that stand in one of its messages; `missing` tells which do not any more.
"""

import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rlhf.train import MEANING  # noqa: E402

INTRODUCTION = """# Errors by message

Made by `make reference` from `docs/errors.yaml`; edit that, not this page. Look for some words of the line that you
got: names, numbers and paths of your own stand where the dots are. An error is one line that begins with `error: `,
several if there are several, and the command ends with one of these codes. `--debug` shows the traceback of an expected
error too; each rank has a log of its own, `log/rank-<r>.txt` in the run's folder.

| code | meaning |
|---|---|
"""
CODES = {0: "done", **MEANING}
WARNINGS = 0  # the key of the lines that end no run
Messages = Mapping[int, Sequence[Mapping[str, str]]]


def read_messages() -> Messages:
    """Return the entries of docs/errors.yaml by exit code."""
    messages: Messages = yaml.safe_load((ROOT / "docs" / "errors.yaml").read_text(encoding="utf-8"))
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


def section(code: int, lines: Sequence[Mapping[str, str]]) -> str:
    """Return the section of an exit code, or of the warnings."""
    title = "Warnings, which end no run" if code == WARNINGS else f"Code {code}: {CODES[code].partition(';')[0]}"
    rows = [f"| `... {line['words'].strip(' :;,(')} ...` | {line['cause']} | {line['cure']} |" for line in lines]
    return "\n".join([f"## {title}\n", "| the line has | because | what to do |", "|---|---|---|", *rows])


def page() -> str:
    """Return the text of docs/errors.md."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in sorted(CODES.items()))
    parts = [section(code, lines) for code, lines in read_messages().items()]
    return "\n\n".join([INTRODUCTION + codes, *parts]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "errors.md").write_text(page(), encoding="utf-8")
