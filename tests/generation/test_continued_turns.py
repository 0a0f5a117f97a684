"""Turns that continue a slot: equal to prefills of all tokens, whatever became of slots in between."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.decode_models import DEVICE, EOS, FUNCTIONS, PAD, llama, opt, poll_often, random_ids, shaken_all
from support.marks import slow_but

from pipeline.generation import device_work, generator, prefills, scheduler
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
from pipeline.generation.scheduler import ContinuousBatching
from pipeline.generation.session import Capacity, Finished, Request, Session

KEY = RandomKey(3, "rollout")
ENDS = frozenset({EOS, *range(20, 90)})
ROOM = Capacity(num_slots=3, max_new_tokens=9, max_length=60)
BACKENDS = slow_but(["static"], FUNCTIONS)


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


@pytest.fixture(params=["at once", "deferred"])
def polls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the host polls, on any device. Deferred, it learns later of free slots, and the fused backend overlaps
    prefills."""
    types = {DEVICE.type} if request.param == "deferred" else ()
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset(types))
    return request.param


with_polls = pytest.mark.usefixtures("polls")


@dataclass
class Talk:
    """A conversation of which each turn is answered by its last token and one to four more."""

    prompt: list[int]
    turns: int = 3
    sampling: Sampling = Sampling(9, 0.9)
    responses: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def pairs(self) -> Iterator[tuple[Request, tuple[list[int], torch.Tensor]]]:
        return zip(self.requests, self.responses, strict=True)

    def submit(self, session: Session, ids: Sequence[int], **how: Any) -> None:
        self.prompt = [*self.prompt, *ids]
        self.requests.append(session.submit(Prompt.of(self.prompt), self.sampling, KEY, **how))


def talked(session: Session, talks: Sequence[Talk], *, streams: bool) -> list[Talk]:
    """Sample all conversations; those that stream are found by their ids."""
    for talk in talks:
        talk.submit(session, [], streams=streams)
    for _ in range(400):
        for event in session.advance():
            if not isinstance(event, Finished):
                continue
            talk = next(one for one in talks if one.requests[-1] is event.request)
            ids = event.ids.tolist()
            talk.responses.append((ids, event.log_probs.cpu()))
            if len(talk.responses) < talk.turns:
                event.request.seen = ids
                how: dict[str, Any] = {"streams": True} if streams else {"after": event.request}
                talk.submit(session, [*ids, 200, ids[-1] + 10, *[201] * (ids[-1] % 4)], **how)
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


def starts(talk: Talk) -> list[int]:
    return [request.start for request in talk.requests]


def openings(*lengths: int, **settings: Any) -> list[Talk]:
    return [Talk(ids, **settings) for ids in random_ids(lengths, seed=7)]


@dataclass
class Assignments:
    """What starts in a session of the slots: the free slots of each step, and the slots of what starts in it."""

    steps: list[tuple[list[int], dict[Request, int]]] = field(default_factory=list)

    def note(self, assign: Callable[..., Any], session: Any, free: list[int]) -> Any:
        before, batches = list(free), assign(session, free)
        pairs = [pair for requests, slots in batches for pair in zip(requests, slots, strict=True)]
        self.steps.append((before, dict(pairs)))
        return batches

    def expected_starts(self, talk: Talk) -> list[int]:
        """All but the last token that was drawn, where the slot of the turn before is free and nobody's since."""
        last, expected = dict[int, Request](), [0] * len(talk.requests)
        for free, slots in self.steps:
            for n, (before, (ids, _)) in enumerate(list(talk.pairs())[:-1], start=1):
                if talk.requests[n] in slots and any(last.get(slot) is before for slot in free):
                    expected[n] = len(before.prompt.ids) + len(ids) - 1
            last |= {slot: request for request, slot in slots.items()}
        return expected


@pytest.fixture
def assignments(monkeypatch: pytest.MonkeyPatch) -> Assignments:
    found, assign = Assignments(), ContinuousBatching._assign_slots
    monkeypatch.setattr(ContinuousBatching, "_assign_slots", lambda self, free: found.note(assign, self, free))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("backend", "make", "streams"),
    [("static", opt, True), ("static", llama, False), ("fused", llama, True), ("fused", opt, False)],
)
def test_each_turn_continues_its_slot(
    polls: str, assignments: Assignments, backend: str, make: Callable[[], Any], streams: bool
) -> None:
    """All of them do, unless the host learns too late that their slots are free."""
    source = source_of(backend, make())
    talks = assert_as_whole(source, lambda: openings(6, 9, 7), streams=streams)
    for talk in talks:
        assert starts(talk) == assignments.expected_starts(talk)
    assert (any if polls == "deferred" else all)(start for talk in talks for start in starts(talk)[1:])
    assert len({len(ids) for talk in talks for ids, _ in talk.responses}) > 3
    again = talked(source.session(ROOM), openings(6, 9, 7), streams=streams)
    for one, other in zip(talks, again, strict=True):
        assert [starts(one), *map(str, one.responses)] == [starts(other), *map(str, other.responses)], "bit for bit"


@pytest.mark.few(1)
@pytest.mark.parametrize("num_slots", [3, 4])
@pytest.mark.parametrize(("backend", "streams"), [("static", True), ("fused", False), ("static", False)])
@with_polls
def test_slots_that_others_took_are_not_continued(
    assignments: Assignments, backend: str, streams: bool, num_slots: int
) -> None:
    """Five conversations, of which one is the last with nobody beside it."""

    def five() -> list[Talk]:
        return [*openings(6, 9, 7, 3), Talk(random_ids([8])[0], turns=6)]

    talks = assert_as_whole(source_of(backend, llama()), five, streams=streams, room=Capacity(num_slots, 9, 90))
    assert [starts(talk) for talk in talks] == [assignments.expected_starts(talk) for talk in talks]
    later = [start for talk in talks for start in starts(talk)[1:]]
    assert any(later) and not all(later)


@pytest.mark.few(1)
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@with_polls
def test_a_turn_behind_a_stop_text_continues_the_tokens_before_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, streams: bool
) -> None:
    """The device draws more of them, which the slot has."""
    monkeypatch.setattr(scheduler, "POLL_INTERVAL", 4)
    sampling = Sampling(9, stop=("4>", "7>"))
    talks = assert_as_whole(
        source_of(backend, opt(), frozenset()), lambda: openings(6, 9, 7, sampling=sampling), streams=streams
    )
    assert {1, 2} <= {len(ids) for talk in talks for ids, _ in talk.responses}
    assert any(start for talk in talks for start in starts(talk))


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [2, 6, 1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
@with_polls
def test_a_withdrawn_request_leaves_its_prompt(backend: str, steps: int) -> None:
    """Not what it has drawn. Another request runs beside it."""
    source, found = source_of(backend, llama(), frozenset()), list[list[int]]()
    first, second = openings(12, 7)
    later = [*first.prompt, 202, 203]
    for session in (source.session(ROOM), EagerGenerator(source.forward.plain, source.vocabulary).session(ROOM)):
        second.submit(session, [])
        if not found:
            first.submit(session, [], streams=True)
            for _ in range(steps):
                session.advance()
            session.withdraw(first.requests[0])
            session.advance()
        request = session.submit(Prompt.of(later), Sampling(9), KEY, streams=True)
        found.append(ended(session)[request])
        assert request.start == (11 if len(found) == 1 else 0)
    assert found[0] == found[1]


SHORT = Capacity(3, 60, 80)


@pytest.fixture
def short_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots have 21 positions at first and need up to 80."""
    monkeypatch.setattr(generator, "FIRST_NEW_TOKENS", 1)
    for module in ("generator", "slots"):
        monkeypatch.setattr(f"pipeline.generation.{module}.CACHE_LENGTH_MULTIPLE", 1)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("memory", "evicts"), [(100, True), (400, False)])
@with_polls
def test_a_cache_that_grows_or_loses_slots_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, short_cache: None, caplog: pytest.LogCaptureFixture, memory: int, evicts: bool,
    streams: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: memory)
    source = source_of("fused", opt())
    with caplog.at_level("INFO", logger="pipeline.generation.scheduler"):
        talks = assert_as_whole(source, lambda: openings(12, 5, 20, 9, turns=4), streams=streams, room=SHORT)
    assert source._buffers is not None and source._buffers.cache_length > 33
    assert ("start again" in caplog.text) is evicts
    assert any(start for talk in talks for start in starts(talk))


@pytest.mark.slow
@pytest.mark.parametrize("is_running", [False, True])
@with_polls
def test_a_turn_whose_slot_is_lost_starts_from_its_whole_prompt(
    monkeypatch: pytest.MonkeyPatch, short_cache: None, is_running: bool
) -> None:
    """Memory for three slots, then two, whose numbers change; the turn comes afterwards, or runs and has to restart."""
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: 130)
    source, found = source_of("fused", opt(), frozenset()), list[dict[int, list[int]]]()
    for session in (source.session(SHORT), EagerGenerator(source.forward.plain, source.vocabulary).session(SHORT)):
        limits = (3, 40, 44)
        requests = [
            session.submit(Prompt.of(ids), Sampling(limit), KEY)
            for ids, limit in zip(random_ids((6, 14, 16)), limits, strict=True)
        ]
        responses = ended(session, until=requests[0] if is_running else None)
        requests[0].seen = responses[requests[0]]
        later = [*requests[0].prompt.ids, *requests[0].seen, 200, 201]
        turn = session.submit(Prompt.of(later), Sampling(25), KEY, after=requests[0])
        if is_running and not found:
            session.advance()
            assert turn.start == 8
        responses |= ended(session)
        assert turn.start == 0
        found.append({request.number: ids for request, ids in responses.items()})
    assert found[0] == found[1] and len(found[0]) == 4
    assert source._buffers is not None and source._buffers.num_slots == 2


@with_polls
def test_a_session_continues_nothing_of_the_one_before() -> None:
    """Weights change between sessions."""
    model = llama()
    source = source_of("static", model)
    assert_as_whole(source, lambda: openings(6, 9))
    shaken_all(list(model.parameters()))
    talks = assert_as_whole(source, lambda: openings(6, 9), streams=True)
    assert all(starts(talk)[0] == 0 < starts(talk)[1] for talk in talks)


@with_polls
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (60, [(3, 9), (3, 3)]),
        (59, [(3, 9), (2, 3), (1, 3)]),  # the second turn of the longest prompt has 9 + 9 + 2 tokens
        (1, [(1, 6), (1, 9), (1, 7), (1, 3), (1, 3), (1, 3)]),
    ],
)
def test_a_prefill_counts_the_tokens_that_slots_have(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: list[tuple[int, int]]
) -> None:
    """But computes only the last token that was drawn, and the two behind it."""
    monkeypatch.setattr(prefills, "MAX_PREFILL_TOKENS", limit)
    source, shapes = source_of("static", llama(), frozenset()), list[tuple[int, int]]()
    prefill = source.forward.prefill
    monkeypatch.setattr(
        source.forward, "prefill", lambda ids, *how, **more: (shapes.append(ids.shape), prefill(ids, *how, **more))[1]
    )
    found = []
    for session in (source.session(ROOM), EagerGenerator(source.forward.plain, source.vocabulary).session(ROOM)):
        talks = openings(6, 9, 7, sampling=Sampling(9))
        for _ in range(2):
            for talk in talks:
                how = {"after": talk.requests[-1]} if talk.requests else {}
                talk.submit(session, [*talk.responses[-1][0], 200, 201] if how else [], **how)
            responses = ended(session)
            for talk in talks:
                talk.requests[-1].seen = responses[talk.requests[-1]]
                talk.responses.append((responses[talk.requests[-1]], torch.empty(0)))
        found.append([ids for talk in talks for ids, _ in talk.responses])
    assert shapes == expected and found[0] == found[1]


@with_polls
@pytest.mark.parametrize("lengths", [(12, 18), (18, 12)])
def test_the_slot_with_most_of_the_prompt_is_continued(assignments: Assignments, lengths: tuple[int, int]) -> None:
    """Of two whose requests have ended."""
    session = source_of("static", llama(), frozenset()).session(ROOM)
    prompts = [Prompt.of([*range(30, end)]) for end in (30 + lengths[0], 30 + lengths[1], 50)]
    first = [session.submit(prompt, Sampling(2), KEY, streams=True) for prompt in prompts[:2]]
    ended(session)
    request = session.submit(prompts[2], Sampling(2), KEY, streams=True)
    ended(session)
    (_, before), (_, after) = (step for step in assignments.steps if step[1])
    assert request.start == 18 and after[request] == before[first[lengths.index(18)]]


@with_polls
def test_two_samples_of_a_continued_prompt_continue_two_slots_or_one() -> None:
    """They share the prompt, but no row of a prefill."""
    source = source_of("static", llama())
    for num_before in (1, 2):
        session, eager = source.session(ROOM), EagerGenerator(source.forward.model, source.vocabulary).session(ROOM)
        found = []
        for one in (session, eager):
            opening, how = Prompt.of([*range(30, 42)]), {"streams": True}
            for sample in range(num_before):
                one.submit(opening, Sampling(4), KEY, sample=sample, **how)
            ended(one)
            prompt = Prompt.of([*opening.ids, 205, 206])
            requests = [one.submit(prompt, Sampling(6), KEY, sample=sample, **how) for sample in range(2)]
            responses = ended(one)
            found.append(([responses[request] for request in requests], [request.start for request in requests]))
        assert found[0][0] == found[1][0]
        assert found[0][1] == [12, 12][:num_before] + [0] * (2 - num_before)


def ended(session: Session, *, until: Request | None = None) -> dict[Request, list[int]]:
    """The responses that have ended when the session is idle, or with that one."""
    found: dict[Request, list[int]] = {}
    while not session.is_idle and until not in found:
        events = [event for event in session.advance() if isinstance(event, Finished)]
        found |= {event.request: event.ids.tolist() for event in events}
    return found


@with_polls
def test_requests_take_empty_slots_first_and_then_the_oldest() -> None:
    """Of three slots two have ended conversations; the third request leaves both, the fourth takes the older one."""
    session = source_of("static", llama()).session(ROOM)
    talks = openings(8, 9, 7, 6)
    slots = list[int]()
    for talk in talks:
        talk.submit(session, [], streams=True)
        ended(session)
        slots += [slot for slot, request in session.contents.items() if request is talk.requests[-1]]
    assert sorted(slots[:3]) == [0, 1, 2] and slots[3] == slots[0]


@pytest.mark.parametrize(
    ("prompt", "seen", "ids", "expected"),
    [
        ([1, 2, 3], [4, 5], [1, 2, 3, 4, 5, 6], 4),  # the last token that was drawn has no key
        ([1, 2, 3], [4, 5], [1, 2, 3, 4], 3),  # the last one is computed for its logits
        ([1, 2, 3], [4, 5], [1, 2, 3, 9, 9, 9], 3),
        ([1, 2, 3], [4, 5], [1, 2, 3, 9, 9, 9, 9], 0),  # less than half of the prompt
        ([1, 2, 3], [4, 5, 6, 7, 8, 9], [1, 2, 3, 3], 0),  # less than half of the slot, unless it is withdrawn
        ([1, 2, 3], [], [1, 2, 3, 9], 2),
        ([9, 2, 3], [4, 5], [1, 2, 3, 4, 5], 0),
        ([1], [], [1], 0),
    ],
)
def test_a_slot_is_continued_if_at_least_half_is_shared(
    prompt: list[int], seen: list[int], ids: list[int], expected: int
) -> None:
    request = Request(0, Prompt(prompt, 1), Sampling(9), KEY, 0, streams=True, seen=seen)
    assert request.num_shared(ids) == expected
    request.is_withdrawn = True  # the slot may have other tokens than were seen
    assert request.num_shared(ids) <= len(prompt) - 1
