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
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not has_config(folder):
            raise InputError(f"{_at(flag)}{path} holds no model (no {CONFIG_FILES[0]}){nearest_folder(folder)}")
    elif folder.exists():
        raise InputError(f"{_at(flag)}{path} is a file, wanted a model's folder{nearest_folder(folder)}")
    elif not may_be_hub_id(path):
        raise InputError(f"{_at(flag)}{path}: no such folder{nearest_folder(folder)}")


def check_language_model(path: str, flag: str = "") -> None:
    """`check_model_path`, and refuse a folder whose config.json says that the model gives scores instead of text."""
    check_model_path(path, flag)
    architectures = read_config(Path(path).expanduser()).get("architectures") or []
    if any(str(name).endswith("ForSequenceClassification") for name in architectures):
        raise InputError(f"{_at(flag)}{path} is a reward model ({architectures[0]}): it gives scores, no text")


def _at(flag: str) -> str:
    return f"{flag}: " if flag else ""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; empty where there is none."""
    try:
        config = json.loads((folder / CONFIG_FILES[0]).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG_FILES[0]}: cannot be read as JSON: {error}") from None
    return config if isinstance(config, dict) else {}


def has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CONFIG_FILES)


def may_be_hub_id(path: str) -> bool:
    # Our own output folders are never hub ids, also before they exist.
    if not HUB_ID.fullmatch(path) or path.startswith("output/"):
        return False
    return "/" not in path or not Path(path).parent.is_dir()


def nearest_folder(path: Path) -> str:
    """`; did you mean FOLDER?` for the most similar model folder near `path`, else the nearest folder that exists."""
    base = next(folder for folder in (path, *path.parents) if folder.is_dir())
    patterns = ("/".join(["*"] * depth) for depth in range(1, SEARCH_DEPTH + 1))
    models = [str(folder) for pattern in patterns for folder in base.glob(pattern) if has_config(folder)]
    if close := difflib.get_close_matches(str(path), models, n=1, cutoff=0.5):
        return f"; did you mean {close[0]}?"
    return "" if base == path else f"; the nearest folder that exists is {base.resolve() if base == Path() else base}"
