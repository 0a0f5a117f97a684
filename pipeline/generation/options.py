"""What the flags say of generation; imports no torch, so that flags are checked in milliseconds."""

from dataclasses import dataclass
from typing import Literal

Rung = Literal["fused", "static", "eager"]


@dataclass(frozen=True, slots=True)
class RungSettings:
    """What the flags say.

    wanted: the rung, or auto. merge_lora: sample from base and adapters added up (in a copy). positions: tokens of the
    longest sequence.
    """

    wanted: Literal["auto", "fused", "static", "eager"] = "auto"
    merge_lora: bool = True
    positions: int = 0


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How the actor generates.

    rung: which rung to take, and with which adapters. release_cache: give the cache's memory back after each rollout.
    group_size: ranks that share one copy of the weights during a rollout (tensor parallelism). weights: whole on each
    rank or group, or streamed: gathered a few layers at a time during each step. slots: responses of a rank at once
    that there is room for from the start.
    """

    rung: RungSettings = RungSettings()
    release_cache: bool = False
    group_size: int = 1
    weights: Literal["auto", "whole", "streamed"] = "auto"
    slots: int = 0


def why_not_streamed(*, partitioned: bool, ranks: int | None, group_size: int, rung: str) -> str | None:
    """What stands against `--rollout_weights streamed`, found and wanted; `ranks` None: not known yet."""
    if not partitioned:
        return "found whole weights, wanted --actor_zero_stage 3"
    if ranks == 1:
        return "found 1 rank, wanted several, which share the weights"
    if group_size > 1:
        return f"found --inference_tp_size {group_size}, wanted 1"
    if rung not in ("auto", "fused"):
        return f"found the {rung} rung, wanted the fused one (--generation_engine)"
    return None
