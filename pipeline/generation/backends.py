"""Which rung generation stands on: the fastest one that computes this model's function on this device.

fused: a hand-written decode step (OPT and the shape of Llama) in a CUDA graph; static: the model's own forward pass
on a static cache in a CUDA graph; eager: the model's own forward pass, for CPUs and everything else.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pipeline.dist import RankGroup
from pipeline.errors import InputError
from pipeline.generation.static import OwnForward, check_own_forward
from pipeline.models.architecture import UnsupportedModel, read_architecture
from pipeline.models.lora import is_lora

Rung = Literal["fused", "static", "eager"]
RUNGS: tuple[Rung, ...] = ("fused", "static", "eager")


@dataclass(frozen=True, slots=True)
class RungSettings:
    """What the flags say.

    wanted: the rung, or auto. merge_lora: sample from base and adapters added up (in a copy). positions: tokens of the
    longest sequence.
    """

    wanted: Literal["auto", "fused", "static", "eager"] = "auto"
    merge_lora: bool = True
    positions: int = 0


def choose_rung(model: nn.Module, settings: RungSettings, device: torch.device) -> tuple[Rung, list[str]]:
    """The rung to take, and why each faster one was passed over.

    Raises:
        InputError: a rung was asked for by name that cannot be taken.
    """
    checks = {"fused": _check_fused, "static": _check_static}
    passed_over: list[str] = []
    for rung in RUNGS:
        if settings.wanted not in ("auto", rung):
            continue
        try:
            if rung in checks:
                checks[rung](model, settings, device)
            return rung, passed_over
        except UnsupportedModel as reason:
            passed_over.append(f"{rung}: {reason}")
    raise InputError(f"--generation_engine {settings.wanted}: {passed_over[0].split(': ', 1)[1]}; use auto")


def _check_fused(model: Any, settings: RungSettings, device: torch.device) -> None:
    _check_kernels(settings, device)
    architecture = read_architecture(model)
    if architecture.window is not None and settings.positions > architecture.window:
        raise UnsupportedModel(
            f"sequences of {settings.positions} tokens are longer than the window {architecture.window}"
        )
    if is_lora(model) and not settings.merge_lora:
        raise UnsupportedModel("it knows no adapters beside the weights (--merge_lora_for_generation false)")


def _check_static(model: Any, settings: RungSettings, device: torch.device) -> None:
    _check_kernels(settings, device)
    check_own_forward(model)


def _check_kernels(settings: RungSettings, device: torch.device) -> None:
    """Triton's kernels run on CUDA devices; and in its interpreter, slowly, where a rung is asked for by name."""
    try:
        import triton
    except ImportError:
        raise UnsupportedModel("triton is not installed") from None
    interpreted = settings.wanted != "auto" and triton.knobs.runtime.interpret
    if device.type != "cuda" and not interpreted:
        raise UnsupportedModel("there is no CUDA device")


def decode_function(model: Any, rung: Rung, group: RankGroup, *, stream: RankGroup | None = None) -> Any:
    """What a `generator.Generator` samples with; of the fused rung this rank's part, its weights not read yet.

    Args:
        group: ranks that compute together, each with its part of a layer. stream: ranks that each compute alone with
            whole layers, of which each keeps a slice.
    """
    if rung == "static":
        return OwnForward(model)
    from pipeline.generation.fused import DecodeModel
    from pipeline.generation.fused_weights import DecodeWeights, Shard
    from pipeline.generation.streaming import StreamedWeights

    if stream is not None:
        return DecodeModel(StreamedWeights(read_architecture(model), stream))
    weights = DecodeWeights(read_architecture(model), Shard(group.rank, group.size))
    return DecodeModel(weights, group.add if group.size > 1 else None)
