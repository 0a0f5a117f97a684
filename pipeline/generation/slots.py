"""The buffers of fast generation: the KV cache of M slots, their state, and the CUDA graph of a decode step.

The generator and its scheduler use them. All state of a decode step is in device memory, so that a captured graph can
replay the step without the host. V is the size of the vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.generation.backends import CachedForward
from pipeline.generation.device_work import second_stream
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE
from pipeline.generation.rollouts import Truncation, Vocabulary
from pipeline.generation.session import Capacity, Request
from pipeline.kernels.token_draw import GREEDY, Slots, draw_tokens, padded_eos, slot_uniforms
from pipeline.random_numbers import key_and_stream
from pipeline.tensor_ops import round_up


class GenerationBuffers:
    """KV cache, state of the slots and CUDA graph, reused by all sessions that fit into `capacity`.

    forward: the forward passes of the model.
    capacity: the largest session that the buffers serve.
    vocabulary: ids that end a response, and ids that can be drawn.
    cache_length: current positions of a slot; `grow` adds more, up to `capacity.max_length`.
    max_cached_tokens: tokens that the device has memory for, over all slots; at least `capacity.max_length`.
    num_slots: current number of slots, at most that of the capacity.
    cache: the KV cache, of the type that `forward` creates.
    slots: state of the slots.
    truncation: the union of what responses since the first session needed; draws apply it.
    """

    def __init__(
        self,
        forward: CachedForward,
        capacity: Capacity,
        vocabulary: Vocabulary,
        *,
        cache_length: int,
        max_cached_tokens: int,
    ) -> None:
        device = forward.device
        self.capacity, self.max_cached_tokens, self.vocabulary = capacity, max_cached_tokens, vocabulary
        self.cache_length, self.forward = cache_length, forward
        self.num_slots = num_slots = min(capacity.num_slots, self.slots_that_fit(cache_length))
        self._has_lost_slots = False
        self._eos = padded_eos(vocabulary.eos_ids, device)
        forward.prepare(capacity.max_length)
        self.cache = forward.new_cache(num_slots, cache_length)
        self.slots = Slots.empty(num_slots, capacity.max_new_tokens, device)
        self._all_slots = torch.arange(num_slots, device=device)
        self._addresses = forward.addresses()
        self.truncation = Truncation()
        self._graph: torch.cuda.CUDAGraph | None = None

    def can_serve(self, capacity: Capacity) -> bool:
        """Return True if these buffers are large enough, and the weights are still where the graph reads them."""
        large_enough = self.capacity.union(capacity) == self.capacity
        # Every session begins with the same number of slots, so that its bits do not depend on earlier sessions.
        return large_enough and not self._has_lost_slots and self._addresses == self.forward.addresses()

    def slots_that_fit(self, cache_length: int) -> int:
        """Return the number of slots of `cache_length` positions that the device has memory for."""
        return self.max_cached_tokens // cache_length

    def length_to_grow_to(self, length: int) -> int:
        """Return the new positions of a slot if `length` are needed: half more than now, at most `capacity.max_length`.

        If half more would cost slots but `length` would not, return the most positions that cost none.
        """
        needed, ample = (
            min(round_up(positions, CACHE_LENGTH_MULTIPLE), self.capacity.max_length)
            for positions in (length, self.cache_length * 3 // 2)
        )
        for_all_slots = self.max_cached_tokens // self.num_slots // CACHE_LENGTH_MULTIPLE * CACHE_LENGTH_MULTIPLE
        return max(needed, min(ample, for_all_slots) if needed <= for_all_slots else ample)

    def grow(self, cache_length: int, slots: Sequence[int]) -> None:
        """Retain only these slots, and make the KV cache longer. Work on other streams that uses it must be over."""
        self._has_lost_slots |= len(slots) < self.num_slots
        self.cache_length, self.num_slots = cache_length, len(slots)
        self._graph = None  # it reads the shorter cache
        self.cache.grow(cache_length, slots)
        self.slots = self.slots.select(slots)
        self._all_slots = torch.arange(len(slots), device=self.forward.device)

    def truncate(self, truncation: Truncation) -> None:
        """Apply this truncation too in all later draws. Work on other streams must be over."""
        if self.truncation | truncation != self.truncation:
            self.truncation |= truncation
            self._graph = None  # it was captured without this truncation

    def draw(self, logits: Tensor, rows: Tensor, index: Tensor, uniforms: Tensor | None = None) -> None:
        """Draw the next token of the slots `index` (N,) int64 from the rows (N,) int64 of logits (P, V).

        uniforms: (N,) float64 in [0, 1); None: those of the slots' random keys.
        """
        slots, num_known, masked = self.slots, self.vocabulary.num_tokens or logits.shape[1], None
        if self.truncation:
            masked = logits[rows].float() / slots.temperature[index].unsqueeze(1)
            masked[:, num_known:] = float("-inf")
            masked = self.truncation.apply(masked, slots.top_p[index], slots.top_k[index])
        draw_tokens(
            logits,
            rows,
            index,
            slots,
            uniforms=slot_uniforms(slots, index) if uniforms is None else uniforms,
            eos=self._eos,
            num_known=num_known,
            masked=masked,
        )

    def decode(self, num_steps: int) -> None:
        """Enqueue `num_steps` decode steps of all active slots; the first one captures the graph."""
        if num_steps and self._graph is None:
            self._capture()
        for _ in range(num_steps):
            if self._graph is None:
                self._decode_step()
            else:
                self._graph.replay()

    def _decode_step(self) -> None:
        slots = self.slots
        logits = self.forward.decode_step(slots.tokens, slots.lengths, slots.active, self.cache)
        slots.lengths.add_(slots.active)
        self.draw(logits, self._all_slots, self._all_slots)

    def _capture(self) -> None:
        """Capture one decode step in a CUDA graph if device and model allow one."""
        if self.forward.device.type == "cuda" and self.forward.fits_graph:
            active = self.slots.active.clone()
            self.slots.active.zero_()
            self._graph = self._captured_graph()
            self.slots.active.copy_(active)

    def _captured_graph(self) -> torch.cuda.CUDAGraph:
        """Capture one decode step, after two runs to warm up; no slot is active, so that they write nothing."""
        self._decode_step()  # a cache that is allocated at its first use then belongs to this stream
        side = second_stream(self.forward.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may prepare data meanwhile; their CUDA calls must not be captured.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._decode_step()
        return graph


def slot_settings(requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Return the arguments of `Slots.start` for N requests: (5, N) int64 and (2, N) fp32."""
    settings, numbers = [], []
    for request in requests:
        temperature, top_p, top_k = request.sampling.drawn_with
        prompt_id, key = request.prompt.prompt_id, request.key
        random_key, stream = key_and_stream(key.seed, key.purpose, key.epoch, prompt_id, request.sample)
        stream = GREEDY if request.sampling.is_greedy else stream
        settings.append((request.sampling.max_new_tokens, top_k, random_key, prompt_id, stream))
        numbers.append((temperature, top_p))
    return torch.tensor(settings, dtype=torch.int64).T, torch.tensor(numbers, dtype=torch.float32).T
