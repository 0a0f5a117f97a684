"""Check paths of models and name the nearest folder for a mistyped one, from file names and config.json only.

The module imports no torch, for programs that must start quickly. Headers of weights are read in `weight_files.py`.
"""

import contextlib
import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault, InputError, RunError
from pipeline.files import CONFIG_FILES, OURS, RUN_LOCK, has_config, read_object
from pipeline.hub import HUB_ID, is_reachable, split_revision
from pipeline.model_types import MAX_LORA_ALPHA, MAX_LORA_RANK

SEARCH_DEPTH = 2  # levels of folders below the nearest existing one that are searched for models
MOST = 1e12  # of the constants of scores: what it divides or shifts can still be squared in fp32
MAX_REASON = 300  # characters of a library's error that are quoted


def check_model_path(path: str, flag: str = "") -> None:
    """Raise InputError unless `path` is a model folder or may be a hub id. `flag` is named in the message.

    `output/actr` also looks like a hub id; if its parent folder exists here, it is treated as a mistyped folder.
    """
    if not path:
        raise InputError(f"{flag or '--model-name-or-path'}: no model is named; give a hub id or a model's folder")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / RUN_LOCK).is_file():
            raise InputError(f"{at_flag(flag)}{path} is the folder of a run, expected a model's{model_of_run(folder)}")
        if not has_config(folder):
            raise InputError(f"{at_flag(flag)}{path} holds no model (no {CONFIG_FILES[0]}){nearest_folder(folder)}")
    elif folder.exists():
        raise InputError(f"{at_flag(flag)}{path} is a file, expected a model's folder{nearest_folder(folder)}")
    elif not may_be_hub_id(path):
        raise InputError(f"{at_flag(flag)}{path}: no such folder{nearest_folder(folder)}")


def check_language_model(path: str, flag: str = "") -> None:
    """Check as `check_model_path`, and refuse a folder whose config.json names a reward model."""
    check_model_path(path, flag)
    architectures = read_config(Path(path).expanduser()).get("architectures") or []
    if gives_scores(architectures):
        raise InputError(f"{at_flag(flag)}{path} is a reward model ({architectures[0]}): it gives scores, no text")


def check_reward_model(path: str, flag: str = "") -> None:
    """Check as `check_model_path`, and refuse a folder of pickles, or whose config.json names no reward head."""
    check_model_path(path, flag)
    folder = Path(path).expanduser()
    if folder.is_dir():
        check_reward_config(read_config(folder), f"{at_flag(flag)}{path}")
        if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
            raise InputError(f"{at_flag(flag)}{path} holds no safetensors; a pickle (.bin) is not read here")


def gives_scores(architectures: Iterable[object]) -> bool:
    """Return True if the architectures of a config.json name a head of scores."""
    return any(str(name).endswith("ForSequenceClassification") for name in architectures)


def check_reward_config(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a config.json of a model that gives no score, or several, or none that can be normalised."""
    architectures = config.get("architectures") or []
    if not gives_scores(architectures):
        names = ", ".join(map(str, architectures)) or "config.json names no architecture"
        raise InputError(f"{where} has no reward head ({names}); give the output of stage 2")
    # transformers leaves its default, two labels, out of the file.
    num_labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
    if num_labels != 1:
        raise InputError(f"{where}: its head has {num_labels} labels, a reward model has 1; give the output of stage 2")
    for name, is_valid in (("score_mean", lambda x: abs(x) <= MOST), ("score_std", lambda x: 1 / MOST <= x <= MOST)):
        value = config.get(name, 1.0)
        if not isinstance(value, int | float) or not is_valid(value):
            raise InputError(
                f"{where}: config.json: {name} {value} cannot normalise scores; run stage 2 again, or write "
                '"score_mean": 0.0, "score_std": 1.0 there for raw scores'
            )


def last_part(path: str) -> str:
    """Return the last part of a model's folder or hub id, without a revision, as its short name."""
    return Path(split_revision(path)[0]).name


def at_flag(flag: str) -> str:
    """Return the beginning of a message about the value of `flag`."""
    return f"{flag}: " if flag else ""


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder; empty if there is none."""
    return _read_object(folder / CONFIG_FILES[0]) or {}


def read_adapter_config(folder: Path) -> dict[str, Any] | None:
    """Read adapter_config.json; None for a folder without an adapter.

    Raises InputError if it names no base model, or scales its weights beyond what stays finite.
    """
    file = folder / CONFIG_FILES[1]
    if (config := _read_object(file)) is None:
        return None
    if not isinstance(config.get("base_model_name_or_path"), str):
        raise InputError(f"{file}: base_model_name_or_path is missing; it names the model that the adapter belongs to")
    for name, pattern, most in (("lora_alpha", "alpha_pattern", MAX_LORA_ALPHA), ("r", "rank_pattern", MAX_LORA_RANK)):
        patterns = config.get(pattern)
        for value in (config.get(name, 1), *(patterns.values() if isinstance(patterns, dict) else ())):
            if not isinstance(value, int | float) or not abs(value) <= most:
                raise InputError(f"{file}: {name}: got {value!s:.80}, expected a number of at most {most:,}")
    if config.get("revision") and may_be_hub_id(config["base_model_name_or_path"]):
        config["base_model_name_or_path"] += f"@{config['revision']}"
    return config


def _read_object(file: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if there is no such file."""
    try:
        if not file.is_file():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: got a JSON {type(content).__name__}, expected an object")
    return content


def may_be_hub_id(path: str) -> bool:
    """Return True for a path that may name a hub repository, with or without a revision."""
    # Our own output folders are never hub ids, also before they exist.
    name, _ = split_revision(path)
    if not HUB_ID.fullmatch(name) or name.startswith("output/"):
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def nearest_folder(path: Path) -> str:
    """Return `; did you mean FOLDER?` for the most similar model folder nearby, else the nearest existing folder."""
    base = next(folder for folder in (path, *path.parents) if folder.is_dir())
    models = []
    with contextlib.suppress(OSError):  # a folder that may not be read
        for depth in range(1, SEARCH_DEPTH + 1):
            models += [str(folder) for folder in base.glob("/".join(["*"] * depth)) if has_config(folder)]
    # Only the parts that may be mistyped are compared: a long common folder would make any two paths alike.
    shared = base.parent if base == path else base
    names = {os.path.relpath(model, shared): model for model in models}
    if close := difflib.get_close_matches(os.path.relpath(path, shared), names, n=1, cutoff=0.6):
        return f"; did you mean {names[close[0]]}?"
    return "" if base == path else f"; the nearest folder that exists is {base.resolve() if base == Path() else base}"


def model_of_run(folder: Path) -> str:
    """Return `; it wrote MODEL` for the folder of a run whose model is where runs write it by default, else ""."""
    for model in sorted(folder.parent.parent.glob("*")):  # an actor before its critic
        if has_config(model) and folder.name in (model.name, read_object(model / OURS).get("stage")):
            return f"; it wrote {model}"
    return ""


def reading_error(path: str, what: str, error: Exception) -> RunError:
    """Describe in one line why transformers did not read a model or tokenizer: a fault of network or files."""
    if type(error).__name__ == "UnpicklingError":
        return InputError(f"{path}: {what}: its .bin file holds more than tensors and is refused (weights_only)")
    if "weights_only" in str(error):  # torch goes on with how to switch that off
        return InputError(
            f"{path}: {what}: its .bin file is TorchScript or an old archive, and is refused (weights_only)"
        )
    if "ignore_mismatched_sizes" in str(error):
        return InputError(f"{path}: {what}: the shapes in its files are not those of config.json")
    reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
    is_hub_id = not Path(path).expanduser().exists() and may_be_hub_id(path)
    if is_hub_id and isinstance(error, OSError) and "valid model identifier" not in str(error):
        name, revision = split_revision(path)
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        hint = f"run `{command}` on a machine with a network, or give a local folder"
        if not is_reachable():
            return EnvironmentFault(f"{path}: cannot be fetched without a network; {hint}")
        return EnvironmentFault(f"{path}: cannot be fetched; {hint} ({reason.partition('. Check your')[0]})")
    return InputError(f"{path}: {what}: {reason}")
