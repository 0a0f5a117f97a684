"""Checks of flag values beyond their types: names of files and folders, and flags that change nothing as others are."""

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


STAGE_3 = ("zero3_gather", "stage3_param_persistence_threshold")


STAGES_1_AND_2 = ("allgather_bucket_size",)


FP16 = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


LORA = ("alpha", "dropout", "module_name", "learning_rate")


def idle_flags(values: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    """A line for each flag without effect, with what it needs.

    Args:
        values: of every flag of a step. origins: where each came from; defaults are not spoken of.
    """
    for name, reason in reasons(values):
        if origins.get(name, "default") != "default":
            yield f"--{name} {values[name]} ({origins[name]}): has no effect: {reason}"


def reasons(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each flag that has no effect, and why."""
    stages = sorted({value for name, value in values.items() if name.endswith("zero_stage")})
    found = " and ".join(map(str, stages))
    if 3 not in stages:
        yield from ((name, f"it needs a model at ZeRO stage 3, found {found}") for name in STAGE_3)
    if not {1, 2} & set(stages):
        yield from ((name, f"it needs a model at ZeRO stage 1 or 2, found {found}") for name in STAGES_1_AND_2)
    if values["dtype"] != "fp16":
        yield from ((name, f"it needs --dtype fp16, found {values['dtype']}") for name in FP16)
    for name, value in values.items():
        if name.endswith("lora_dim") and not value:
            prefix = name.removesuffix("dim")
            yield from ((prefix + rest, f"it needs --{name}, found 0") for rest in LORA)
