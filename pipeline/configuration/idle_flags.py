"""Flags that were given and change nothing as the others stand: said once at the start, not refused."""

from collections.abc import Iterator, Mapping
from typing import Any

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
