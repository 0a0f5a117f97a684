"""Requests with settings of their own in one session: on every backend as in a session alone; stops."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.decode_models import DEVICE, EOS, FUNCTIONS, PAD, llama, opt, poll_often, random_ids
from support.marks import slow_but
from support.messages import naming

from pipeline.generation import device_work, generator, scheduler
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Sampling, Vocabulary
from pipeline.generation.session import Capacity, Finished, Request, Session, SessionSource, Tokens

BACKENDS = slow_but(["eager", "static"], ["eager", *FUNCTIONS])
ENDS = frozenset({EOS, *range(20, 50)})
ROOM = Capacity(num_slots=3, max_new_tokens=9, max_length=20)
LONG = Capacity(num_slots=3, max_new_tokens=40, max_length=60)
# Every kind of setting, each with a key of its own; more requests than slots, of unlike prompts and limits.
REQUESTS = [
    (3, Sampling(9), RandomKey(3, "rollout"), 0),
    (5, Sampling(4, 0.6), RandomKey(4, "rollout"), 1),
    (1, Sampling(7, top_k=3), RandomKey(3, "eval"), 0),
    (5, Sampling(9, 0), RandomKey(3, "rollout"), 0),
    (8, Sampling(1, 1.3, top_p=0.8), RandomKey(3, "rollout", 2), 5),
    (2, Sampling(6, 2.0, top_p=0.9, top_k=40), RandomKey(9, "rollout"), 0),
    (3, Sampling(8), RandomKey(3, "rollout"), 7),
]


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


def decode(ids: Sequence[int]) -> str:
    """A text in which every token is a word."""
    return "".join(f"<{token}>" for token in ids)


def source_of(backend: str, model: Any, ends: frozenset[int] = ENDS) -> SessionSource:
    vocabulary = Vocabulary(ends, PAD, decode=decode)
    return EagerGenerator(model, vocabulary) if backend == "eager" else Generator(FUNCTIONS[backend](model), vocabulary)


def submitted(session: Session, requests: Sequence[tuple[int, Sampling, RandomKey, int]]) -> list[Request]:
    """A ticket for each request; prompts of one length are one prompt."""
    prompts = {length: Prompt(random_ids((length,), seed=length)[0], 70 + length) for length, *_ in requests}
    return [session.submit(prompts[length], how, key, sample=sample) for length, how, key, sample in requests]


def finished(session: Session) -> dict[int, Finished]:
    """Advance to the end; every response by its number."""
    found: dict[int, Finished] = {}
    while not session.is_idle:
        found |= {event.request.number: event for event in session.advance() if isinstance(event, Finished)}
    return found


def assert_equal(mine: Finished, theirs: Finished) -> None:
    assert (mine.ids.tolist(), mine.reason) == (theirs.ids.tolist(), theirs.reason)
    torch.testing.assert_close(mine.log_probs, theirs.log_probs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_request_is_answered_as_in_a_session_of_its_own(backend):
    """By any backend as by the eager one alone: settings, limits, keys and samples stay with their request."""
    model = llama()
    session, alone = source_of(backend, model).session(ROOM), source_of("eager", model)
    tickets = submitted(session, REQUESTS)
    found = finished(session)
    assert sorted(found) == [ticket.number for ticket in tickets] == list(range(len(REQUESTS)))
    for number, request in enumerate(REQUESTS):
        only = alone.session(ROOM)
        submitted(only, [request])
        assert_equal(found[number], finished(only)[0])
        assert found[number].reason == "end" or len(found[number].ids) == request[1].max_new_tokens
    assert {event.reason for event in found.values()} == {"end", "limit"}
    assert len({len(event.ids) for event in found.values()}) > 3


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_join_while_others_run_and_results_come_as_they_end(backend):
    model = opt()
    session, together = source_of(backend, model).session(ROOM), source_of(backend, model).session(ROOM)
    submitted(together, REQUESTS)
    expected, found, left = finished(together), {}, list(REQUESTS)
    ended_at: dict[int, int] = {}
    for turn in range(200):
        if left and turn % 2 == 0:
            submitted(session, [left.pop(0)])
        for event in session.advance():
            assert isinstance(event, Finished) and event.request.number not in found
            found[event.request.number], ended_at[event.request.number] = event, turn
        if session.is_idle and not left:
            break
    for number, event in expected.items():
        assert_equal(found[number], event)
    assert len(set(ended_at.values())) > 3, "not all at the end"


def test_a_prompts_random_numbers_are_those_of_its_ids():
    ids = [Prompt.of(ids).prompt_id for ids in ([5, 6], [6, 5], [56], [5, 6, 0], [])]
    assert len(set(ids)) == 5 and all(0 <= number < 2**63 for number in ids)
    assert Prompt.of((5, 6)).prompt_id == ids[0]


@pytest.fixture(params=[False, True], ids=["at once", "deferred"])
def deferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the host reads copies one iteration late, as on a GPU, on any device."""
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset({DEVICE.type} if request.param else ()))
    return request.param


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stop_text_ends_a_response_with_the_token_that_completes_it(backend):
    """Words over two tokens too; a request beside it with the same random numbers goes on."""
    model = opt()
    plain = source_of(backend, model, frozenset()).session(ROOM)
    length, how, key, sample = REQUESTS[0]
    submitted(plain, [REQUESTS[0]])
    (whole,) = finished(plain).values()
    ids = whole.ids.tolist()
    at = next(n for n in range(3, 9) if ids.index(ids[n]) == n)
    stop = (f"{ids[at - 1]}><{ids[at]}>", "never")
    session = source_of(backend, model, frozenset()).session(ROOM)
    prompt = Prompt(random_ids((length,), seed=length)[0], 70 + length)
    stopped = session.submit(prompt, Sampling(9, stop=stop), key, sample=sample, streams=True)
    session.submit(prompt, how, key, sample=sample)
    session.submit(prompt, Sampling(at, stop=stop), key, sample=sample)  # its limit comes first
    streamed, log_probs, found = [], [], {}
    while not session.is_idle:
        for event in session.advance():
            if isinstance(event, Tokens):
                assert event.request is stopped and event.ids
                streamed += event.ids
                log_probs += event.log_probs.tolist()
            else:
                found[event.request.number] = event
    assert [found[n].reason for n in range(3)] == ["stop", "limit", "limit"]
    assert found[0].ids.tolist() == streamed == ids[: at + 1] and len(found[0].log_probs) == at + 1
    assert log_probs == found[0].log_probs.tolist()
    assert found[1].ids.tolist() == ids and found[2].ids.tolist() == ids[:at]


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_streamed_while_the_response_is_written(backend):
    session = source_of(backend, opt(), frozenset()).session(ROOM)
    session.submit(Prompt([5, 6], 1), Sampling(9), RandomKey(1, "r"), streams=True)
    session.submit(Prompt([5, 6], 1), Sampling(9), RandomKey(2, "r"))
    events, log_probs = [], []
    while not session.is_idle:
        events += (new := session.advance())
        log_probs += [value for event in new if isinstance(event, Tokens) for value in event.log_probs.tolist()]
    pieces = [event.ids for event in events if isinstance(event, Tokens)]
    (first,) = [event for event in events if isinstance(event, Finished) and event.request.number == 0]
    assert len(pieces) >= 3 and sum(pieces, []) == first.ids.tolist() and log_probs == first.log_probs.tolist()
    assert all(event.request.number == 0 for event in events if isinstance(event, Tokens))


@pytest.mark.usefixtures("deferred")
@pytest.mark.slow
def test_responses_that_start_again_are_reported_once(monkeypatch):
    """Memory for two slots, then one: a streamed response loses its slot, and its tokens come once, in order."""
    for module in ("generator", "slots"):
        monkeypatch.setattr(f"pipeline.generation.{module}.CACHE_LENGTH_MULTIPLE", 1)
    monkeypatch.setattr(generator, "FIRST_NEW_TOKENS", 1)
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: 14)
    source = source_of("fused", opt(), frozenset())
    session = source.session(Capacity(2, 9, 12))
    tickets = [
        session.submit(Prompt(random_ids((3,), seed=n)[0], n), Sampling(9), RandomKey(1, "r"), streams=True)
        for n in range(2)
    ]
    pieces: dict[int, list[int]] = {ticket.number: [] for ticket in tickets}
    num_log_probs = 0
    found = {}
    while not session.is_idle:
        for event in session.advance():
            if isinstance(event, Tokens):
                pieces[event.request.number] += event.ids
                num_log_probs += len(event.log_probs)
            else:
                found[event.request.number] = event.ids.tolist()
    assert isinstance(source, Generator) and source._buffers is not None and source._buffers.num_slots == 1
    assert pieces == found and all(len(ids) == 9 for ids in found.values()) and num_log_probs == 18


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_after_one_that_was_given_up_begins_anew(backend):
    source = source_of(backend, opt())
    given_up = source.session(ROOM)
    submitted(given_up, REQUESTS)
    given_up.advance()
    with pytest.raises(GenerationStopped):
        given_up.advance(stop=True)
    calm, session = source_of(backend, opt()).session(ROOM), source.session(ROOM)
    for each in (calm, session):
        submitted(each, REQUESTS[:4])
    expected, found = finished(calm), finished(session)
    assert found.keys() == expected.keys()
    for number, event in found.items():
        assert_equal(event, expected[number])


@pytest.mark.parametrize("backend", ["eager", "static"])
@pytest.mark.parametrize(
    ("ids", "sampling", "complaint"),
    [
        ([5], Sampling(10), "up to 10 new ... 1 to 9"),
        ([5] * 12, Sampling(9), "12 prompt tokens ... up to 9 new"),
        ([], Sampling(9), "a request of 0 prompt tokens"),
        ([5], Sampling(0), "up to 0 new ones"),
        ([5], Sampling(9, stop=("a",)), "no tokenizer to decode"),
    ],
)
def test_a_request_without_room_is_refused(backend, ids, sampling, complaint):
    vocabulary = Vocabulary(ENDS, PAD)
    model = opt()
    function = FUNCTIONS["static"](model)
    source = EagerGenerator(model, vocabulary) if backend == "eager" else Generator(function, vocabulary)
    with pytest.raises(ValueError, match=naming(complaint)):
        source.session(ROOM).submit(Prompt(ids, 1), sampling, RandomKey(1, "r"))


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("turns", [0, 1, 3], ids=["waiting", "started", "running"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_withdrawn_request_has_no_result_and_its_slot_serves_others(backend, turns):
    """Of requests on all slots two are withdrawn; the others' results are as without them, and the last one starts."""
    model, numbers = llama(), (1, 2)
    expected_session = source_of(backend, model, frozenset()).session(ROOM)
    submitted(expected_session, REQUESTS)
    expected = finished(expected_session)
    session = source_of(backend, model, frozenset()).session(ROOM)
    requests = submitted(session, REQUESTS)
    events = [event for _ in range(turns) for event in session.advance()]
    assert not {event.request.number for event in events} & set(numbers)
    for number in numbers:
        session.withdraw(requests[number])
    found = {event.request.number: event for event in events if isinstance(event, Finished)} | finished(session)
    assert sorted(found) == [n for n in range(len(REQUESTS)) if n not in numbers]
    for number, event in found.items():
        assert_equal(event, expected[number])
    assert session.is_idle


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("backend", BACKENDS)
def test_withdrawing_all_requests_leaves_a_session_that_serves(backend):
    model = llama()
    session = source_of(backend, model, frozenset()).session(ROOM)
    requests = submitted(session, REQUESTS)
    session.advance()
    for request in requests:
        session.withdraw(request)
    assert finished(session) == {}
    submitted(session, REQUESTS[:1])
    alone = source_of(backend, model, frozenset()).session(ROOM)
    submitted(alone, REQUESTS[:1])
    (event,) = finished(session).values()
    assert_equal(event, finished(alone)[0])


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_that_streams_starts_in_a_free_slot_at_once(backend):
    """While another runs, which has a longer way to go."""
    model = llama()
    session = source_of(backend, model, frozenset()).session(LONG)
    first, second = Prompt([7, 8, 9], 1), Prompt([5], 2)
    long = session.submit(first, Sampling(40), RandomKey(1, "rollout"), streams=True)
    session.advance()
    session.submit(second, Sampling(2), RandomKey(1, "rollout"), streams=True)
    order = [event.request for _ in range(99) for event in session.advance() if isinstance(event, Finished)]
    assert len(order) == 2 and order[1] is long


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_slot_of_a_withdrawn_request_is_free_before_its_answer_would_have_ended(backend):
    """All slots run long requests; one is withdrawn, and a short request ends before the others."""
    session = source_of(backend, llama(), frozenset()).session(LONG)
    long = [session.submit(Prompt([7, n], n), Sampling(40), RandomKey(1, "rollout"), streams=True) for n in range(3)]
    session.advance()
    session.withdraw(long[1])
    short = session.submit(Prompt([5], 9), Sampling(2), RandomKey(1, "rollout"), streams=True)
    order = [event.request for _ in range(99) for event in session.advance() if isinstance(event, Finished)]
    assert order == [short, long[0], long[2]]


@pytest.mark.parametrize("backend", slow_but(["static"], FUNCTIONS))
@pytest.mark.parametrize("streams", [True, False])
def test_long_prompts_start_one_by_one_while_a_response_streams(monkeypatch, backend, streams):
    """A stream waits for few tokens of other prompts at a time; without one, all prompts are prefilled at once."""
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS_WHILE_STREAMING", 13)
    room = Capacity(num_slots=6, max_new_tokens=9, max_length=40)
    source = source_of(backend, llama(), frozenset())
    session, forward, rows = source.session(room), source.forward, list[int]()
    prefill = forward.prefill

    def counted(ids, lengths, *rest, **how):
        rows.append(int(lengths.sum()))
        return prefill(ids, lengths, *rest, **how)

    monkeypatch.setattr(forward, "prefill", counted)
    session.submit(Prompt([7, 8, 9], 1), Sampling(9), RandomKey(1, "rollout"), streams=streams)
    session.advance()
    long = Prompt(random_ids((9,), seed=9)[0], 9)  # three samples share its prefill
    others = [(Prompt(random_ids((length,), seed=length)[0], length), 0) for length in (20, 4)]
    for prompt, sample in [(long, 0), (long, 1), (long, 2), *others]:
        session.submit(prompt, Sampling(9), RandomKey(1, "rollout"), sample=sample)
    found = finished(session)
    assert rows == ([3, 9, 20, 4] if streams else [3, 33])
    alone = EagerGenerator(llama(), Vocabulary(frozenset(), PAD)).session(room)
    for prompt, sample in [(Prompt([7, 8, 9], 1), 0), (long, 0), (long, 1), (long, 2), *others]:
        alone.submit(prompt, Sampling(9), RandomKey(1, "rollout"), sample=sample)
    for number, event in finished(alone).items():
        assert_equal(found[number], event)


@pytest.mark.parametrize("backend", slow_but(["static"], FUNCTIONS))
def test_streams_are_the_responses_whatever_ends_them(backend, deferred):
    """Ends, limits, stop texts and withdrawals while others join; each token is reported once, and none after the end.

    If deferred, the device has decoded further steps of a response meanwhile that a stop text ends.
    """
    model = llama()
    quiet = source_of(backend, model).session(ROOM)
    submitted(quiet, REQUESTS)
    expected = finished(quiet)
    stops = {n: f"<{one.ids[len(one.ids) // 2]}>" for n, one in expected.items() if n in (0, 3, 6)}
    session, left, found = source_of(backend, model).session(ROOM), [*enumerate(REQUESTS)], dict[int, Finished]()
    streamed: dict[int, list[tuple[int, float]]] = {n: [] for n in expected}
    tickets: dict[int, Request] = {}
    for turn in range(200):
        if left and turn % 2 == 0:
            number, (length, how, key, sample) = left.pop(0)
            how = replace(how, stop=(stops[number],)) if number in stops else how
            prompt = Prompt(random_ids((length,), seed=length)[0], 70 + length)
            tickets[number] = session.submit(prompt, how, key, sample=sample, streams=True)
        for event in session.advance():
            number = event.request.number
            assert number not in found and not event.request.is_withdrawn
            if isinstance(event, Finished):
                found[number] = event
            else:
                streamed[number] += zip(event.ids, event.log_probs.tolist(), strict=True)
        if 4 in tickets and streamed[4]:
            session.withdraw(tickets[4])
        if session.is_idle and not left:
            break
    for number, event in found.items():
        whole = expected[number].ids.tolist()
        end = next((n for n, token in enumerate(whole, 1) if f"<{token}>" == stops.get(number)), len(whole))
        assert event.ids.tolist() == whole[:end] and (event.reason == "stop") == (number in stops)
        assert streamed[number] == [*zip(whole[:end], event.log_probs.tolist(), strict=True)]
        torch.testing.assert_close(event.log_probs, expected[number].log_probs[:end], rtol=0.0, atol=1e-5)
    assert {*expected} - {*found} <= {4}
