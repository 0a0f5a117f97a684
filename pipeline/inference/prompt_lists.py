"""Read the prompts of `rlhf compare`: the bundled ones by language, or the user's own file."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeline.console import valid_unicode
from pipeline.data.readers import data_suffix, read_file
from pipeline.data.turns import BadRowError, Message, Turns, check_turns, is_transcript, parse_transcript, parse_turns
from pipeline.errors import InputError, nearest

SUFFIXES = (".txt", ".json", ".jsonl")


def bundled_prompts(language: str) -> list[Turns]:
    """Return the bundled prompts of a language, which this project has written: 108 English, 32 of each other."""
    bundled = files("pipeline.inference") / "prompts.json"
    return [(Message("user", text),) for text in json.loads(bundled.read_text(encoding="utf-8"))[language]]


def read_prompts(path: str) -> list[Turns]:
    """Read prompts from a .txt file, one per line, or from the `prompt` column of a .json or .jsonl file.

    A prompt is a text, a Human/Assistant transcript or a list of messages. Raises InputError with file and row.
    """
    file = Path(path).expanduser()
    suffix = file.suffix.lower() if file.suffix.lower() == ".txt" else data_suffix(file)
    if not file.is_file():
        raise InputError(f"--prompts: {path}: no such file")
    if suffix not in SUFFIXES:
        raise InputError(f"--prompts: {path}: {', '.join(SUFFIXES)} are right")
    values = text_lines(file) if suffix == ".txt" else prompt_column(file)
    prompts = [prompt_turns(value, f"{path}:{number}") for number, value in values]
    if not prompts:
        raise InputError(f"--prompts: {path}: no prompt in it")
    return prompts


def other_columns(path: str) -> list[dict[str, Any]]:
    """Return the columns beside `prompt` of each row of a .json or .jsonl file; [] for other files and for ""."""
    if not path or path.lower().endswith(".txt"):
        return []
    rows = read_file(Path(path).expanduser())
    return [{name: value for name, value in values.items() if name != "prompt"} for _, values in rows]


def text_lines(file: Path) -> list[tuple[int, object]]:
    """Return (line number, line) for the lines that are not empty."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut at U+2028 and others, too
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts: {file}: cannot be read as UTF-8 text: {error}") from None
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def prompt_column(file: Path) -> list[tuple[int, object]]:
    """Return (row number, prompt) for the rows of a file."""
    rows = []
    for number, values in read_file(file):
        if "prompt" not in values:
            hint = nearest("prompt", values)
            raise InputError(f"{file}:{number}: no `prompt` among the columns {', '.join(values) or '(none)'}{hint}")
        rows.append((number, values["prompt"]))
    return rows


def prompt_turns(value: object, where: str) -> Turns:
    """Parse a prompt into turns that end with a user turn."""
    try:
        if not isinstance(value, str):
            turns = parse_turns(value, "prompt")
        else:
            turns = parse_transcript(value) if is_transcript(value) else (Message("user", value.strip()),)
        check_turns(turns)
    except BadRowError as error:
        raise InputError(f"{where}: {error}") from None
    if turns[-1].role != "user":
        raise InputError(f"{where}: the prompt ends with an answer, not with a question")
    if any("\0" in turn.content for turn in turns):
        raise InputError(f"{where}: text holds a NUL character")
    return tuple(Message(turn.role, valid_unicode(turn.content)) for turn in turns)


def shown_prompt(turns: Turns) -> str:
    """Render a prompt for people: only the text of a single question, else every turn with its role."""
    return turns[0].content if len(turns) == 1 else "\n".join(f"{turn.role}: {turn.content}" for turn in turns)
