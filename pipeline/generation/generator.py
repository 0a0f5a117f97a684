"""Sampling with a KV cache in slots, for the fused and the static backend: one call in, one rollout out.

The generator keeps its buffers from call to call; scheduler.py decides which response is in which slot. Which slot that
is changes none of a response's random numbers, so that the work follows real lengths and the tokens do not.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from pipeline.dist import RankGroup
from pipeline.generation.backends import CachedForward, cached_tokens_that_fit, no_slot_fits
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE
from pipeline.generation.rollouts import Prompt, RandomKey, Rollout, Sampling, rollout_uniforms
from pipeline.generation.scheduler import ContinuousBatching, Lockstep, overlapped_prefill_stream
from pipeline.generation.slots import GenerationBuffers, GenerationRequest, padded_eos
from pipeline.tensor_ops import round_up

# New tokens that a KV cache which can grow has positions for at first: responses that may be longer are often shorter.
# At least split_kv.py's MAX_SPLITS * MIN_KEYS_PER_SPLIT, above which its length changes no result. Chosen by hand.
FIRST_NEW_TOKENS = 512

log = logging.getLogger(__name__)


class Generator:
    """A sampler over the forward passes of one model; the ranks of `group` compute the same responses together.

    max_length, min_slots: the least size of the first buffers. Larger calls get larger ones; with the least size set
    to the largest call, a smaller call runs at the same shapes, and gives the same bits, whichever came first. The KV
    cache begins shorter where its length changes no bits, and grows with the responses.
    lockstep: the ranks whose forward passes are collectives although each has responses of its own (streamed weights);
    None where ranks run freely.
    """

    def __init__(
        self,
        forward: CachedForward,
        *,
        eos_ids: frozenset[int],
        pad_id: int,
        group: RankGroup,
        max_length: int = 0,
        min_slots: int = 0,
        lockstep: Lockstep | None = None,
    ) -> None:
        self.forward, self.pad_id, self.group = forward, pad_id, group
        self.max_length, self.min_slots = max_length, min_slots
        self.lockstep = lockstep or Lockstep()
        # Collectives of prefills and of decode steps would need one order on all ranks.
        can_overlap = lockstep is None and group.size == 1 and forward.preserves_free_slots
        # Growing captures a decode step, which would be a collective of ranks that are not at the same step.
        self.grows = forward.can_grow and lockstep is None
        self.stream = overlapped_prefill_stream(forward.device) if can_overlap else None
        self._eos = padded_eos(eos_ids, forward.device)
        self._buffers: GenerationBuffers | None = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        num_slots: int,
        sampling: Sampling,
        key: RandomKey,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Rollout:
        """Sample `num_samples` responses to each prompt, `num_slots` of them at a time.

        Raises:
            GenerationStopped: `should_stop` answered True, on any rank of the group or in lockstep with this one.
        """
        device = self.forward.device
        prompt_ids = torch.tensor([prompt.prompt_id for prompt in prompts], dtype=torch.int64, device=device)
        prompt_ids = prompt_ids.repeat_interleave(num_samples)
        sample_index = torch.arange(len(prompt_ids), device=device) % num_samples
        rows = [torch.as_tensor(prompt.ids, dtype=torch.int64) for prompt in prompts]
        num_rows = len(prompt_ids)
        request = GenerationRequest(max(self.min_slots, min(num_slots, num_rows)), num_rows, sampling)
        longest = max(map(len, rows)) + sampling.max_new_tokens
        buffers = self._buffers_for(request, max(self.max_length, longest))
        buffers.reset()
        uniforms = rollout_uniforms(key, prompt_ids, sample_index, sampling.max_new_tokens)
        buffers.responses.uniforms[:num_rows].copy_(uniforms)
        scheduler = ContinuousBatching(
            buffers, rows, num_samples, group=self.group, lockstep=self.lockstep, stream=self.stream
        )
        scheduler.run(lambda: self.group.any(should_stop(), device))
        self.group.check_same(buffers.responses.tokens)
        # The next call overwrites the buffers: one copy of them all, not one per row.
        responses = buffers.responses
        tokens, log_probs = responses.tokens[:num_rows].clone(), responses.log_probs[:num_rows].clone()
        lengths = responses.lengths[:num_rows].tolist()
        on_device = torch.cat(rows).to(device).split([len(row) for row in rows])
        return Rollout(
            prompts=[row for row in on_device for _ in range(num_samples)],
            responses=[row[:length] for row, length in zip(tokens, lengths, strict=True)],
            log_probs=[row[:length] for row, length in zip(log_probs, lengths, strict=True)],
            finished=responses.finished[:num_rows].bool(),
            prompt_ids=prompt_ids,
            sample_index=sample_index,
        )

    def _buffers_for(self, request: GenerationRequest, max_length: int) -> GenerationBuffers:
        """Return the buffers if they serve the request, else new ones; in lockstep, if any rank needs new ones."""
        stale = self._buffers is None or not self._buffers.can_serve(request, max_length)
        # New buffers run forward passes, which are collectives: ranks in lockstep make theirs together.
        if any(self.lockstep.largest(stale)) or self._buffers is None:
            if self._buffers is not None:
                request = self._buffers.request.union(request)
                max_length = max(max_length, self._buffers.max_length)
            self._buffers = None  # frees the old KV cache before the new one is allocated
            max_length = round_up(max_length, CACHE_LENGTH_MULTIPLE)
            rest = request.sampling.max_new_tokens - FIRST_NEW_TOKENS
            first_length = round_up(max_length - rest, CACHE_LENGTH_MULTIPLE) if self.grows and rest > 0 else max_length
            fitting = self.group.least(cached_tokens_that_fit(self.forward), self.forward.device)
            if any(self.lockstep.largest(fitting < max_length)):
                raise no_slot_fits(self.forward, max_length)
            self._buffers = GenerationBuffers(
                self.forward, request, cache_length=first_length, max_length=max_length, max_cached_tokens=fitting,
                eos=self._eos, pad_id=self.pad_id,
            )  # fmt: skip
            if (num_slots := self._buffers.num_slots) < request.num_slots:
                log.warning(
                    "generation: memory for %d slots of %d tokens, not %d; the other responses wait for a free one",
                    num_slots,
                    first_length,
                    request.num_slots,
                )
        return self._buffers
