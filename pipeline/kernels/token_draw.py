"""The draw of the next token of each slot, with the settings and random numbers of the response in that slot.

All state is in device memory, so that a captured CUDA graph replays a draw without the host. Shapes: M slots, each with
at most one response of at most T tokens; V vocabulary, which kernels read in blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of logits that one program reads. Chosen by hand.
VOCABULARY_BLOCK = 2048
GREEDY = -1  # value of `stream` for greedy decoding: the draw takes the first token that top_k and top_p retain


@dataclass(frozen=True, slots=True)
class Slots:
    """The state of M slots: the unfinished responses, and the sampling settings of each.

    tokens: (M,) int64, the last token drawn.
    lengths: (M,) int32, tokens in the KV cache.
    active: (M,) int32, 0 for a free slot.
    position: (M,) int32, position of the next token in the response.
    ended: (M,) int32, 1 = the last token is an EOS token.
    limit: (M,) int64, most tokens of the response.
    top_k: (M,) int64, number of most likely tokens that can be drawn; 0 = all.
    random_key: (M,) int64, the 64 bits of `random_numbers.derive_key`.
    prompt_id: (M,) int64, part of the counter of the random numbers, as are `stream` and `position`.
    stream: (M,) int64, epoch << 12 | sample index; GREEDY for greedy decoding.
    temperature: (M,) fp32, divisor of the logits.
    top_p: (M,) fp32, probability of the nucleus; 1 = all tokens.
    written: (M, T) int64, the tokens of the responses.
    log_probs: (M, T) fp32, log-probabilities of the tokens at the temperature, over the whole vocabulary.
    """

    tokens: Tensor
    lengths: Tensor
    active: Tensor
    position: Tensor
    ended: Tensor
    limit: Tensor
    top_k: Tensor
    random_key: Tensor
    prompt_id: Tensor
    stream: Tensor
    temperature: Tensor
    top_p: Tensor
    written: Tensor
    log_probs: Tensor

    @classmethod
    def empty(cls, num_slots: int, max_new_tokens: int, device: torch.device) -> "Slots":
        """Return free slots for responses of at most `max_new_tokens` tokens."""

        def columns(count: int, dtype: torch.dtype) -> list[Tensor]:
            return [torch.zeros(num_slots, dtype=dtype, device=device) for _ in range(count)]

        wide = [
            torch.zeros(num_slots, max_new_tokens, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32)
        ]
        token, settings, numbers = columns(1, torch.int64), columns(5, torch.int64), columns(2, torch.float32)
        return cls(*token, *columns(4, torch.int32), *settings, *numbers, *wide)

    def select(self, slots: Sequence[int]) -> "Slots":
        """Return a copy of the state of these slots."""
        index = torch.tensor(list(slots), device=self.tokens.device)
        return Slots(*(getattr(self, field.name)[index] for field in fields(self)))

    def start(self, index: Tensor, lengths: Tensor, settings: Tensor, numbers: Tensor) -> None:
        """Start responses in the slots `index` (N,) int64, after prompts of `lengths` (N,) int32 tokens.

        Args:
            settings: (5, N) int64: limit, top_k, random key, prompt id and stream.
            numbers: (2, N) fp32: temperature and top_p.
        """
        self.lengths[index] = lengths
        self.position[index] = 0
        self.active[index] = 1
        columns = (self.limit, self.top_k, self.random_key, self.prompt_id, self.stream, self.temperature, self.top_p)
        for column, values in zip(columns, (*settings, *numbers), strict=True):
            column[index] = values


@triton.jit
def _uniforms(slots, random_key, prompt_id, stream, position, out, CELL: tl.constexpr):
    """Compute the random number of a slot's next token, as `random_numbers.uniforms` does; 0 for greedy decoding."""
    slot = tl.load(slots + tl.program_id(0))
    prompt, counter = tl.load(prompt_id + slot), tl.load(stream + slot)
    low, high = (prompt & 0xFFFFFFFF).to(tl.uint32), (prompt >> 32).to(tl.uint32)
    at = tl.load(position + slot).to(tl.uint32)
    first, second, _, _ = tl.philox(tl.load(random_key + slot), low, high, at, counter.to(tl.uint32))
    bits = ((first >> 6).to(tl.int64) << 26) | (second >> 6).to(tl.int64)
    tl.store(out + tl.program_id(0), tl.where(counter < 0, 0.0, (bits.to(tl.float64) + 0.5) * CELL))


@triton.jit
def _load_logits(logits, masked, row, number, c, temperature, top_k, top_p, width, num_known, TRUNCATES: tl.constexpr):
    """Load scaled logits, -inf for tokens that cannot be drawn; reads `masked` only for a slot with top_k or top_p."""
    if TRUNCATES:
        # Each slot reads one of the two: the other has no token below its end.
        is_truncated = (top_k > 0) | (top_p < 1.0)
        end = tl.where(is_truncated, 0, num_known)
        x = tl.load(logits + row * width + c, mask=c < end, other=float("-inf")).to(tl.float32)
        allowed = tl.load(masked + number.to(tl.int64) * width + c, mask=c < num_known - end, other=float("-inf"))
        x = tl.where(is_truncated, allowed, x / temperature)
    else:
        x = tl.load(logits + row * width + c, mask=c < num_known, other=float("-inf")).to(tl.float32) / temperature
    return x


@triton.jit
def _store_statistics(x, highest, total):
    top = tl.max(x, 0)
    is_empty = top == float("-inf")
    tl.store(highest, top)
    # In a block without a retained token exp(-inf + inf) would be NaN.
    tl.store(total, tl.where(is_empty, 0.0, tl.sum(tl.exp(x - tl.where(is_empty, 0.0, top)), 0)))


@triton.jit
def _block_statistics(
    logits, masked, rows, slots, active, temperature, top_k, top_p, highest, total, drawable_highest, drawable_total,
    width, num_known, num_blocks, BLOCK: tl.constexpr, TRUNCATES: tl.constexpr, KEEPS_ALL: tl.constexpr,
):  # fmt: skip
    """Store the highest scaled logit of a block and its sum of exponentials, for all tokens and the retained ones."""
    number, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + number)
    if tl.load(active + slot) == 0:
        return
    row, scale = tl.load(rows + number).to(tl.int64), tl.load(temperature + slot)
    c, offset = block * BLOCK + tl.arange(0, BLOCK), number * num_blocks + block
    x = tl.load(logits + row * width + c, mask=c < width, other=float("-inf")).to(tl.float32) / scale
    _store_statistics(x, highest + offset, total + offset)
    if not KEEPS_ALL:
        k, p = tl.load(top_k + slot), tl.load(top_p + slot)
        y = _load_logits(logits, masked, row, number, c, scale, k, p, width, num_known, TRUNCATES)
        _store_statistics(y, drawable_highest + offset, drawable_total + offset)


@triton.jit
def _draw(
    logits, masked, rows, slots, uniforms, eos, highest, total, drawable_highest, drawable_total,
    tokens, active, position, ended, limit, top_k, temperature, top_p, written, log_probs,
    width, num_known, num_blocks, max_new,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, NUM_EOS: tl.constexpr, TRUNCATES: tl.constexpr,
):  # fmt: skip
    """Draw a token by inverting the cumulative distribution of a row, and update its slot; one program per draw.

    The log-probability is that over the whole vocabulary at the temperature, without top_k and top_p.
    """
    number = tl.program_id(0)
    slot = tl.load(slots + number)
    if tl.load(active + slot) == 0:
        return
    row, at, scale = tl.load(rows + number).to(tl.int64), tl.load(position + slot), tl.load(temperature + slot)
    b = tl.arange(0, BLOCKS)
    inside = b < num_blocks
    tops = tl.load(drawable_highest + number * num_blocks + b, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    sums = tl.load(drawable_total + number * num_blocks + b, mask=inside, other=0.0).to(tl.float64)
    sums = sums * tl.exp(tops - top).to(tl.float64)
    ends = tl.cumsum(sums, 0)
    mass = tl.sum(sums, 0)
    target = tl.load(uniforms + number) * mass
    # The block whose end first lies beyond the target; rounding never exceeds the last block that has any mass.
    chosen = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.max(tl.where(sums > 0, b, 0), 0))
    before = tl.sum(tl.where(b < chosen, sums, 0.0), 0)
    c = tl.arange(0, BLOCK)
    k, p = tl.load(top_k + slot), tl.load(top_p + slot)
    x = _load_logits(logits, masked, row, number, chosen * BLOCK + c, scale, k, p, width, num_known, TRUNCATES)
    weight = tl.exp(x - top).to(tl.float64)
    column = tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    token = (chosen * BLOCK + tl.minimum(column, tl.max(tl.where(weight > 0, c, 0), 0))).to(tl.int64)
    all_tops = tl.load(highest + number * num_blocks + b, mask=inside, other=float("-inf"))
    all_top = tl.max(all_tops, 0)
    all_sums = tl.load(total + number * num_blocks + b, mask=inside, other=0.0) * tl.exp(all_tops - all_top)
    logit = tl.load(logits + row * width + token).to(tl.float32) / scale
    e = tl.arange(0, NUM_EOS)
    is_end = tl.max((tl.load(eos + e) == token).to(tl.int32), 0)
    offset = slot.to(tl.int64) * max_new + at
    tl.store(written + offset, token)
    tl.store(log_probs + offset, logit - all_top - tl.log(tl.sum(all_sums, 0)))
    tl.store(tokens + slot, token)
    tl.store(ended + slot, is_end)
    tl.store(position + slot, at + 1)
    tl.store(active + slot, tl.where((is_end == 1) | (at + 1 >= tl.load(limit + slot)), 0, 1))


def slot_uniforms(slots: Slots, index: Tensor) -> Tensor:
    """Return random numbers (N,) float64 for the next tokens of the slots `index` (N,) int64."""
    out = torch.empty(len(index), dtype=torch.float64, device=index.device)
    _uniforms[(len(index),)](
        index, slots.random_key, slots.prompt_id, slots.stream, slots.position, out, CELL=2.0**-52
    )  # fmt: skip
    return out


def draw_tokens(
    logits: Tensor,
    rows: Tensor,
    index: Tensor,
    slots: Slots,
    *,
    uniforms: Tensor,
    eos: Tensor,
    num_known: int,
    masked: Tensor | None = None,
) -> None:
    """Draw a token for each of N slots and write it to the slot; inactive slots are unchanged.

    Args:
        logits: (P, V), contiguous.
        rows, index: (N,) int64, slot index[i] draws from row rows[i] of the logits.
        uniforms: (N,) float64 in [0, 1), the random numbers of the slots `index`.
        eos: int64 ids, padded with -1 to a power of two.
        num_known: number of ids that the tokenizer knows; larger ids are never drawn.
        masked: (N, V) fp32, scaled logits, -inf for tokens that a slot's top_k or top_p excludes; None if no slot has
            either. Rows of slots without either are not read.
    """
    width = logits.shape[1]
    num_known = min(num_known, width)
    num_blocks = triton.cdiv(width, VOCABULARY_BLOCK)
    keeps_all = masked is None and num_known == width
    statistics = [torch.empty(len(index), num_blocks, device=logits.device) for _ in range(2 if keeps_all else 4)]
    truncated = logits if masked is None else masked
    _block_statistics[(len(index), num_blocks)](
        logits, truncated, rows, index, slots.active, slots.temperature, slots.top_k, slots.top_p,
        *statistics[:2], *statistics[-2:], width, num_known, num_blocks,
        BLOCK=VOCABULARY_BLOCK, TRUNCATES=masked is not None, KEEPS_ALL=keeps_all,
    )  # fmt: skip
    _draw[(len(index),)](
        logits, truncated, rows, index, uniforms, eos, *statistics[:2], *statistics[-2:],
        slots.tokens, slots.active, slots.position, slots.ended, slots.limit, slots.top_k, slots.temperature,
        slots.top_p, slots.written, slots.log_probs, width, num_known, num_blocks, slots.written.shape[1],
        BLOCK=VOCABULARY_BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), NUM_EOS=len(eos),
        TRUNCATES=masked is not None,
    )  # fmt: skip


def padded_eos(eos_ids: frozenset[int], device: torch.device) -> Tensor:
    """Return the EOS ids as int64, padded with -1 to a power of two for the kernel."""
    ids = sorted(eos_ids)
    width = triton.next_power_of_2(max(1, len(ids)))
    return torch.tensor([*ids, *[-1] * (width - len(ids))], dtype=torch.int64, device=device)
