"""The buffers of fast generation: slots of the KV cache, the responses being written, the draw, and the CUDA graph.

For the generator and its scheduler; all state of a decode step is in device memory, so that a captured graph replays it
without the host. M slots, each with at most one response; R responses of at most T tokens in one call; V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.generation.backends import CachedForward
from pipeline.generation.eager import truncate
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE
from pipeline.generation.rollouts import Sampling
from pipeline.tensor_ops import round_up

# Logits that one program of the kernels reads. Chosen by hand.
VOCABULARY_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The size of a call of `generate`: R = `num_rows` responses, and at most `num_slots` of them at a time."""

    num_slots: int
    num_rows: int
    sampling: Sampling

    def union(self, other: "GenerationRequest") -> "GenerationRequest":
        """Return a request that covers both, where they sample alike; else `other`."""
        if self.sampling != other.sampling:
            return other
        rows = max(self.num_rows, other.num_rows)
        return GenerationRequest(max(self.num_slots, other.num_slots), rows, self.sampling)


@dataclass(frozen=True, slots=True)
class Slots:
    """The state of M slots that a decode step reads and writes.

    tokens: (M,) int64, the last token drawn.
    lengths: (M,) int32, tokens in the KV cache.
    active: (M,) int32, 0 for a free slot.
    response: (M,) int32, number of the response that is being written.
    position: (M,) int32, position of its next token in the response.
    """

    tokens: Tensor
    lengths: Tensor
    active: Tensor
    response: Tensor
    position: Tensor

    @classmethod
    def empty(cls, num_slots: int, device: torch.device) -> "Slots":
        small = [torch.zeros(num_slots, dtype=torch.int32, device=device) for _ in range(4)]
        return cls(torch.zeros(num_slots, dtype=torch.int64, device=device), *small)

    def select(self, slots: Sequence[int]) -> "Slots":
        """Return the state of these slots alone."""
        index = torch.tensor(list(slots), device=self.tokens.device)
        return Slots(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class ResponseBuffers:
    """The R responses that are being written, of T tokens at most.

    tokens: (R, T) int64.
    log_probs: (R, T) fp32.
    uniforms: (R, T) float64, the random numbers in (0, 1) that the tokens are drawn with.
    lengths: (R,) int32.
    finished: (R,) int32.
    """

    tokens: Tensor
    log_probs: Tensor
    uniforms: Tensor
    lengths: Tensor
    finished: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], *, pad_id: int, device: torch.device) -> "ResponseBuffers":
        counts = [torch.zeros(shape[0], dtype=torch.int32, device=device) for _ in range(2)]
        tokens = torch.full(shape, pad_id, dtype=torch.int64, device=device)
        uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(tokens, torch.zeros(shape, device=device), uniforms, *counts)


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream per process: torch keeps memory, and cuBLAS a workspace, for each stream ever used."""
    return torch.cuda.Stream(device)


class GenerationBuffers:
    """KV cache, sampling state and CUDA graph of a request; reused by all requests that they cover.

    cache_length: positions of a slot now. max_length: what `grow` may make of it, the longest prompt and response.
    max_cached_tokens: what the device has memory for, in all slots together; at least max_length.
    """

    def __init__(
        self,
        forward: CachedForward,
        request: GenerationRequest,
        *,
        cache_length: int,
        max_length: int,
        max_cached_tokens: int,
        eos: Tensor,
        pad_id: int,
    ) -> None:
        device = forward.device
        self.request, self.max_cached_tokens = request, max_cached_tokens
        self.cache_length, self.max_length = cache_length, max_length
        self.num_slots = num_slots = min(request.num_slots, self.slots_that_fit(cache_length))
        self._has_lost_slots = False
        self.eos, self.pad_id, self.forward = eos, pad_id, forward
        forward.prepare(max_length)
        self.cache = forward.new_cache(num_slots, cache_length)
        self.slots = Slots.empty(num_slots, device)
        shape = (request.num_rows, request.sampling.max_new_tokens)
        self.responses = ResponseBuffers.empty(shape, pad_id=pad_id, device=device)
        self._all_slots = torch.arange(num_slots, device=device)
        self._addresses = forward.addresses()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture()

    def can_serve(self, request: GenerationRequest, max_length: int) -> bool:
        """Return True where these buffers are large enough, and the weights are where the graph reads them."""
        large_enough = self.request.union(request) == self.request and self.max_length >= max_length
        # A call begins with as many slots as the first one did: its bits do not depend on the calls before it.
        return large_enough and not self._has_lost_slots and self._addresses == self.forward.addresses()

    def slots_that_fit(self, cache_length: int) -> int:
        """Return for how many slots of `cache_length` positions the device has memory."""
        return self.max_cached_tokens // cache_length

    def length_to_grow_to(self, length: int) -> int:
        """Return how many positions slots get where `length` are needed: half more than now, and at most max_length.

        Not half more where that would cost slots, and `length` alone does not.
        """
        needed, ample = (
            min(round_up(positions, CACHE_LENGTH_MULTIPLE), self.max_length)
            for positions in (length, self.cache_length * 3 // 2)
        )
        for_all_slots = self.max_cached_tokens // self.num_slots // CACHE_LENGTH_MULTIPLE * CACHE_LENGTH_MULTIPLE
        return max(needed, min(ample, for_all_slots) if needed <= for_all_slots else ample)

    def grow(self, cache_length: int, slots: Sequence[int]) -> None:
        """Keep these slots alone, and make the KV cache longer.

        Work on other streams that uses the cache must have been waited for.
        """
        self._has_lost_slots |= len(slots) < self.num_slots
        self.cache_length, self.num_slots = cache_length, len(slots)
        self._graph = None  # it reads the shorter one
        self.cache.grow(cache_length, slots)
        self.slots = self.slots.select(slots)
        self._all_slots = torch.arange(len(slots), device=self.forward.device)
        self._capture()

    def reset(self) -> None:
        """Free all slots and empty all responses."""
        self.slots.active.zero_()
        self.responses.tokens.fill_(self.pad_id)
        for counts in (self.responses.log_probs, self.responses.lengths, self.responses.finished):
            counts.zero_()

    def draw(self, logits: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Draw the next token of `slots` (N,) int64 from the rows (N,) int64 of logits (P, V)."""
        draw_tokens(logits, rows, slots, self.slots, self.responses, eos=self.eos, sampling=self.request.sampling)

    def decode(self, num_steps: int) -> None:
        """Enqueue `num_steps` decode steps of all active slots."""
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
        """Capture one decode step in a CUDA graph where there can be one."""
        if self.forward.device.type == "cuda" and self.forward.fits_graph:
            active = self.slots.active.clone()
            self.slots.active.zero_()
            self._graph = self._captured_graph()
            self.slots.active.copy_(active)

    def _captured_graph(self) -> torch.cuda.CUDAGraph:
        """Capture one decode step, after two runs to warm up; no slot is active, so that they write nothing."""
        self._decode_step()  # on this stream, which then owns a cache that is allocated at its first use
        side = second_stream(self.forward.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._decode_step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may prepare data meanwhile: their CUDA calls are not part of the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._decode_step()
        return graph


@triton.jit
def _block_statistics(logits, highest, total, temperature, width, num_known, num_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    c = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * width + c, mask=c < num_known, other=float("-inf"))
    x = x.to(tl.float32) / temperature
    top = tl.max(x, 0)
    # A block without a token that is kept: exp(-inf + inf) would be NaN.
    sum_of_block = tl.where(top == float("-inf"), 0.0, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    tl.store(highest + row * num_blocks + block, top)
    tl.store(total + row * num_blocks + block, sum_of_block)


@triton.jit
def _draw(
    kept, kept_highest, kept_total, logits, highest, total, rows, slots, uniforms, eos,
    tokens, active, response, position, out_tokens, out_log_probs, out_lengths, out_finished,
    temperature, kept_temperature, width, num_known, num_blocks, max_new,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, NUM_EOS: tl.constexpr,
):  # fmt: skip
    """Invert the cumulative distribution of `kept`, what top-k and top-p keep of `logits`; one program per row.

    Columns from `num_known` on are never drawn. The log-probability is that of `logits`, which are not truncated.
    """
    slot, index = tl.load(slots + tl.program_id(0)), tl.load(rows + tl.program_id(0))
    if tl.load(active + slot) == 0:
        return
    row, at = tl.load(response + slot).to(tl.int64), tl.load(position + slot)
    b = tl.arange(0, BLOCKS)
    inside = b < num_blocks
    tops = tl.load(kept_highest + index * num_blocks + b, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    sums = tl.load(kept_total + index * num_blocks + b, mask=inside, other=0.0).to(tl.float64)
    sums = sums * tl.exp(tops - top).to(tl.float64)
    ends = tl.cumsum(sums, 0)
    mass = tl.sum(sums, 0)
    target = tl.load(uniforms + row * max_new + at) * mass
    # The block whose end first lies beyond the target; rounding never exceeds the last block that has any mass.
    chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.max(tl.where(sums > 0, b, 0), 0))
    before = tl.sum(tl.where(b < chosen, sums, 0.0), 0)
    c = tl.arange(0, BLOCK)
    v = chosen * BLOCK + c
    x = tl.load(kept + index.to(tl.int64) * width + v, mask=v < num_known, other=float("-inf")).to(tl.float32)
    p = tl.exp(x / kept_temperature - top).to(tl.float64)
    column = tl.sum((before + tl.cumsum(p, 0) <= target).to(tl.int32), 0)
    token = (chosen * BLOCK + tl.minimum(column, tl.max(tl.where(p > 0, c, 0), 0))).to(tl.int64)
    all_tops = tl.load(highest + index * num_blocks + b, mask=inside, other=float("-inf"))
    all_top = tl.max(all_tops, 0)
    all_sums = tl.load(total + index * num_blocks + b, mask=inside, other=0.0) * tl.exp(all_tops - all_top)
    logit = tl.load(logits + index.to(tl.int64) * width + token).to(tl.float32) / temperature
    e = tl.arange(0, NUM_EOS)
    ended = tl.max((tl.load(eos + e) == token).to(tl.int32), 0)
    tl.store(out_tokens + row * max_new + at, token)
    tl.store(out_log_probs + row * max_new + at, logit - all_top - tl.log(tl.sum(all_sums, 0)))
    tl.store(out_lengths + row, at + 1)
    tl.store(out_finished + row, ended)
    tl.store(tokens + slot, token)
    tl.store(position + slot, at + 1)
    tl.store(active + slot, tl.where((ended == 1) | (at + 1 == max_new), 0, 1))


def draw_tokens(
    logits: Tensor,
    rows: Tensor,
    index: Tensor,
    slots: Slots,
    responses: ResponseBuffers,
    *,
    eos: Tensor,
    sampling: Sampling,
) -> None:
    """Draw a token for each of N slots and write it to the slot and its response; slots that are not active stay.

    Args:
        logits: (P, V), contiguous. rows, index: (N,) int64, slot index[i] draws from row rows[i] of the logits.
        eos: int64 ids, padded with -1 to a power of two.
    """
    width = logits.shape[1]
    num_known = min(sampling.num_tokens or width, width)
    statistics = _block_softmax_statistics(logits, sampling.temperature, width)
    kept, kept_statistics, kept_temperature = logits, statistics, sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        scaled = logits.float() / sampling.temperature
        scaled[:, num_known:] = float("-inf")
        kept, kept_temperature = truncate(scaled, top_p=sampling.top_p, top_k=sampling.top_k), 1.0
    if kept is not logits or num_known < width:
        kept_statistics = _block_softmax_statistics(kept, kept_temperature, num_known)
    num_blocks = statistics[0].shape[1]
    _draw[(len(index),)](
        kept, *kept_statistics, logits, *statistics, rows, index, responses.uniforms, eos,
        slots.tokens, slots.active, slots.response, slots.position,
        responses.tokens, responses.log_probs, responses.lengths, responses.finished,
        sampling.temperature, kept_temperature, width, num_known, num_blocks, sampling.max_new_tokens,
        BLOCK=VOCABULARY_BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), NUM_EOS=len(eos),
    )  # fmt: skip


def _block_softmax_statistics(logits: Tensor, temperature: float, num_known: int) -> tuple[Tensor, Tensor]:
    """Return the highest scaled logit of each vocabulary block and its sum of exponentials, (N, blocks) fp32 each.

    Columns from `num_known` on count as -inf.
    """
    rows, width = logits.shape
    num_blocks = triton.cdiv(width, VOCABULARY_BLOCK)
    highest, total = (torch.empty(rows, num_blocks, device=logits.device) for _ in range(2))
    _block_statistics[(rows, num_blocks)](
        logits, highest, total, temperature, width, num_known, num_blocks, BLOCK=VOCABULARY_BLOCK
    )
    return highest, total


def padded_eos(eos_ids: frozenset[int], device: torch.device) -> Tensor:
    """Return the EOS ids as int64, padded with -1 to a power of two for the kernel."""
    ids = sorted(eos_ids)
    width = triton.next_power_of_2(max(1, len(ids)))
    return torch.tensor([*ids, *[-1] * (width - len(ids))], dtype=torch.int64, device=device)
