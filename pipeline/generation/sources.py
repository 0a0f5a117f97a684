"""Sources of a model's weights for generation: its modules, copies of the weights, shards, or streamed layers.

They serve a trained model (`step3_ppo/models/hybrid_engine.py`) and a loaded one (`session_source`).
"""

import logging
from typing import TYPE_CHECKING

from torch import nn

from pipeline import dist
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.generation.backends import OF_MODULES, CachedForward, check_copies_fit, choose_backend, whole_weights_fit
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE, GenerationOptions, why_not_streamed
from pipeline.generation.rollouts import Vocabulary
from pipeline.generation.session import NO_CAPACITY, Capacity, SessionSource
from pipeline.models.decoders.families import read_architecture
from pipeline.models.loading import base_model
from pipeline.tensor_ops import round_up

if TYPE_CHECKING:  # they import triton, which the eager backend does not need
    from pipeline.generation.forwards.fused import FusedForward
    from pipeline.generation.generator import Generator

log = logging.getLogger(__name__)


class WeightSource:
    """The weights of a model for generation, and the backend that reads them. Creating one is a collective.

    model: the language model, with or without adapters.
    options: the flags of generation.
    group: the ranks of a tensor-parallel group; one rank without tensor parallelism.
    device: device of the weights.
    backend: name of the backend.

    Args:
        partitioned: ranks share the trained weights (ZeRO-3).

    Raises:
        InputError: this model, device or number of ranks does not support the options.
    """

    def __init__(self, model: nn.Module, options: GenerationOptions, *, partitioned: bool = False) -> None:
        size = options.tensor_parallel_size
        if dist.world_size() % size:
            raise InputError(f"--inference-tp-size {size}: must divide the {dist.world_size()} ranks")
        self.model, self.options, self.group = model, options, dist.RankGroup(size)
        self._all_ranks: dist.RankGroup | None = None  # those that streamed weights are sharded over
        self.device = next(model.parameters()).device
        self.backend, fallbacks = choose_backend(model, options, self.device)
        for fallback in fallbacks:
            log.info("generation: fell back from %s", fallback)
        log.info("generation: %s backend", self.backend)
        check_tensor_parallelism(model, size, self.backend)
        if size > 1:
            log.info("generation: tensor parallel, over %d ranks", size)
        self._why_whole = why_not_streamed(
            partitioned=partitioned, ranks=dist.world_size(), tensor_parallel_size=size, backend=self.backend
        )
        if options.weights == "streamed" and self._why_whole:
            raise InputError(f"--rollout-weights streamed: {self._why_whole}; else give auto")

    def of_modules(self, vocabulary: Vocabulary) -> SessionSource:
        """Return the sessions of a backend that samples from the modules as they are (`OF_MODULES`)."""
        return OF_MODULES[self.backend](base_model(self.model), vocabulary)

    def generator(self, vocabulary: Vocabulary, *, least: Capacity = NO_CAPACITY) -> "Generator":
        """Return the generator of a backend with a KV cache in slots, for the current weights.

        Raises:
            InputError: copies of the weights do not fit in memory.
        """
        from pipeline.generation.generator import Generator

        forward = self._forward()
        forward.refresh()
        log.info("generation: copied weights take %.2f GiB besides the model's own", forward.num_copied_bytes / GIB)
        return Generator(forward, vocabulary, least=least)

    def _forward(self) -> CachedForward:
        if self.backend == "static":
            return StaticCacheForward(self.model)
        from pipeline.generation.forwards.fused import FusedForward
        from pipeline.generation.forwards.fused_weights import DecodeWeights
        from pipeline.generation.forwards.projections import Shard
        from pipeline.generation.forwards.streaming import StreamedWeights, check_streamed_weights_fit

        architecture, group = read_architecture(self.model), self.group
        if self._all_ranks is None:  # weights that were streamed once are always streamed
            whole = FusedForward(DecodeWeights(architecture, Shard(group.rank, group.size)), group)
            if not self._must_stream(whole):
                check_copies_fit(whole.weights.num_bytes_to_copy, self.device)
                return whole
            self._all_ranks = dist.RankGroup(dist.world_size())
        streamed = StreamedWeights(architecture, self._all_ranks)
        check_streamed_weights_fit(streamed, self.device)
        return FusedForward(streamed)

    def _must_stream(self, whole: "FusedForward") -> bool:
        """Decide for all ranks whether weights are streamed. whole: the forward passes without streaming."""
        if self.options.weights == "streamed":
            log.info("generation: weights are streamed, as --rollout-weights says")
            return True
        if not self.options.decides_by_memory(self._why_whole):
            return False
        slot_length = round_up(self.options.max_sequence_length, CACHE_LENGTH_MULTIPLE)
        bytes_per_slot = whole.cache_layout.bytes_per_token * slot_length
        fit = whole_weights_fit(whole.weights.num_bytes_to_copy, bytes_per_slot, self.device)
        streams = dist.max_over_ranks(float(not fit), self.device) > 0
        log.info("generation: weights are %s", "streamed: on some rank they do not fit" if streams else "whole")
        return streams


def check_tensor_parallelism(model: nn.Module, size: int, backend: str) -> None:
    """Raise InputError if `size` ranks cannot share the weights of a model in a rollout."""
    if size == 1:
        return
    if backend != "fused":
        raise InputError(f"--inference-tp-size {size}: needs the fused backend, got {backend}")
    architecture = read_architecture(model)
    if (heads := architecture.num_kv_heads) % size:
        raise InputError(f"--inference-tp-size {size}: must divide the {heads} heads of keys and values")
    if architecture.joins_head_norms:
        kind = base_model(model).config.model_type
        raise InputError(f"--inference-tp-size {size}: {kind} norms the heads of all ranks together")


def session_source(model: nn.Module, vocabulary: Vocabulary) -> SessionSource:
    """Return a source of sessions on a loaded model, by the fastest backend that supports it.

    A model with layers on several devices is sampled by its own forward pass (the eager backend). Adapters that were
    loaded beside their base stay there: other models may have its weights too.
    """
    on_one_device = len({parameter.device for parameter in model.parameters()}) == 1
    options = GenerationOptions(backend="auto" if on_one_device else "eager", merge_lora=False)
    source = WeightSource(model, options)
    return source.of_modules(vocabulary) if source.backend in OF_MODULES else source.generator(vocabulary)
