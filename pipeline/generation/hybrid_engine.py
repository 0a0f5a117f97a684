"""The actor in its two roles: trained under DeepSpeed, and sampled from with the same weights.

For the rollouts and the evaluation of stage 3. Nothing outside this object knows how generation reads the weights:
ZeRO-3's partitions and hooks, LoRA, tensor parallelism, KV caches and CUDA graphs.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeline import dist
from pipeline.cache_memory import keeps_cache
from pipeline.config_fields import declared
from pipeline.engine.engine import TrainingEngine
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.generation.backends import (
    CachedForward,
    check_copies_fit,
    choose_backend,
    memory_of,
    whole_weights_fit,
)
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.options import Backend, GenerationOptions, why_not_streamed
from pipeline.generation.rollouts import Prompt, Rollout, Vocabulary
from pipeline.generation.session import Room, Session, generate
from pipeline.models.decoders.families import read_architecture
from pipeline.models.loading import base_model
from pipeline.models.partitions import has_shards_on_disk
from pipeline.models.weight_files import warn_once
from pipeline.tensor_ops import pad_rows

if TYPE_CHECKING:  # they import triton, which the eager backend does without
    from pipeline.generation.forwards.fused import FusedForward
    from pipeline.generation.generator import Generator

log = logging.getLogger(__name__)


class HybridEngine:
    """A source of sessions (`session.py`) on the model that `engine` trains, inside `generation()` only."""

    def __init__(
        self, engine: TrainingEngine, vocabulary: Vocabulary, *, options: GenerationOptions | None = None
    ) -> None:
        options = options or GenerationOptions()
        self.engine, self.options, self.vocabulary = engine, options, vocabulary
        size = options.tensor_parallel_size
        if dist.world_size() % size:
            raise InputError(f"--inference_tp_size {size}: must divide the {dist.world_size()} ranks")
        self.group = dist.RankGroup(size)
        self._model: nn.Module = engine.module.model
        self._device = next(engine.module.parameters()).device
        self.backend: Backend
        self.backend, fallbacks = choose_backend(self._model, options, self._device)
        for fallback in fallbacks:
            log.info("generation: fell back from %s", fallback)
        log.info("generation: %s backend", self.backend)
        self._check_tensor_parallelism()
        self._check_swap_buffers()
        if options.weights == "streamed" and (reason := self._why_not_streamed()):
            raise InputError(f"--rollout_weights streamed: {reason}; else give auto")
        self._streaming_ranks: dist.RankGroup | None = None  # the ranks that streamed weights are sharded over
        self._generator: Generator | None = None
        self._open = False
        self._held = self._needed = 0  # bytes: at the end of the last rollout, and that updates took above them

    def _check_tensor_parallelism(self) -> None:
        size = self.group.size
        if size == 1:
            return
        config = base_model(self._model).config
        heads = declared(config, "num_key_value_heads") or config.num_attention_heads
        if self.backend != "fused":
            raise InputError(f"--inference_tp_size {size}: needs the fused backend, found {self.backend}")
        if heads % size:
            raise InputError(f"--inference_tp_size {size}: must divide the {heads} heads of keys and values")
        if read_architecture(self._model).joins_head_norms:
            raise InputError(f"--inference_tp_size {size}: {config.model_type} norms the heads of all ranks together")
        log.info("generation: tensor parallel, over %d ranks", size)

    def _check_swap_buffers(self) -> None:
        """Raise InputError where a rollout gathers all weights from a disk at once, through fewer buffers."""
        needed = sum(has_shards_on_disk(parameter) for parameter in self._model.parameters())
        if self.backend == "fused" or not needed:
            return
        if (found := self.engine.deepspeed.zero_offload_param().buffer_count) < needed:
            raise InputError(
                f"zero_optimization.offload_param.buffer_count: found {found}, the {self.backend} backend of"
                f" generation needs {needed} or more: it gathers all weights for a rollout"
            )

    def _why_not_streamed(self) -> str | None:
        return why_not_streamed(
            partitioned=self.engine.partitions_weights,
            ranks=dist.world_size(),
            tensor_parallel_size=self.group.size,
            backend=self.backend,
        )

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Make the trained weights available to `generate`: gathered, merged, refreshed. A collective."""
        # The fused backend copies weights layer by layer; the others need whole modules.
        with self.engine.generation(gather=self.backend != "fused"):
            if self.backend != "eager":
                self._refresh()
            self._open = True
            try:
                yield
            except Exception:
                # After an out-of-memory error the next call may be smaller: nothing of this one's size is kept for it.
                self._generator, self.options = None, replace(self.options, min_slots=0)
                raise
            finally:
                self._open = False
            if self.backend != "eager" and (self.options.release_cache or self._update_lacks_memory()):
                self._generator = None
            if self._device.type == "cuda":
                self._held = torch.cuda.memory_allocated(self._device)

    @property
    def holds_buffers(self) -> bool:
        """True while KV cache, CUDA graphs and copied weights are kept for the next rollout."""
        return self._generator is not None

    def always_release(self) -> None:
        """Give the buffers back now, and from now on after each rollout."""
        self._generator, self.options = None, replace(self.options, release_cache=True)

    def note_update(self) -> None:
        """Measure what an update took above what was held when its rollout ended; called after passes of it."""
        if self._device.type == "cuda":
            self._needed = max(self._needed, torch.cuda.max_memory_allocated(self._device) - self._held)

    def _update_lacks_memory(self) -> bool:
        """Tell whether some rank's device has too little free for an update beside the KV cache. A collective."""
        lacks = not keeps_cache(*memory_of(self._device), taken=self._needed)
        lacks = dist.max_over_ranks(float(lacks), self._device) > 0
        if lacks:
            warn_once(
                "generation: an update lacks memory beside the KV cache, which is given back before it and allocated "
                "again for the next rollout"
            )
        return lacks

    def _refresh(self) -> None:
        """Let the generator read the weights as they are now, and build it the first time."""
        if self._generator is not None:
            self._generator.forward.refresh()
            return
        from pipeline.generation.generator import Generator

        forward = self._build_forward()
        forward.refresh()
        least = Room(self.options.min_slots * self.group.size, 0, self.options.max_sequence_length)
        self._generator = Generator(forward, self.vocabulary, least=least)
        log.info("generation: copied weights take %.2f GiB besides the trained ones", forward.num_copied_bytes / GIB)

    def _build_forward(self) -> "CachedForward":
        """Return the forward passes of the fused or static backend, before their first `refresh`.

        Raises:
            InputError: copies of the weights do not fit in memory.
        """
        if self.backend == "static":
            return StaticCacheForward(self._model)
        from pipeline.generation.forwards.fused import FusedForward
        from pipeline.generation.forwards.fused_weights import DecodeWeights
        from pipeline.generation.forwards.projections import Shard
        from pipeline.generation.forwards.streaming import StreamedWeights, check_streamed_weights_fit

        architecture, group = read_architecture(self._model), self.group
        if self._streaming_ranks is None:
            weights = DecodeWeights(architecture, Shard(group.rank, group.size))
            forward = FusedForward(weights, group)
            if not self._must_stream(forward):
                check_copies_fit(weights.num_bytes_to_copy, self._device)
                return forward
            self._streaming_ranks = dist.RankGroup(dist.world_size())
        streamed = StreamedWeights(architecture, self._streaming_ranks)
        check_streamed_weights_fit(streamed, self._device)
        return FusedForward(streamed)

    def _must_stream(self, whole: "FusedForward") -> bool:
        """Return True where weights are to be streamed, on all ranks alike; `whole` would hold them whole."""
        if self.options.weights != "auto" or self._why_not_streamed():
            if self.options.weights == "streamed":
                log.info("generation: weights are streamed, as --rollout_weights says")
            return self.options.weights == "streamed"
        bytes_per_slot = whole.cache_layout.bytes_per_token * self.options.max_sequence_length
        fit = whole_weights_fit(whole.weights.num_bytes_to_copy, bytes_per_slot, self._device)
        streams = dist.max_over_ranks(float(not fit), self._device) > 0
        log.info("generation: weights are %s", "streamed: on some rank they do not fit" if streams else "whole")
        return streams

    def session(self, room: Room) -> Session:
        """Open a session; the slots are those of this rank's tensor-parallel group."""
        if not self._open:
            raise RuntimeError("a session outside generation(): the weights may be partitioned")
        source = self._generator or EagerGenerator(base_model(self._model), self.vocabulary)
        return source.session(room)

    def generate(self, prompts: Sequence[Prompt], *, num_samples: int, batch_size: int = 0, **request: Any) -> Rollout:
        """Sample responses with `session.generate`, `batch_size` prompts at a time (0: all); only in `generation()`."""
        num_slots = (batch_size or len(prompts)) * num_samples
        rollout = generate(self, prompts, num_samples=num_samples, num_slots=num_slots, **request)
        if self.group.size > 1:
            width: int = request["sampling"].max_new_tokens
            self.group.check_same(pad_rows(rollout.responses, self.vocabulary.pad_id, length=width))
        return rollout
