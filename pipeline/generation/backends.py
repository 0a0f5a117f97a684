"""Generation backends: their common protocol, the choice of one for a model, and checks that it fits in device memory.

fused: our own decode step (the decoders of models/decoders) in a CUDA graph. static: the forward pass of transformers
on a static KV cache in a CUDA graph. eager: the forward pass of transformers as it is, for CPUs and all other models.
The module imports neither triton nor the fused backend, since eager generation needs neither.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from pipeline.cache_memory import MIN_SLOTS_WITH_WHOLE_WEIGHTS, leave_slots, memory_of, tokens_that_fit
from pipeline.dist import RankGroup
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.generation.device_work import Lockstep
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.forwards.kv_cache import CacheLayout, Rest
from pipeline.generation.forwards.static import check_static_cache_forward
from pipeline.generation.options import PARTITION_ACTOR, Backend, GenerationOptions
from pipeline.generation.rollouts import Vocabulary
from pipeline.generation.session import SessionSource
from pipeline.models.decoders.architecture import UnsupportedModel
from pipeline.models.decoders.families import read_architecture
from pipeline.models.lora import is_lora, quantization_of

BACKENDS: tuple[Backend, ...] = get_args(Backend)
# Backends that sample from a model's modules as they are, on any device and without buffers -> the source of their
# sessions.
OF_MODULES: dict[Backend, Callable[[nn.Module, Vocabulary], SessionSource]] = {
    "eager": EagerGenerator,
}

log = logging.getLogger(__name__)


class CachedForward(Protocol):
    """The forward passes of a model for generation: prefill and decode steps over a KV cache.

    cache_layout: keys and values of a token on this rank.
    preserves_free_slots: a decode step writes nothing to slots that are not active, which a prefill may fill meanwhile.
    fits_graph: a CUDA graph can hold a decode step.
    can_grow: its caches have a method `grow(cache_length, slots)`, and their length changes no result.
    group: the ranks that compute each pass together, and have the same responses.
    lockstep: ranks whose forward passes are collectives, although each has its own responses; None if ranks run freely.

    Implemented by `fused.FusedForward` and `static.StaticCacheForward`. M slots (rows of the cache), V vocabulary.
    """

    cache_layout: CacheLayout
    preserves_free_slots: bool
    fits_graph: bool
    can_grow: bool
    group: RankGroup
    lockstep: Lockstep | None

    @property
    def device(self) -> torch.device: ...
    @property
    def num_copied_bytes(self) -> int: ...
    def refresh(self) -> None: ...
    def prepare(self, cache_length: int) -> None: ...
    def new_cache(self, num_slots: int, cache_length: int) -> Any: ...
    def prefill(self, ids: Tensor, lengths: Tensor, cache: Any, *, slots: Tensor, source: Tensor | Rest) -> Tensor: ...
    def decode_step(self, tokens: Tensor, lengths: Tensor, active: Tensor, cache: Any) -> Tensor: ...
    def addresses(self) -> tuple[int, ...]: ...


def choose_backend(
    model: nn.Module, options: GenerationOptions, device: torch.device | None
) -> tuple[Backend, list[str]]:
    """Return the backend to use, and for each faster one that cannot be used "name: reason".

    device: None for a plan for a GPU, which assumes triton.

    Raises:
        InputError: a backend was requested by name that cannot be used.
    """
    fallbacks: list[str] = []
    for backend in BACKENDS if options.backend == "auto" else (options.backend,):
        try:
            _check_support(backend, model, options, device)
            return backend, fallbacks
        except UnsupportedModel as reason:
            fallbacks.append(f"{backend}: {reason}")
    raise InputError(f"--generation-engine {options.backend}: {fallbacks[0].split(': ', 1)[1]}; use auto")


def _check_machine(options: GenerationOptions, device: torch.device) -> None:
    """Raise UnsupportedModel if Triton kernels cannot run; triton's slow interpreter needs a backend given by name."""
    try:
        import triton
    except ImportError:
        raise UnsupportedModel("triton is not installed") from None
    interpreted = options.backend != "auto" and triton.knobs.runtime.interpret
    if device.type != "cuda" and not interpreted:
        raise UnsupportedModel("there is no CUDA device")


def _check_support(backend: Backend, model: nn.Module, options: GenerationOptions, device: torch.device | None) -> None:
    """Raise UnsupportedModel if the backend cannot be used."""
    if backend in OF_MODULES:
        return
    if device is not None:
        _check_machine(options, device)
    if backend == "static":
        check_static_cache_forward(model)
        return
    if (quantization := quantization_of(model)) == "nf4":
        raise UnsupportedModel("it reads 16-bit and int8 weights, the base is nf4")
    read_architecture(model)
    if is_lora(model) and not options.merge_lora and quantization == "none":
        raise UnsupportedModel("it takes no unmerged adapters (--merge-lora-for-generation false)")


def check_copies_fit(num_bytes: int, device: torch.device) -> None:
    """Log and check the memory that copies of weights take at most on a CUDA device.

    Raises:
        InputError: it is more than is free.
    """
    if not num_bytes or device.type != "cuda":
        return
    free, _ = memory_of(device)
    log.info(
        "generation: copied weights take at most %.2f GiB of the %.2f GiB that are free", num_bytes / GIB, free / GIB
    )
    if num_bytes > free:
        raise InputError(
            f"--generation-engine: the actor's weights take {num_bytes / GIB:.2f} GiB during a rollout, "
            f"{free / GIB:.2f} GiB are free; share them among GPUs (--inference-tp-size; {PARTITION_ACTOR} with "
            "--rollout-weights auto), or free memory (--offload-optimizer-during-rollout)"
        )


def whole_weights_fit(num_bytes: int, bytes_per_slot: int, device: torch.device) -> bool:
    """Return True if copies of all weights leave memory for a few slots of the KV cache; always on a CPU."""
    if device.type != "cuda":
        return True
    free, cache = memory_of(device)[0], MIN_SLOTS_WITH_WHOLE_WEIGHTS * bytes_per_slot
    log.info(
        "generation: whole weights take at most %.2f GiB, %d slots of the KV cache %.2f GiB, of %.2f GiB that are free",
        num_bytes / GIB,
        MIN_SLOTS_WITH_WHOLE_WEIGHTS,
        cache / GIB,
        free / GIB,
    )
    return leave_slots(num_bytes, bytes_per_slot, free)


def cached_tokens_that_fit(forward: CachedForward) -> int:
    """Return the number of tokens, over all slots, that a KV cache has memory for; unlimited on a CPU."""
    if forward.device.type != "cuda":
        return sys.maxsize
    free, _ = memory_of(forward.device)
    fitting = tokens_that_fit(free, forward.cache_layout.bytes_per_token)
    log.info(
        "generation: %.2f GiB are free, for a KV cache of %d tokens of %.0f KiB",
        free / GIB,
        fitting,
        forward.cache_layout.bytes_per_token / 2**10,
    )
    return fitting


def no_slot_fits(forward: CachedForward, cache_length: int) -> InputError:
    """Return the error for a KV cache that has no memory for a single slot."""
    slot, free = forward.cache_layout.bytes_per_token * cache_length / GIB, memory_of(forward.device)[0] / GIB
    return InputError(
        f"--max-answer-seq-len: one slot of {cache_length} tokens takes {slot:.2f} GiB of KV cache, {free:.2f} "
        f"GiB are free; shorten it (answers: --max-new-tokens), or lower the models' memory ({PARTITION_ACTOR}, "
        "--inference-tp-size)"
    )
