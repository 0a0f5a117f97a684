"""The model as generation sees it, and the buffers of a generation with the CUDA graph over them."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.generation.eager import truncate
from pipeline.generation.rollouts import Sampling


class DecodeFunction(Protocol):
    """The model as generation sees it; `step.DecodeModel` and `own_forward.OwnForward` are such."""

    @property
    def device(self) -> torch.device: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def leaves_free_rows(self) -> bool: ...
    def prepare(self, positions: int) -> None: ...
    def new_cache(self, rows: int, positions: int) -> Any: ...
    def prompt(self, ids: Tensor, lengths: Tensor, cache: Any, *, slots: Tensor, source: Tensor) -> Tensor: ...
    def step(self, tokens: Tensor, lengths: Tensor, active: Tensor, cache: Any) -> Tensor: ...
    def addresses(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """What buffers and graph are made for; `num_slots` as wanted, memory may allow fewer."""

    num_slots: int
    num_rows: int
    sampling: Sampling

    def holds(self, other: "Job") -> bool:
        """Whether what was made for this one serves the other too."""
        enough = self.num_slots >= other.num_slots and self.num_rows >= other.num_rows
        return enough and self.sampling == other.sampling

    def joined(self, other: "Job") -> "Job":
        """A job that holds both, where they sample alike; else the other one."""
        if self.sampling != other.sampling:
            return other
        rows = max(self.num_rows, other.num_rows)
        return Job(max(self.num_slots, other.num_slots), rows, self.sampling)


class Arena:
    """Buffers of a job and the graph over them; kept for all jobs that they hold."""

    def __init__(self, model: DecodeFunction, job: Job, size: tuple[int, int], *, eos: Tensor, pad_id: int) -> None:
        device = model.device
        self.job, self.eos, self.pad_id, self._model = job, eos, pad_id, model
        self.num_slots, self.room = size
        model.prepare(self.room)
        self.cache = model.new_cache(self.num_slots, self.room)
        self.slots = Slots.empty(self.num_slots, device)
        shape = (job.num_rows, job.sampling.max_new_tokens)
        self.written = Written.empty(shape, pad_id=pad_id, device=device)
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self._everywhere = torch.arange(self.num_slots, device=device)
        self.addresses = model.addresses()
        self._graph = self._captured() if device.type == "cuda" else None

    def fits(self, job: Job, room: int) -> bool:
        return self.job.holds(job) and self.room >= room and self.addresses == self._model.addresses()

    def clear(self) -> None:
        """Nothing drawn, all slots free."""
        self.slots.active.zero_()
        self.written.tokens.fill_(self.pad_id)
        for counts in (self.written.log_probs, self.written.lengths, self.written.finished):
            counts.zero_()

    def draw(self, logits: Tensor, index: Tensor) -> None:
        draw_tokens(
            logits, index, self.slots, self.written, uniforms=self.uniforms, eos=self.eos, sampling=self.job.sampling
        )

    def advance(self, steps: int) -> None:
        """`steps` decode steps of all active rows."""
        for _ in range(steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def _step(self) -> None:
        slots = self.slots
        logits = self._model.step(slots.tokens, slots.lengths, slots.active, self.cache)
        slots.lengths.add_(slots.active)
        self.draw(logits, self._everywhere)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """One step as a graph. It is tried first on a side stream, with no row active: nothing is written."""
        self._step()  # here, so that a cache that is made at its first use belongs to this stream
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may prepare data meanwhile: what they ask of the device does not belong to the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph


BLOCK = 2048


@dataclass(frozen=True, slots=True)
class Slots:
    """The rows in the graph, (M,) each: what a decode step reads and writes.

    tokens int64: the last drawn. lengths int32: keys in the cache. active int32: 0 = finished or empty. row int32: the
    response being written. place int32: its next position.
    """

    tokens: Tensor
    lengths: Tensor
    active: Tensor
    row: Tensor
    place: Tensor

    @classmethod
    def empty(cls, num_slots: int, device: torch.device) -> "Slots":
        small = [torch.zeros(num_slots, dtype=torch.int32, device=device) for _ in range(4)]
        return cls(torch.zeros(num_slots, dtype=torch.int64, device=device), *small)


@dataclass(frozen=True, slots=True)
class Written:
    """Responses being written: tokens (R, T) int64, log_probs (R, T) fp32, lengths (R,) int32, finished (R,) int32."""

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    finished: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], *, pad_id: int, device: torch.device) -> "Written":
        counts = [torch.zeros(shape[0], dtype=torch.int32, device=device) for _ in range(2)]
        tokens = torch.full(shape, pad_id, dtype=torch.int64, device=device)
        return cls(tokens, torch.zeros(shape, device=device), *counts)


@triton.jit
def _block_statistics(logits, highest, total, temperature, width, num_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    c = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * width + c, mask=c < width, other=float("-inf")).to(tl.float32) / temperature
    top = tl.max(x, 0)
    # A block that top-k or top-p emptied: exp(-inf + inf) would be NaN.
    sum_of_block = tl.where(top == float("-inf"), 0.0, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))
    tl.store(highest + row * num_blocks + block, top)
    tl.store(total + row * num_blocks + block, sum_of_block)


@triton.jit
def _draw(
    kept, kept_highest, kept_total, logits, highest, total, slots, uniforms, eos,
    tokens, active, response, place, out_tokens, out_log_probs, out_lengths, out_finished,
    temperature, kept_temperature, width, num_blocks, max_new,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, NUM_EOS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    slot = tl.load(slots + index)
    if tl.load(active + slot) == 0:
        return
    row, at = tl.load(response + slot).to(tl.int64), tl.load(place + slot)
    b = tl.arange(0, BLOCKS)
    inside = b < num_blocks
    tops = tl.load(kept_highest + index * num_blocks + b, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    sums = tl.load(kept_total + index * num_blocks + b, mask=inside, other=0.0).to(tl.float64)
    sums = sums * tl.exp(tops - top).to(tl.float64)
    ends = tl.cumsum(sums, 0)
    mass = tl.sum(sums, 0)
    target = tl.load(uniforms + row * max_new + at) * mass
    # The block whose end first lies beyond the target; rounding never leads past the last block that has any mass.
    chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.max(tl.where(sums > 0, b, 0), 0))
    before = tl.sum(tl.where(b < chosen, sums, 0.0), 0)
    c = tl.arange(0, BLOCK)
    v = chosen * BLOCK + c
    x = tl.load(kept + index.to(tl.int64) * width + v, mask=v < width, other=float("-inf")).to(tl.float32)
    p = tl.exp(x / kept_temperature - top).to(tl.float64)
    found = tl.sum((before + tl.cumsum(p, 0) <= target).to(tl.int32), 0)
    token = (chosen * BLOCK + tl.minimum(found, tl.max(tl.where(p > 0, c, 0), 0))).to(tl.int64)
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
    tl.store(place + slot, at + 1)
    tl.store(active + slot, tl.where((ended == 1) | (at + 1 == max_new), 0, 1))


def draw_tokens(
    logits: Tensor, index: Tensor, slots: Slots, written: Written, *, uniforms: Tensor, eos: Tensor, sampling: Sampling
) -> None:
    """Draw a token for each row of logits and move the rows on; rows that are not active stay as they are.

    Args:
        logits: (M, V), contiguous. index: (M,) int64, the slot of each row of logits.
        uniforms: (R, T) float64 in (0, 1). eos: int64 ids, padded with -1 to a power of two.
    """
    own = _statistics(logits, sampling.temperature)
    kept, kept_own, kept_temperature = logits, own, sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        scaled = logits.float() / sampling.temperature
        kept, kept_temperature = truncate(scaled, top_p=sampling.top_p, top_k=sampling.top_k), 1.0
        kept_own = _statistics(kept, 1.0)
    num_blocks = own[0].shape[1]
    _draw[(len(logits),)](
        kept, *kept_own, logits, *own, index, uniforms, eos,
        slots.tokens, slots.active, slots.row, slots.place,
        written.tokens, written.log_probs, written.lengths, written.finished,
        sampling.temperature, kept_temperature, logits.shape[1], num_blocks, sampling.max_new_tokens,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), NUM_EOS=len(eos),
    )  # fmt: skip


def _statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(M, blocks) fp32: the highest scaled logit of each block of the vocabulary, and its sum of exponentials."""
    rows, width = logits.shape
    num_blocks = triton.cdiv(width, BLOCK)
    highest, total = (torch.empty(rows, num_blocks, device=logits.device) for _ in range(2))
    _block_statistics[(rows, num_blocks)](logits, highest, total, temperature, width, num_blocks, BLOCK=BLOCK)
    return highest, total


def padded_eos(eos_ids: frozenset[int], device: torch.device) -> Tensor:
    """EOS ids as the kernel wants them: int64, filled with -1 up to a power of two."""
    ids = sorted(eos_ids)
    width = triton.next_power_of_2(max(1, len(ids)))
    return torch.tensor([*ids, *[-1] * (width - len(ids))], dtype=torch.int64, device=device)
