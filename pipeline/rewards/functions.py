"""Functions as a user names them: FILE.py:NAME, and for `--reward-function` NAME[:WEIGHT] also of a built-in one."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, nearest
from pipeline.files import digest, readable
from pipeline.redact import masked
from pipeline.rewards.calls import functions_of_box
from pipeline.rewards.modules import modules_beside

FLAG = "--reward-function"
KEYS = ("name", "weight", "args")  # of an entry in a YAML file


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """An entry of --reward-function, or the function of another flag: FILE.py:NAME without weight and args.

    name: the function's name, by which metrics and messages call it.
    target: `FILE.py:NAME` with the absolute path of a user's file, or the NAME of a built-in function.
    weight: finite factor of its scores in the sum.
    args: keyword arguments that each call gets, as JSON has them.
    digest: SHA-256 of the user's file as hex; empty for a built-in function, which the project's version identifies.
    modules: see `modules_beside`; {} for a built-in function.
    """

    name: str
    target: str
    weight: float = 1.0
    args: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    scale = None  # its values are summed as they are


def parse_reward_functions(entries: Sequence[str | Mapping[str, Any]]) -> list[RewardFunction]:
    """Return the functions that the entries name, in order; no user's file is imported.

    An entry is a text, or from a YAML file a mapping of KEYS, whose name is such a text, also as the text of its JSON.

    Raises:
        InputError: an entry that names no function, or two of one name.
    """
    functions = dict[str, RewardFunction]()
    for entry in entries:
        function = _of_text(entry) if isinstance(entry := _of_json(entry), str) else _of_mapping(entry)
        if first := functions.get(function.name):
            problem = f"{first.target} and {function.target} have one name, by which metrics are told apart"
            raise InputError(f"{FLAG}: {problem}; rename one of the two functions")
        functions[function.name] = function
    return list(functions.values())


def _of_json(entry: Any) -> Any:
    """Return what JSON has for the text of a mapping, as flags hold one of a YAML file; else the entry."""
    with suppress(ValueError):
        return json.loads(entry) if isinstance(entry, str) and entry.startswith("{") else entry
    return entry


def _of_mapping(entry: Mapping[str, Any]) -> RewardFunction:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise InputError(f"{FLAG}: got {masked(entry)!r}; FILE.py:NAME is right, or a mapping with {', '.join(KEYS)}")
    if unknown := [key for key in entry if key not in KEYS]:
        right = nearest(str(unknown[0]), KEYS) or f"; {', '.join(KEYS)} are right"
        raise InputError(f"{FLAG} {entry['name']}: unknown key {unknown[0]!r}{right}")
    args, text = entry.get("args", {}), entry["name"]
    function = _of_text(text)
    try:
        is_json = isinstance(args, Mapping) and json.loads(json.dumps(args, allow_nan=False)) == args
    except (TypeError, ValueError, RecursionError):
        is_json = False
    if not is_json:
        raise InputError(
            f"{FLAG} {text}: args: got {masked(args)!r}; a mapping of names to what JSON can hold is right"
        )
    if "weight" in entry and text.count(":") > _target(text).count(":"):
        raise InputError(f"{FLAG} {text}: weight: {entry['weight']!r} is given beside that in the name; give it once")
    weight = _weight(entry.get("weight", 1.0), text) if "weight" in entry else function.weight
    return replace(function, weight=weight, args=args)


def _target(text: str) -> str:
    """Return an entry's text without its weight."""
    file, dot_py, rest = text.rpartition(".py:")
    return f"{file}{dot_py}{rest.partition(':')[0]}"


def _of_text(text: str) -> RewardFunction:
    target = _target(text)
    is_of_box = not target.endswith(".py") and not {":", "/"} & {*target}
    if is_of_box and target not in (box := functions_of_box()):
        right = nearest(target, box) or f"; the built-in ones are {', '.join(sorted(box))}"
        raise InputError(f"{FLAG} {text}: no such built-in function{right}, or FILE.py:NAME for one of your own")
    function = RewardFunction(target, target) if is_of_box else function_of_file(target, FLAG)
    return replace(function, weight=_weight(text[len(target) + 1 :], text)) if len(text) > len(target) else function


def function_of_file(text: str, flag: str, others: Sequence[str] = ()) -> RewardFunction:
    """Return the function that the value FILE.py:NAME of a flag names; its file is read, not imported.

    Args:
        others: values of the flag that are right too, for messages.

    Raises:
        InputError: a text that names no function, or a file that cannot be read.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        right = " or ".join([*others, "FILE.py:NAME"])
        raise InputError(f"{flag} {text}: names no function of a file; {right} is right, as in rewards.py:length")
    path = Path(file).expanduser()
    target = f"{path.resolve()}:{name}"
    try:
        return RewardFunction(name, target, digest=digest(readable(path)), modules=modules_beside(path.resolve()))
    except OSError as error:
        near = nearest(path.name, (other.name for other in path.parent.glob("*.py"))) if not path.exists() else ""
        raise InputError(f"{flag} {text}: {path} cannot be read ({error.strerror}){near}") from None


def folder_and_weight(entry: str, flag: str) -> tuple[str, float]:
    """Return the folder or hub id of an entry FOLDER[:WEIGHT] of a flag that names reward models, and its weight.

    Raises ValueError for a weight that is no finite number.
    """
    folder, _, text = entry.rpartition(":")
    if not folder or "/" in text:
        return entry, 1.0
    if not math.isfinite(weight := _number(text)):
        raise ValueError(f"{flag}: {entry}: got the weight {text!r}, expected a finite number as in 0.5")
    return folder, weight


def _weight(value: Any, text: str) -> float:
    if not math.isfinite(weight := _number(value)):
        raise InputError(f"{FLAG} {text}: got the weight {value!r}, expected a finite number as in 0.5")
    return weight


def _number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan
