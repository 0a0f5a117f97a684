"""The actor in its two roles: trained under DeepSpeed, and sampled from with the same weights.

Nothing outside this object knows how generation sees the weights: ZeRO-3's partitions and hooks, LoRA, tensor-parallel
parts, caches and graphs.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from pipeline import dist
from pipeline.dist import RankGroup
from pipeline.engine.engine import TrainingEngine
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.generation.backends import check_copies_fit, check_stream_fits, choose_rung, whole_weights_fit
from pipeline.generation.eager import generate_batches
from pipeline.generation.options import GenerationOptions, Rung, why_not_streamed
from pipeline.generation.rollouts import Prompt, RandomKey, Rollout, Sampling
from pipeline.generation.static import OwnForward
from pipeline.models.architecture import read_architecture
from pipeline.models.loading import base_model

log = logging.getLogger(__name__)


class HybridEngine:
    """Samples from the model that `engine` trains."""

    def __init__(
        self,
        engine: TrainingEngine,
        *,
        eos_ids: frozenset[int],
        pad_id: int,
        options: GenerationOptions | None = None,
    ) -> None:
        options = options or GenerationOptions()
        self.engine, self.options, self.eos_ids, self.pad_id = engine, options, eos_ids, pad_id
        if dist.world_size() % options.group_size:
            raise InputError(f"--inference_tp_size {options.group_size}: must divide the {dist.world_size()} ranks")
        self.group = dist.RankGroup(options.group_size)
        self._model: Any = engine.module.model
        self._device = next(engine.module.parameters()).device
        self.rung: Rung
        self.rung, passed_over = choose_rung(self._model, options.rung, self._device)
        for line in passed_over:
            log.info("generation: not %s", line)
        log.info("generation: %s rung", self.rung)
        self._check_group()
        if options.weights == "streamed" and (reason := self._why_not_streamed()):
            raise InputError(f"--rollout_weights streamed: {reason}; else give auto")
        self._stream: dist.RankGroup | None = None  # the ranks that share streamed weights
        self._generator: Any = None
        self._open = False

    def _check_group(self) -> None:
        size = self.group.size
        if size == 1:
            return
        config = base_model(self._model).config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if self.rung != "fused":
            raise InputError(f"--inference_tp_size {size}: needs the fused rung, found {self.rung}")
        if heads % size:
            raise InputError(f"--inference_tp_size {size}: must divide the {heads} heads of keys and values")

    def _why_not_streamed(self) -> str | None:
        """What stands against streamed weights, found and wanted."""
        return why_not_streamed(
            partitioned=self.engine.partitions_weights,
            ranks=dist.world_size(),
            group_size=self.group.size,
            rung=self.rung,
        )

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Enter generation once per rollout: the weights are gathered, merged and refreshed here. A collective."""
        with ExitStack() as stack:
            # The fused rung takes its own copy, a layer at a time; the others need the modules whole.
            stack.enter_context(self.engine.generation(gather=self.rung != "fused"))
            if self.rung != "eager":
                self._prepare()
            self._open = True
            try:
                yield
            finally:
                self._open = False
                if self.options.release_cache:
                    self._generator = None

    def _prepare(self) -> None:
        """The decode function, with the weights as they are now."""
        first = self._generator is None
        model = self._made_model() if first else self._generator.model
        if self.rung == "fused":
            model.weights.refresh()
        if first:
            self._generator = self._made_generator(model)
            if self.rung == "fused":
                copied = model.weights.num_copied_bytes / GIB
                log.info("generation: %.2f GiB of weights are copied beside the trained ones", copied)

    def _made_model(self) -> Any:
        """The decode function, its weights not read yet, where they fit."""
        model = decode_function(self._model, self.rung, self.group)
        if self.rung != "fused":
            return model
        if self._stream is None and self._streams(model):
            self._stream = dist.RankGroup(dist.world_size())
        if self._stream is None:
            check_copies_fit(model.weights.num_bytes_to_copy, self._device)
            return model
        model = decode_function(self._model, self.rung, self.group, stream=self._stream)
        check_stream_fits(model.weights, self._device)
        return model

    def _streams(self, whole: Any) -> bool:
        """Whether the ranks share the weights, all or none of them; `whole` would hold them whole."""
        if self.options.weights != "auto" or self._why_not_streamed():
            return self.options.weights == "streamed"
        row = whole.bytes_per_token * self.options.rung.positions
        fit = whole_weights_fit(whole.weights.num_bytes_to_copy, row, self._device)
        streams = dist.max_over_ranks(float(not fit), self._device) > 0
        log.info("generation: weights are %s", "streamed: on some rank they do not fit" if streams else "whole")
        return streams

    def _made_generator(self, model: Any) -> Any:
        from pipeline.generation.generator import Generator

        pace = None
        if self._stream is not None:
            from pipeline.generation.streaming import CommonPace

            pace = CommonPace(model.weights, self._device)
        return Generator(
            model,
            eos_ids=self.eos_ids,
            pad_id=self.pad_id,
            group=self.group,
            positions=self.options.rung.positions,
            slots=self.options.slots * self.group.size,
            pace=pace,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        sampling: Sampling,
        key: RandomKey,
        batch_size: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Rollout:
        """Sample responses; only inside `generation()`.

        Args:
            batch_size: prompts that are generated at once; all where None.

        Raises:
            GenerationStopped: `should_stop` answered True between two tokens (on any rank of the group).
        """
        if not self._open:
            raise RuntimeError("generate() outside generation(): the weights may be partitioned")
        at_once = batch_size or len(prompts)
        if self.rung == "eager":
            return generate_batches(
                base_model(self._model),
                prompts,
                batch_size=at_once,
                num_samples=num_samples,
                sampling=sampling,
                key=key,
                eos_ids=self.eos_ids,
                pad_id=self.pad_id,
                should_stop=should_stop,
            )
        return self._generator.generate(
            prompts,
            num_samples=num_samples,
            num_slots=at_once * num_samples,
            sampling=sampling,
            key=key,
            should_stop=should_stop,
        )


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
