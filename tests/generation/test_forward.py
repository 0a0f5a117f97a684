"""Prefill and decode steps of the fast backends against the forward pass of transformers, token by token, in fp32.

Prompts of different lengths share a batch, several responses share a prompt, rows sit in shuffled slots and end at
different times; unused slots, and all positions behind a row's end, hold NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.decode_models import DEVICE, FUNCTIONS, FUSED, PAD, STATIC, fused, llama, opt, plain_logits, random_ids
from support.marks import slow_but

from pipeline.generation.backends import CachedForward
from pipeline.generation.forwards.kv_cache import Rest
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.tensor_ops import pad_rows

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
CACHE_LENGTH = 8


@dataclass(frozen=True)
class Forced:
    """Rows whose tokens are forced.

    prompts, tokens: ids; row r continues prompt source[r] with tokens[r]. slots: of each row, of `num_slots`.
    more_pads: columns of padding behind the longest prompt.
    """

    prompts: list[list[int]]
    tokens: list[list[int]]
    source: list[int]
    slots: list[int]
    num_slots: int
    more_pads: int = 0

    def sequence(self, row: int) -> list[int]:
        return [*self.prompts[self.source[row]], *self.tokens[row]]

    def start(self, row: int) -> int:
        return len(self.prompts[self.source[row]])


def forced(
    lengths: Sequence[int], continued: Sequence[int], *, source: list[int], slots: list[int], **more: int
) -> Forced:
    num_slots = more.pop("num_slots", len(slots))
    return Forced(random_ids(lengths), random_ids(continued, 2), source, slots, num_slots, **more)


USUAL = forced((2, 4, 1), (2, 0, 1, 2), source=[0, 0, 1, 2], slots=[3, 0, 4, 1], num_slots=5)
SHAPES = {
    "one row": forced((3,), (2,), source=[0], slots=[0]),
    "single tokens, many pads": forced((1, 1, 2), (1, 1, 1), source=[2, 0, 1], slots=[0, 1, 2], more_pads=2),
    "three samples a prompt": forced((3, 2), (1, 1, 1, 1, 0, 1), source=[0, 0, 0, 1, 1, 1], slots=[5, 3, 1, 4, 2, 0]),
    "to a full cache": forced((7, 5), (1, 3), source=[0, 1], slots=[1, 0]),
}


@torch.no_grad()
def run(function: CachedForward, case: Forced, cache: Any) -> list[torch.Tensor]:
    """Return the logits of each row, (1 + its tokens, V): after the prompt and after each token."""
    function.prepare(CACHE_LENGTH)
    rows = [torch.tensor(ids) for ids in case.prompts]
    ids = pad_rows(rows, PAD, length=max(map(len, rows)) + case.more_pads).to(DEVICE)
    slots, source = (torch.tensor(values, device=DEVICE) for values in (case.slots, case.source))
    starts = torch.tensor([len(ids) for ids in case.prompts], device=DEVICE)
    first = function.prefill(ids, starts, cache, slots=slots, source=source)
    actual = [[first[number]] for number in case.source]
    lengths = torch.zeros(case.num_slots, dtype=torch.int32, device=DEVICE)
    lengths[slots] = starts[source].int()
    for step in range(max(map(len, case.tokens))):
        active = torch.zeros_like(lengths)
        tokens = torch.full((case.num_slots,), PAD, device=DEVICE)
        for row, slot in enumerate(case.slots):
            if step < len(case.tokens[row]):
                active[slot], tokens[slot] = 1, case.tokens[row][step]
        logits = function.decode_step(tokens, lengths, active, cache)
        lengths += active
        for row, slot in enumerate(case.slots):
            if active[slot]:
                actual[row].append(logits[slot])
    return [torch.stack(row) for row in actual]


def assert_equal_logits(model: Any, case: Forced, actual: list[torch.Tensor]) -> None:
    for row, logits in enumerate(actual):
        expected = plain_logits(model, case.sequence(row))[case.start(row) - 1 :]
        torch.testing.assert_close(logits.float(), expected, **TOLERANCE)


def nan_cache(function: Any, case: Forced) -> Any:
    cache = function.new_cache(case.num_slots, CACHE_LENGTH)
    for part in (*cache.keys, *cache.values):
        part.fill_(float("nan"))
    return cache


# Their parts are in other models too.
LIKE_OTHERS = ("llama-3", "gemma", "phi-3", "gpt-neox, in sequence", "gpt-neox without biases")


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in FUSED]
)
def test_the_decode_step_is_the_models_function(name):
    model = FUSED[name]()
    function = fused(model)
    assert_equal_logits(model, USUAL, run(function, USUAL, nan_cache(function, USUAL)))


@pytest.mark.parametrize(("make", "shape"), [*((opt, shape) for shape in SHAPES), (llama, "to a full cache")])
def test_any_batch_pads_and_lengths(make, shape):
    model, case = make(), SHAPES[shape]
    function = fused(model)
    assert_equal_logits(model, case, run(function, case, nan_cache(function, case)))


def test_a_step_writes_one_place_of_each_active_row_and_nothing_else():
    function = fused(llama())
    cache = nan_cache(function, USUAL)
    run(function, USUAL, cache)
    longest = max(map(len, USUAL.prompts))
    for part in map(torch.stack, (cache.keys, cache.values)):  # (layers, slots, Hkv, S, D)
        written = part.isfinite().all(-1).all(2).all(0)
        assert part.isnan().any(-1).any(2).any(0).equal(~written)
        for slot in range(USUAL.num_slots):
            end = 0
            if slot in USUAL.slots:
                row = USUAL.slots.index(slot)
                end = max(longest, len(USUAL.sequence(row)))  # a prompt's padding is written as well
            assert written[slot].tolist() == [True] * end + [False] * (CACHE_LENGTH - end), slot


@pytest.mark.parametrize("name", STATIC)
def test_the_static_backend_is_the_models_function(name):
    model = STATIC[name]()
    function = StaticCacheForward(model)
    assert_equal_logits(model, USUAL, run(function, USUAL, function.new_cache(USUAL.num_slots, CACHE_LENGTH)))


@pytest.mark.parametrize("shape", SHAPES)
def test_any_batch_pads_and_lengths_on_the_static_backend(shape):
    model, case = llama(), SHAPES[shape]
    function = StaticCacheForward(model)
    assert_equal_logits(model, case, run(function, case, function.new_cache(case.num_slots, CACHE_LENGTH)))


def test_rows_that_ended_leave_no_trace_in_others_on_the_static_backend():
    """There is NaN in unused slots, and in the slot of a response that has ended."""
    model = llama()
    function = StaticCacheForward(model)
    cache = function.new_cache(USUAL.num_slots, CACHE_LENGTH)
    run(function, USUAL, cache)  # the cache gets its tensors
    unused = [slot for slot in range(USUAL.num_slots) if slot not in USUAL.slots]
    for keys, values in cache._stored.values():
        keys[unused], values[unused] = float("nan"), float("nan")
    assert_equal_logits(model, USUAL, run(function, USUAL, cache))


@pytest.mark.parametrize("name", ["opt", "llama", "qwen3"])
def test_bytes_of_a_token_are_those_of_the_cache(name):
    model = FUSED[name]()
    for function in (fused(model), StaticCacheForward(model)):
        cache = fused(model).new_cache(3, CACHE_LENGTH)
        assert function.cache_layout.bytes_per_token * 3 * CACHE_LENGTH == sum(
            part.nbytes for part in (*cache.keys, *cache.values)
        )


# --- rows that continue what their slots have ---

# Slot -> first tokens that it has, more tokens, and one for a decode step.
ROWS = {3: (5, 2), 0: (9, 1), 4: (1, 6), 1: (6, 3)}
POSITIONS = 12
# Learned and rotary positions, heads that share keys, windows, soft caps, two norms of heads, and experts.
QUICK = {"fused": ("opt",), "static": ("gemma-3",)}
FORWARDS = [("fused", name) for name in FUSED] + [("static", name) for name in STATIC]


@pytest.mark.parametrize(
    ("backend", "name"), slow_but([(backend, name) for backend, names in QUICK.items() for name in names], FORWARDS)
)
@torch.no_grad()
def test_rows_continue_what_their_slots_have(backend: str, name: str) -> None:
    """Of lengths of their own, in shuffled slots; behind what a slot has, there is NaN."""
    model = (FUSED if backend == "fused" else STATIC)[name]()
    function: CachedForward = FUNCTIONS[backend](model)
    function.prepare(POSITIONS)
    cache, ids = function.new_cache(5, POSITIONS), random_ids([first + more + 1 for first, more in ROWS.values()])
    slots = torch.tensor([*ROWS], device=DEVICE)
    starts = torch.tensor([first for first, _ in ROWS.values()], device=DEVICE)
    for n, (slot, (first, _)) in enumerate(ROWS.items()):
        at = torch.tensor([slot], device=DEVICE)
        function.prefill(torch.tensor([ids[n][:first]], device=DEVICE), starts[n : n + 1], cache, slots=at,
                         source=torch.zeros_like(at))  # fmt: skip
    layers = zip(cache.keys, cache.values, strict=True) if backend == "fused" else cache._stored.values()
    for keys, values in layers:
        for slot in range(5):
            first = ROWS.get(slot, (0, 0))[0]
            keys[slot, :, first:], values[slot, :, first:] = float("nan"), float("nan")
    new = [row[first:-1] for row, (first, _) in zip(ids, ROWS.values(), strict=True)]
    lengths = torch.tensor([len(row) for row in new], device=DEVICE)
    rows = pad_rows([torch.tensor(row) for row in new], PAD).to(DEVICE)
    positions = (starts[:, None] + torch.arange(rows.shape[1], device=DEVICE)).clamp(max=POSITIONS - 2)
    logits = function.prefill(rows, lengths, cache, slots=slots, source=Rest(positions, POSITIONS - 1))
    for row, found in zip(ids, logits, strict=True):
        torch.testing.assert_close(found.float(), plain_logits(model, row[:-1])[-1], **TOLERANCE)
    tokens, ends = torch.full((5,), PAD, device=DEVICE), torch.zeros(5, dtype=torch.int32, device=DEVICE)
    tokens[slots] = torch.tensor([row[-1] for row in ids], device=DEVICE)
    ends[slots] = (starts + lengths).int()
    for keys, values in cache._stored.values() if backend == "static" else ():
        for part in (keys, values):  # its decode step reads all positions under a mask
            part.nan_to_num_()
    logits = function.decode_step(tokens, ends, (ends > 0).int(), cache)[slots]
    for row, found in zip(ids, logits, strict=True):
        torch.testing.assert_close(found.float(), plain_logits(model, row)[-1], **TOLERANCE)
