"""Flags whose values name files or folders: refused where such a name could not be used, or would mislead."""

import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PATH_FLAGS = frozenset(
    "path models reward_model prompts output resume deepspeed_config hostfile include exclude".split()
)
PATH_ENDINGS = ("_dir", "_path")
# Folders that are written, given as they are to mkdir.
WRITTEN = ("output_dir", "run_dir", "data_output_path")
# Control characters, and those that turn the direction of the text after them: a log line could read as another one.
STEERING = ("Cc", "Cs", "Cf")


def unsafe_paths(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """A line for each value of a path flag that no file can have, or that is not what it looks like."""
    for name, value in values.items():
        if name in PATH_FLAGS or name.endswith(PATH_ENDINGS):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and (problem := path_problem(name, text)):
                    yield f"--{name}: found {text[:80]!r} ({origins[name]}): {problem}"


def path_problem(name: str, text: str) -> str:
    """What is wrong with a path, or ""."""
    if any(unicodedata.category(character) in STEERING for character in text):
        return "a control character; name a file without it"
    try:
        path = Path(text).expanduser()
        is_file = path.exists() and not path.is_dir()
    except (OSError, RuntimeError) as error:
        return error.strerror or str(error) if isinstance(error, OSError) else str(error)
    if name not in WRITTEN:
        return ""
    if text.startswith("~"):
        return f"only a shell replaces the ~; give {path}"
    return "a file, wanted a folder" if is_file else ""
