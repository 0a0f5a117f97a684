"""Sessions of the fused and the static backend: a KV cache in slots, on buffers that all sessions reuse.

scheduler.py assigns responses to slots. Random numbers are keyed by prompt, not by slot: scheduling changes speed,
never tokens.
"""

import logging
from dataclasses import replace

import torch

from pipeline.generation.backends import CachedForward, cached_tokens_that_fit, no_slot_fits
from pipeline.generation.device_work import Lockstep, overlapped_prefill_stream
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE
from pipeline.generation.rollouts import Vocabulary
from pipeline.generation.scheduler import ContinuousBatching
from pipeline.generation.session import NO_CAPACITY, Capacity
from pipeline.generation.slots import GenerationBuffers
from pipeline.tensor_ops import round_up

# New tokens that a KV cache has positions for before it grows: most responses are shorter than their limit. At least
# split_kv.py's MAX_SPLITS * MIN_KEYS_PER_SPLIT, above which its length changes no result. Chosen by hand.
FIRST_NEW_TOKENS = 512

log = logging.getLogger(__name__)


class Generator:
    """A source of sessions over the forward passes of one model, whose ranks compute the same responses together.

    least: the smallest capacity of the first buffers; a larger session gets larger ones. If it is the capacity of the
    largest session, all sessions have the same shapes, hence the same bits in any order. The KV cache begins shorter if
    its length changes no bits, and grows with the responses.
    """

    def __init__(self, forward: CachedForward, vocabulary: Vocabulary, *, least: Capacity = NO_CAPACITY) -> None:
        self.forward, self.vocabulary, self.least = forward, vocabulary, least
        self.group, lockstep = forward.group, forward.lockstep
        self.lockstep = lockstep or Lockstep()
        # Overlapped prefills and decode steps would need one order of collectives on all ranks.
        can_overlap = lockstep is None and self.group.size == 1 and forward.preserves_free_slots
        # Growing captures a decode step: a collective, which ranks in lockstep would not reach at the same step.
        self.grows = forward.can_grow and lockstep is None
        self.stream = overlapped_prefill_stream(forward.device) if can_overlap else None
        self._buffers: GenerationBuffers | None = None

    def session(self, capacity: Capacity) -> ContinuousBatching:
        """Open a session of this capacity, and end the one before it. A collective of ranks that generate together.

        Raises:
            InputError: the memory does not suffice for a single slot.
        """
        buffers = self._buffers_for(self.least.union(capacity))
        return ContinuousBatching(buffers, capacity, lockstep=self.lockstep, stream=self.stream)

    @torch.no_grad()
    def _buffers_for(self, capacity: Capacity) -> GenerationBuffers:
        """Return the buffers if they are large enough, else new ones; in lockstep, if any rank needs new ones."""
        stale = self._buffers is None or not self._buffers.can_serve(capacity)
        # New buffers capture their first decode step, a collective: ranks in lockstep create them together.
        if any(self.lockstep.largest(stale)) or self._buffers is None:
            capacity = capacity if self._buffers is None else self._buffers.capacity.union(capacity)
            self._buffers = None  # frees the old KV cache before the new one is allocated
            capacity = replace(capacity, max_length=round_up(capacity.max_length, CACHE_LENGTH_MULTIPLE))
            rest = capacity.max_new_tokens - FIRST_NEW_TOKENS
            whole = not self.grows or rest <= 0
            cache_length = capacity.max_length if whole else round_up(capacity.max_length - rest, CACHE_LENGTH_MULTIPLE)
            fitting = self.group.least(cached_tokens_that_fit(self.forward), self.forward.device)
            if any(self.lockstep.largest(fitting < capacity.max_length)):
                raise no_slot_fits(self.forward, capacity.max_length)
            self._buffers = GenerationBuffers(
                self.forward, capacity, self.vocabulary, cache_length=cache_length, max_cached_tokens=fitting
            )
            if (num_slots := self._buffers.num_slots) < capacity.num_slots:
                log.warning(
                    "generation: memory for %d slots of %d tokens, not %d; the other responses wait for a free one",
                    num_slots,
                    cache_length,
                    capacity.num_slots,
                )
        return self._buffers
