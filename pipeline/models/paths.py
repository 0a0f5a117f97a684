"""Is there a model where the user says there is one? Answered from file names and config.json, without torch."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from pipeline.errors import InputError

CONFIG_FILES = ("config.json", "adapter_config.json")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SEARCH_DEPTH = 2  # folders below the nearest existing one in which models are looked for


def check_model_path(path: str, flag: str = "") -> None:
    """Raise InputError unless `path` is a model folder or may be a hub id. `flag` is named in the message.

    `output/actr` looks like a hub id too; where its parent folder exists here, it is taken for a mistyped folder.
    """
    if not path:
        raise InputError(f"{flag or '--model_name_or_path'}: no model is named; give a hub id or a model's folder")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not has_config(folder):
            raise InputError(f"{at_flag(flag)}{path} holds no model (no {CONFIG_FILES[0]}){nearest_folder(folder)}")
    elif folder.exists():
        raise InputError(f"{at_flag(flag)}{path} is a file, wanted a model's folder{nearest_folder(folder)}")
    elif not may_be_hub_id(path):
        raise InputError(f"{at_flag(flag)}{path}: no such folder{nearest_folder(folder)}")


def check_language_model(path: str, flag: str = "") -> None:
    """`check_model_path`, and refuse a folder whose config.json says that the model gives scores instead of text."""
    check_model_path(path, flag)
    architectures = read_config(Path(path).expanduser()).get("architectures") or []
    if any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise InputError(f"{at_flag(flag)}{path} is a reward model ({architectures[0]}): it gives scores, no text")


def check_reward_model(path: str, flag: str = "") -> None:
    """`check_model_path`, and refuse a folder whose config.json names no model with a reward head."""
    check_model_path(path, flag)
    folder = Path(path).expanduser()
    architectures = read_config(folder).get("architectures") or []
    if folder.is_dir() and not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise InputError(f"{at_flag(flag)}{path}: {architectures} has no reward head; give the output of step 2")


def at_flag(flag: str) -> str:
    """The beginning of a message about the value of `flag`."""
    return f"{flag}: " if flag else ""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; empty where there is none."""
    return _read_object(folder / CONFIG_FILES[0]) or {}


def read_adapter_config(folder: Path) -> dict[str, Any] | None:
    """adapter_config.json of a folder with an adapter, None for any other. Raises InputError if it names no base."""
    file = folder / CONFIG_FILES[1]
    config = _read_object(file)
    if config is not None and not isinstance(config.get("base_model_name_or_path"), str):
        raise InputError(f"{file}: base_model_name_or_path is missing; it names the model that the adapter belongs to")
    return config


def _read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no such file."""
    try:
        if not file.is_file():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: found a JSON {type(content).__name__}, wanted an object")
    return content


def has_config(folder: Path) -> bool:
    """Whether this is a model's folder; False where it may not be looked into."""
    try:
        return any((folder / name).is_file() for name in CONFIG_FILES)
    except OSError:
        return False


def safe_glob(folder: Path, pattern: str) -> list[Path]:
    """What matches below a folder; [] where it may not be looked into."""
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def may_be_hub_id(path: str) -> bool:
    # Our own output folders are never hub ids, also before they exist.
    if not HUB_ID.fullmatch(path) or path.startswith("output/"):
        return False
    return "/" not in path or not Path(path).parent.is_dir()


def nearest_folder(path: Path) -> str:
    """`; did you mean FOLDER?` for the most similar model folder near `path`, else the nearest folder that exists."""
    base = next(folder for folder in (path, *path.parents) if folder.is_dir())
    patterns = ("/".join(["*"] * depth) for depth in range(1, SEARCH_DEPTH + 1))
    models = [str(folder) for pattern in patterns for folder in safe_glob(base, pattern) if has_config(folder)]
    if close := difflib.get_close_matches(str(path), models, n=1, cutoff=0.5):
        return f"; did you mean {close[0]}?"
    return "" if base == path else f"; the nearest folder that exists is {base.resolve() if base == Path() else base}"
