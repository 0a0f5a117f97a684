"""Turns that continue a slot: equal to prefills of all tokens, whatever became of slots in between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.decode_models import (
    DEVICE,
    EOS,
    FUNCTIONS,
    FUSED,
    PAD,
    STATIC,
    llama,
    opt,
    plain_logits,
    poll_often,
    random_ids,
)
from support.marks import slow_but

from pipeline.generation.backends import CachedForward
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.forwards.kv_cache import Rest
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
from pipeline.generation.session import Capacity, Finished, Request, Session
from pipeline.tensor_ops import pad_rows

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
KEY = RandomKey(3, "rollout")
ENDS = frozenset({EOS, *range(20, 90)})
ROOM = Capacity(num_slots=3, max_new_tokens=9, max_length=60)
BACKENDS = slow_but(["static"], FUNCTIONS)


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


# --- forward passes ---

# Slot -> first tokens that it has, more tokens, and one for a decode step.
ROWS = {3: (5, 2), 0: (9, 1), 4: (1, 6), 1: (6, 3)}
POSITIONS = 12
# Learned and rotary positions, heads that share keys, windows, soft caps, two norms of heads, and experts.
QUICK = {"fused": ("opt", "gemma-2", "gemma-3"), "static": ("opt-350m", "gemma-3")}
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
    logits = function.prefill(rows, lengths, cache, slots=slots, source=Rest(starts, POSITIONS - 1))
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


# --- sessions ---


@dataclass
class Talk:
    """A conversation of which each turn is answered by its last token and two more."""

    prompt: list[int]
    turns: int = 3
    sampling: Sampling = Sampling(9, 0.9)
    stop_after: int = 0  # withdraw its first turn after so many steps
    responses: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def submit(self, session: Session, ids: Sequence[int], **how: Any) -> None:
        self.prompt = [*self.prompt, *ids]
        self.requests.append(session.submit(Prompt.of(self.prompt), self.sampling, KEY, **how))


def talked(session: Session, talks: Sequence[Talk], *, streams: bool) -> list[Talk]:
    """Sample all conversations; those that stream are found by their ids."""
    for talk in talks:
        talk.submit(session, [], streams=streams)
    for step in range(1, 400):
        for event in session.advance():
            if not isinstance(event, Finished):
                continue
            talk = next(one for one in talks if one.requests[-1] is event.request)
            ids = event.ids.tolist()
            talk.responses.append((ids, event.log_probs.cpu()))
            if len(talk.responses) < talk.turns:
                event.request.seen = ids
                how: dict[str, Any] = {"streams": True} if streams else {"after": event.request}
                talk.submit(session, [*ids, 200, ids[-1] + 10, 201], **how)
        for talk in talks:
            if step == talk.stop_after:
                session.withdraw(talk.requests[-1])
                talk.submit(session, [202, 203], streams=streams)
        if session.is_idle:
            return list(talks)
    raise AssertionError("it does not end")


def assert_as_whole(
    source: Generator, talks: Callable[[], list[Talk]], *, streams: bool = False, room: Capacity = ROOM
) -> list[Talk]:
    """Compare with the eager backend, which has no slots; return the conversations."""
    eager = EagerGenerator(getattr(source.forward, "plain", None) or source.forward.model, source.vocabulary)
    found, expected = (talked(one.session(room), talks(), streams=streams) for one in (source, eager))
    for mine, theirs in zip(found, expected, strict=True):
        assert [ids for ids, _ in mine.responses] == [ids for ids, _ in theirs.responses]
        for (_, ours), (_, other) in zip(mine.responses, theirs.responses, strict=True):
            torch.testing.assert_close(ours, other, rtol=0.0, atol=1e-5)
    return found


def source_of(backend: str, model: Any, ends: frozenset[int] = ENDS) -> Generator:
    function: Any = FUNCTIONS[backend](model)
    function.plain = model
    return Generator(function, Vocabulary(ends, PAD, decode=lambda ids: "".join(f"<{token}>" for token in ids)))


def starts(talks: Sequence[Talk]) -> list[list[int]]:
    return [[request.start for request in talk.requests] for talk in talks]


def openings(*lengths: int, **settings: Any) -> list[Talk]:
    return [Talk(ids, **settings) for ids in random_ids(lengths, seed=7)]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("make", [opt, llama])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_turn_continues_its_slot(backend: str, make: Callable[[], Any], streams: bool) -> None:
    talks = assert_as_whole(source_of(backend, make()), lambda: openings(6, 9, 7), streams=streams)
    for talk in talks:
        lengths = [len(request.prompt.ids) for request in talk.requests]
        drawn = [len(ids) for ids, _ in talk.responses]
        before = [length + new - 1 for length, new in zip(lengths, drawn, strict=True)]
        assert [request.start for request in talk.requests] == [0, *before[:-1]], "but the last token that was drawn"
    assert len({len(ids) for talk in talks for ids, _ in talk.responses}) > 3
