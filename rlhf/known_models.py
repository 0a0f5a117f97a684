"""Base models that have a preset: by their names in launch/models.yaml, or by their numbers of weights."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from pipeline.configuration.flags import load_yaml
from pipeline.errors import InputError, nearest
from pipeline.launching.scripts import launch_file
from rlhf.stages import STAGES

SIZES = ("tiny", "125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "1.3b-lora", "6.7b-lora")
OPT = "facebook/opt-"
# Most weights of a model -> the preset of its size. The bounds lie between sizes of families; chosen by hand.
PRESETS_BY_SIZE = {50e6: "", 0.8e9: "small", 2.4e9: "1b", 5e9: "3b", 10e9: "8b"}


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A base model with presets.

    preset: name of its presets.
    hub_id: hub id or folder of the model; empty if each of its presets names the model.
    reward_model: name of the default base of its reward model.
    flags: flags of each stage that trains it; --config and overrides are stronger.
    """

    preset: str
    hub_id: str
    reward_model: str
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_known_by_size(self) -> bool:
        """Tell whether its number of weights chose the preset (`preset_of_size`): it is in no family."""
        return self.hub_id == self.reward_model


@cache
def model_families() -> list[dict[str, list[Any]]]:
    """Return the families of launch/models.yaml, each a mapping name -> [hub id, preset] or [hub id, preset, flags]."""
    return list(load_yaml(str(launch_file("models.yaml"))).values())


def known_model(model: str, flag: str = "") -> KnownModel | None:
    """Return the presets of a base model, by its name or hub id, or by its number of weights (see `preset_of_size`).

    Returns None for another hub id or folder.

    Args:
        model: value of --actor-model or --reward-model.
        flag: beginning of messages.

    Raises:
        InputError: the value looks like the name of a model, or is the name of a preset that has only stage 1.
    """
    size = model.removeprefix(OPT)
    if size in SIZES:
        return KnownModel(size, "", "tiny" if size == "tiny" else "350m")
    names: list[str] = []
    for family in model_families():
        names += family
        for name, (hub_id, preset, *flags) in family.items():
            if model in (name, hub_id, f"{hub_id}-Instruct"):
                return KnownModel(preset, hub_id if model == name else model, next(iter(family)), *flags)
    if "/" in model or Path(model).exists():
        return KnownModel(preset, model, model) if (preset := preset_of_size(model)) else None
    preset_file = launch_file(f"presets/{model}.yaml")
    if preset_file.is_file() and list(load_yaml(str(preset_file))) == [STAGES[0].section]:
        raise InputError(
            f"{flag}got {model!r}, a preset of stage 1 alone; give: bash launch/single_node.sh 1 --preset "
            f"launch/presets/{model}.yaml"
        )
    hint = nearest(model, [*SIZES, *names])
    if hint or re.fullmatch(r"\d+(\.\d+)?[mbMB](-lora)?|[a-z]+[\d.]*-[\d.]+[bm](-lora)?", model):
        raise InputError(
            f"{flag}got {model!r}, expected {', '.join(SIZES)}, a name of launch/models.yaml, a hub id or "
            f"a folder{hint}"
        )
    return None


def preset_of_size(model: str) -> str:
    """Return the preset for the number of weights of a folder, or of a hub id in the hub's cache; no network is used.

    Returns "" if no preset has that size, or not all files of the model are there.
    """
    # Imported here: safetensors and the hub's client take a quarter of a second, which `--help` does not need.
    from pipeline.checkpoints.shared_names import file_of
    from pipeline.models.weight_files import read_header, weight_files

    count = 0
    with suppress(InputError, ValueError):  # the check of the model reports broken files and names that no hub id has
        if config := file_of(model, "config.json"):
            count = sum(prod(shape) for file in weight_files(config.parent) for shape in read_header(file)[0].values())
    return next((preset for most, preset in PRESETS_BY_SIZE.items() if count <= most), "")
