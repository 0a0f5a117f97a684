"""The actor in its two roles: trained under DeepSpeed, and sampled from with the same weights.

Nothing outside this object knows how generation sees the weights (ZeRO-3's gathered buffers and hooks, caches, LoRA).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline.engine import TrainingEngine
from pipeline.generate import Prompt, RandomKey, Rollout, Sampling, generate
from pipeline.modeling import base_model

log = logging.getLogger(__name__)


class HybridEngine:
    """Samples from the model that `engine` trains."""

    rung = "eager"

    def __init__(self, engine: TrainingEngine, *, eos_ids: frozenset[int], pad_id: int) -> None:
        self.engine = engine
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self._open = False

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Enter generation once per rollout: under ZeRO-3 this is where the weights are gathered."""
        with self.engine.generation():
            self._open = True
            try:
                yield
            finally:
                self._open = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        sampling: Sampling,
        key: RandomKey,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Rollout:
        """Sample responses; only inside `generation()`. LoRA layers are used as they are: nothing is rounded away."""
        if not self._open:
            raise RuntimeError("generate() outside generation(): the weights may be partitioned")
        model: Any = base_model(self.engine.module.model)
        return generate(
            model,
            prompts,
            num_samples=num_samples,
            sampling=sampling,
            key=key,
            eos_ids=self.eos_ids,
            pad_id=self.pad_id,
            should_stop=should_stop,
        )
