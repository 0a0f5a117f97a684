"""The actor in its two roles: trained under DeepSpeed, and sampled from with the same weights.

Stage 3 uses it for rollouts and evaluation. Nothing outside this object knows how generation reads the weights:
ZeRO-3's partitions and hooks, LoRA, tensor parallelism, KV caches and CUDA graphs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pipeline import dist
from pipeline.cache_memory import keeps_cache, memory_of
from pipeline.engine.engine import TrainingEngine
from pipeline.errors import InputError
from pipeline.generation.backends import OF_MODULES
from pipeline.generation.episodes import generate
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import Prompt, Rollout, Vocabulary
from pipeline.generation.session import Capacity, Session
from pipeline.generation.sources import WeightSource
from pipeline.models.partitions import has_shards_on_disk
from pipeline.models.weight_files import warn_once
from pipeline.tensor_ops import pad_rows

if TYPE_CHECKING:  # it imports triton, which the eager backend does not need
    from pipeline.generation.generator import Generator


class HybridEngine:
    """A source of sessions (`session.py`) on the model that `engine` trains. Sessions are open only in `generation()`.

    engine: the actor under DeepSpeed.
    options: the flags of generation.
    vocabulary: ids that end a response or pad it, and ids that can be drawn.
    source: the weights, and the backend that reads them.
    group: the ranks that share one copy of the weights.
    backend: name of the backend.
    """

    def __init__(
        self, engine: TrainingEngine, vocabulary: Vocabulary, *, options: GenerationOptions | None = None
    ) -> None:
        options = options or GenerationOptions()
        self.engine, self.options, self.vocabulary = engine, options, vocabulary
        self.source = WeightSource(engine.module.model, options, partitioned=engine.partitions_weights)
        self.group, self.backend, self._device = self.source.group, self.source.backend, self.source.device
        self._check_swap_buffers()
        self._generator: Generator | None = None
        self._open = False
        # The most bytes allocated in updates since the last rollout, and the most temporary bytes of earlier updates.
        # At ZeRO stage 0 the first update creates the optimizer's states, which are not temporary.
        self._peak_bytes = self._update_bytes = 0

    def _check_swap_buffers(self) -> None:
        """Raise InputError if a rollout gathers all weights from a disk at once and has too few buffers for that."""
        needed = sum(has_shards_on_disk(parameter) for parameter in self.source.model.parameters())
        if self.backend == "fused" or not needed:
            return
        if (count := self.engine.deepspeed.zero_offload_param().buffer_count) < needed:
            raise InputError(
                f"zero_optimization.offload_param.buffer_count: got {count}, the {self.backend} backend of"
                f" generation needs {needed} or more: it gathers all weights for a rollout"
            )

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Gather, merge and refresh the trained weights for `generate` inside this context. A collective."""
        if self._peak_bytes:
            self._update_bytes = max(self._update_bytes, self._peak_bytes - torch.cuda.memory_allocated(self._device))
            self._peak_bytes = 0
        # The fused backend copies weights layer by layer; the others need whole modules.
        with self.engine.generation(gather=self.backend != "fused"):
            if self._generator is not None:
                self._generator.forward.refresh()
            elif self.backend not in OF_MODULES:
                least = Capacity(self.options.min_slots * self.group.size, 0, self.options.max_sequence_length)
                self._generator = self.source.generator(self.vocabulary, least=least)
            self._open = True
            try:
                yield
            except Exception:
                # After an out-of-memory error the next call may be smaller, so free the buffers of this size.
                self._generator, self.options = None, replace(self.options, min_slots=0)
                raise
            finally:
                self._open = False
            if self.backend not in OF_MODULES and (self.options.release_cache or self._update_lacks_memory()):
                self._generator = None

    @property
    def holds_buffers(self) -> bool:
        """True while KV cache, CUDA graphs and copied weights stay in memory for the next rollout."""
        return self._generator is not None

    def always_release(self) -> None:
        """Free the buffers now, and from now on after each rollout."""
        self._generator, self.options = None, replace(self.options, release_cache=True)

    def note_update(self) -> None:
        """Record the peak of allocated memory; call it after the passes of an update, before another phase begins."""
        if self._device.type == "cuda":
            self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def _update_lacks_memory(self) -> bool:
        """Return True if some rank's device lacks memory for an update beside the KV cache. A collective."""
        lacks = not keeps_cache(*memory_of(self._device), taken=self._update_bytes)
        lacks = dist.max_over_ranks(float(lacks), self._device) > 0
        if lacks:
            warn_once(
                "generation: an update lacks memory beside the KV cache, which is freed before it and allocated "
                "again for the next rollout"
            )
        return lacks

    def session(self, capacity: Capacity) -> Session:
        """Open a session; capacity.num_slots counts the slots of this rank's tensor-parallel group."""
        if not self._open:
            raise RuntimeError("a session outside generation(): the weights may be partitioned")
        return (self._generator or self.source.of_modules(self.vocabulary)).session(capacity)

    def generate(self, prompts: Sequence[Prompt], *, num_samples: int, batch_size: int = 0, **request: Any) -> Rollout:
        """Sample responses by `episodes.generate`, `batch_size` prompts at once (0: all); call it in `generation()`."""
        num_slots = (batch_size or len(prompts)) * num_samples
        rollout = generate(self, prompts, num_samples=num_samples, num_slots=num_slots, **request)
        if self.group.size > 1:
            width: int = request["sampling"].max_new_tokens
            self.group.check_same(pad_rows(rollout.responses, self.vocabulary.pad_id, length=width))
        return rollout
