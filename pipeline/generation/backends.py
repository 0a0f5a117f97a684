"""Which rung generation stands on: the fastest one that computes this model's function on this device.

fused: a hand-written decode step (OPT and the shape of Llama) in a CUDA graph; static: the model's own forward pass
on a static cache in a CUDA graph; eager: the model's own forward pass, for CPUs and everything else.
"""

import logging
from typing import Any

import torch
from torch import nn

from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.generation.options import Rung, RungSettings
from pipeline.generation.static import check_own_forward
from pipeline.models.architecture import UnsupportedModel, read_architecture
from pipeline.models.lora import is_lora

RUNGS: tuple[Rung, ...] = ("fused", "static", "eager")


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


log = logging.getLogger(__name__)


# Of the free memory that the cache may take; the rest is for activations and fragmentation.
SHARE_OF_FREE_MEMORY = 0.9


# Rows that must find space beside whole weights; with fewer at a time, streaming the weights is taken to be better.
LEAST_ROWS = 8


def free_bytes(device: torch.device) -> int:
    """Of a CUDA device: what nobody has, and what this process holds without using it."""
    reserved_unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved_unused


def check_copies_fit(num_bytes: int, device: torch.device) -> None:
    """Log what copies of weights take, at most, of a CUDA device.

    Raises:
        InputError: more than is free.
    """
    if not num_bytes or device.type != "cuda":
        return
    free = free_bytes(device)
    log.info(
        "generation: copied weights take at most %.2f GiB of the %.2f GiB that are free", num_bytes / GIB, free / GIB
    )
    if num_bytes > free:
        raise InputError(
            f"--generation_engine: the actor's weights take {num_bytes / GIB:.2f} GiB during a rollout, "
            f"{free / GIB:.2f} GiB are free; share them among GPUs (--inference_tp_size; --actor_zero_stage 3 with "
            "--rollout_weights auto), or make room (--offload_optimizer_during_rollout)"
        )


def whole_weights_fit(num_bytes: int, bytes_per_row: int, device: torch.device) -> bool:
    """Whether copies of all weights leave space for a few rows of the cache; always on a CPU."""
    if device.type != "cuda":
        return True
    free, cache = free_bytes(device), LEAST_ROWS * bytes_per_row
    log.info(
        "generation: whole weights take at most %.2f GiB, %d rows of the cache %.2f GiB, of %.2f GiB that are free",
        num_bytes / GIB,
        LEAST_ROWS,
        cache / GIB,
        free / GIB,
    )
    return num_bytes + cache <= SHARE_OF_FREE_MEMORY * free


def check_stream_fits(weights: Any, device: torch.device) -> None:
    """Log what streamed weights take.

    Args:
        weights: `streaming.StreamedWeights`.

    Raises:
        InputError: more than is free on a CUDA device.
    """
    if device.type != "cuda":
        return
    total, free = weights.num_bytes_to_copy / GIB, free_bytes(device) / GIB
    log.info(
        "generation: streamed weights take %.2f GiB (1/%d of the layers) + %.2f GiB (%d groups of %d layers) "
        "+ %.2f GiB (whole on each rank) = %.2f GiB of the %.2f GiB that are free",
        weights.slice_bytes / GIB,
        weights.ranks.size,
        weights.ring_bytes / GIB,
        len(weights.groups[:2]),
        len(weights.groups[0].layers),
        weights.whole_bytes / GIB,
        total,
        free,
    )
    if total > free:
        raise InputError(
            f"--rollout_weights: also streamed, the actor's weights take {total:.2f} GiB during a rollout, {free:.2f} "
            "GiB are free; take more GPUs, or make room (--offload_optimizer_during_rollout)"
        )


def affordable_slots(model: Any, wanted: int, room: int) -> int:
    """How many rows of `room` tokens find space for their keys and values, maybe none; `wanted` on a CPU.

    Args:
        model: a `generator.DecodeFunction`.
    """
    device, each = model.device, model.bytes_per_token * room
    if device.type != "cuda":
        return wanted
    free = free_bytes(device)
    fitting = min(wanted, int(SHARE_OF_FREE_MEMORY * free // each))
    said = f"{wanted} rows x {room} tokens x {model.bytes_per_token / 2**10:.0f} KiB = {wanted * each / GIB:.2f} GiB"
    log.info("generation: the cache takes %s of the %.2f GiB that are free", said, free / GIB)
    if fitting < wanted:
        log.warning(
            "generation: memory for %d rows at once, not %d; the others wait for a free place. The cache stays during "
            "updates: where they run out of memory, give --release_inference_cache true",
            fitting,
            wanted,
        )
    return fitting


def checked_slots(fitting: int, model: Any, room: int) -> int:
    """`fitting`, on all ranks of a group alike.

    Raises:
        InputError: it is 0.
    """
    if fitting:
        return fitting
    raise InputError(
        f"--max_answer_seq_len: one row of {room} tokens takes {model.bytes_per_token * room / GIB:.2f} GiB of cache, "
        f"{free_bytes(model.device) / GIB:.2f} GiB are free; shorten it, or lower the models' memory "
        "(--actor_zero_stage 3, --inference_tp_size)"
    )
