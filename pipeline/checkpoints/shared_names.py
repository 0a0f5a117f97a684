"""Names of data, models and licences for documents that are meant to be shared, without paths of this machine.

In Markdown they are code spans in cells of tables.
"""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, try_to_load_from_cache

from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.stage import StageConfig
from pipeline.console import fence
from pipeline.data.readers import data_suffix
from pipeline.data.sources import is_local
from pipeline.errors import printable
from pipeline.hub import commits_read, split_revision
from pipeline.redact import masked

# Flags whose values contain paths of this machine among other words, and the pattern of the folders in them.
FLAGS_WITH_FILES = ("reward_function", "more_reward_models", "tools", "environment")
FOLDERS = re.compile(r"(?<![\w.:/])(?:~|\.{0,2}/)[^\s:\"]*/")
# Names of files that mean nothing without the name of their folder.
GENERIC_NAME = re.compile(r"(train|test|valid|validation|eval|dev|data|dataset|rows|prompts|pairs)?[\d_.-]*")
WEIGHT = re.compile(r"[\d.]+")
HOMES = ("home", "Users")  # folders whose folders are named after people
MAX_FILES = 5  # number of files that are named of a folder with data
LICENCE_HEAD = 500  # characters of a LICENSE in which its title is looked for
LICENCES = {"Apache License": "apache-2.0", "MIT License": "mit"}
LICENCE_FIELDS = ("license", "license_name", "license_link")


def shareable(value: Any) -> Any:
    """Return a path, or a list of them, with local ones reduced to their last component."""
    if isinstance(value, list):
        return [shareable(item) for item in value]
    return Path(value).name if value and is_local(value) else value


def data_name(text: str) -> str:
    """Return a source with its weight; a local one by a meaningful name.

    A file with a generic name (train.jsonl) is named with its folder, a folder with its files.
    """
    name, colon, number = text.rpartition(":")
    name, weight = (name, f":{number}") if colon and WEIGHT.fullmatch(number) else (text, "")
    if not is_local(name):
        return text
    path = Path(name).expanduser()
    if data_suffix(path):
        says_nothing = GENERIC_NAME.fullmatch(path.name.partition(".")[0]) and not is_of_a_person(path.parent)
        return f"{path.parent.name}/{path.name}{weight}" if says_nothing and path.parent.name else path.name + weight
    is_plain = path.is_dir() and not any(path.glob("dataset_*.json"))  # no folder of `save_to_disk`
    files = sorted(file.name for file in path.iterdir() if data_suffix(file)) if is_plain else []
    shown = ", ".join([*files[:MAX_FILES], *["..."] * (len(files) > MAX_FILES)])
    return (path.name or path.resolve().name) + (f" ({shown})" if files else "") + weight


def is_of_a_person(folder: Path) -> bool:
    return folder == Path.home() or folder.parent.name in HOMES


def shareable_flags(config: StageConfig) -> dict[str, Any]:
    """Return the value of each flag as it may be shared, by the flag's name."""
    table, values = flag_table(type(config)), dict(flat_items(config))
    for name, value in values.items():
        if table[name].on_resume == "data":
            values[name] = [data_name(text) for text in value]
        elif table[name].kind.endswith("path"):
            values[name] = shareable(value)
        elif name in FLAGS_WITH_FILES:
            texts = [value] if isinstance(value, str) else value
            shared = [FOLDERS.sub("", masked(without_judge(text))) for text in texts]
            values[name] = shared[0] if isinstance(value, str) else shared
    return values


def without_judge(text: str) -> str:
    """Return an entry of --reward-function without the settings of an LLM judge: its address is not shared."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        entry = json.loads(text)
        if entry["name"].partition(":")[0] == "judge":
            return json.dumps({key: value for key, value in entry.items() if key != "args"})
    return text


def file_of(path: str, name: str) -> Path | None:
    """Return a file of a model's folder, or of a hub id where it is in the cache; None if it is missing."""
    repository, revision = split_revision(path)
    if is_local(path):
        local = Path(path).expanduser() / name
        return local if local.is_file() else None
    cached = try_to_load_from_cache(repository, name, revision=commits_read.get(path) or revision)
    return Path(cached) if isinstance(cached, str) else None


def card_of(path: str) -> dict[str, Any]:
    """Return the metadata of the card of a model, with the licence of its LICENSE if the card names none."""
    card, licence = file_of(path, "README.md"), file_of(path, "LICENSE")
    words = licence.read_text(encoding="utf-8", errors="replace")[:LICENCE_HEAD] if licence else ""
    titles = [name for title, name in LICENCES.items() if title in words]
    fields: dict[str, Any] = {"license": titles[0]} if titles else {}
    try:
        return fields | (ModelCard.load(card).data.to_dict() if card else {})
    except Exception:  # any YAML may stand in another program's card
        return fields


def licence_of(card: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a card's metadata for the licence; {} without them."""
    return {name: card[name] for name in LICENCE_FIELDS if isinstance(card.get(name), str)}


# --- Markdown --------------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Return `text` as a Markdown code span of one line; backticks in it do not end the span."""
    line, ticks = " ".join(printable(text).split()), fence(text, 1)
    pad = " " if line[:1] == "`" or line[-1:] == "`" else ""
    return f"{ticks}{pad}{line or ' '}{pad}{ticks}"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown of one line."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in lines)
