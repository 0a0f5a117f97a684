"""Requests of unlike settings where they share something: ranks in lockstep, lost slots, a padded vocabulary."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.decode_models import DEVICE, PAD, fused, llama, opt, poll_often, random_ids
from support.two_threads import TwoThreads

from pipeline.generation import generator, scheduler
from pipeline.generation.device_work import Lockstep
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
from pipeline.generation.scheduler import ContinuousBatching
from pipeline.generation.session import Capacity, Finished, Session
from pipeline.generation.slots import GenerationBuffers


def decode(ids: Sequence[int]) -> str:
    """A text in which every token is a word."""
    return "".join(f"<{token}>" for token in ids)


def finish(session: Session) -> list[Finished]:
    """Advance until the last request has ended; the responses in the order of submission."""
    responses = dict[int, Finished]()
    while True:
        ended = [event for event in session.advance() if isinstance(event, Finished)]
        responses |= {one.request.number: one for one in ended}
        if session.is_idle:
            return [responses[number] for number in sorted(responses)]


@pytest.mark.parametrize("streams", [True, False])
def test_ranks_in_lockstep_decode_as_many_steps_where_one_watches_its_tokens(monkeypatch, streams):
    """Each step is a collective of all ranks: a stream, or a stop text, of one alone changes the steps of both."""
    poll_often(monkeypatch)
    monkeypatch.setattr(scheduler, "POLL_INTERVAL", 3)
    monkeypatch.setattr(scheduler, "POLL_INTERVAL_WATCHED", 1)
    lockstep, steps, found = TwoThreads(), dict[int, list[int]](), dict[int, list[Finished]]()
    enqueue = GenerationBuffers.decode

    def noted(buffers: GenerationBuffers, number: int) -> None:
        steps.setdefault(threading.get_ident(), []).append(number)
        enqueue(buffers, number)

    def sample(rank: int, session: Session) -> None:
        sampling = Sampling(8, stop=("never",) if rank and not streams else ())
        session.submit(Prompt([5, 6], rank), sampling, RandomKey(1, "r"), streams=bool(rank) and streams)
        with lockstep.turn:
            found[rank] = finish(session)

    monkeypatch.setattr(GenerationBuffers, "decode", noted)
    ranks = []
    for rank in range(2):
        forward: Any = StaticCacheForward(llama())
        forward.lockstep = lockstep
        source = Generator(forward, Vocabulary(frozenset(), PAD, decode=decode))
        source.lockstep = Lockstep()
        session = source.session(Capacity(1, 8, 12))
        session.lockstep = lockstep
        ranks.append(threading.Thread(target=sample, args=(rank, session)))
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert [len(found[rank][0].ids) for rank in range(2)] == [8, 8]
    first, second = steps.values()
    assert first == second and sum(first) == 7


def test_the_first_token_of_each_response_to_one_prompt_has_settings_of_its_own():
    """One row of logits, from which slots draw by one rule each: all of it, or the likeliest token alone."""
    model = opt()
    source = Generator(StaticCacheForward(model), Vocabulary(frozenset(), PAD))
    session, prompt = source.session(Capacity(10, 1, 4)), Prompt([5, 6, 7], 1)
    narrow = (Sampling(1, 9.0, top_p=1e-6), Sampling(1, 9.0, top_k=1), Sampling(1, 0))
    for n in range(10):
        session.submit(prompt, narrow[n % 3] if n else Sampling(1, 9.0), RandomKey(4, "r"), sample=n)
    first, *others = (response.ids.item() for response in finish(session))
    likeliest = model(torch.tensor([prompt.ids], device=DEVICE)).logits[0, -1].argmax().item()
    assert others == [likeliest] * 9 and first != likeliest


@pytest.mark.slow
def test_a_response_keeps_its_settings_where_it_is_moved_to_another_slot(monkeypatch):
    """Memory for two slots, then for one: the longer response, of the second slot, goes on in the first."""
    for module in ("generator", "slots"):
        monkeypatch.setattr(f"pipeline.generation.{module}.CACHE_LENGTH_MULTIPLE", 1)
    monkeypatch.setattr(generator, "FIRST_NEW_TOKENS", 1)
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: 14)
    poll_often(monkeypatch)
    model, vocabulary = opt(), Vocabulary(frozenset(), PAD)
    requests = [(1, Sampling(9, 2.0)), (3, Sampling(8, 0.7, top_p=0.8, top_k=5))]
    kept, found = list[list[int]](), list[list[Finished]]()
    grow = GenerationBuffers.grow

    def noted(buffers: GenerationBuffers, cache_length: int, slots: Sequence[int]) -> None:
        kept.append(list(slots))
        grow(buffers, cache_length, slots)

    monkeypatch.setattr(GenerationBuffers, "grow", noted)
    for source in (Generator(fused(model), vocabulary), EagerGenerator(model, vocabulary)):
        session = source.session(Capacity(2, 9, 12))
        for length, sampling in requests:
            session.submit(Prompt(random_ids((length,), seed=length)[0], length), sampling, RandomKey(2, "r"))
        found.append(finish(session))
    assert kept[-1] == [1]
    for mine, theirs in zip(*found, strict=True):
        assert mine.ids.tolist() == theirs.ids.tolist()
        torch.testing.assert_close(mine.log_probs, theirs.log_probs, rtol=0.0, atol=1e-5)


def static_session(capacity: Capacity, ends: Sequence[int] = ()) -> ContinuousBatching:
    return Generator(StaticCacheForward(opt()), Vocabulary(frozenset(ends), PAD, decode=decode)).session(capacity)


def test_a_slot_is_free_as_soon_as_a_stop_text_has_ended_its_response(monkeypatch):
    """Not when the response would have come to its limit."""
    poll_often(monkeypatch)
    session = static_session(Capacity(1, 30, 40))
    session.submit(Prompt([5, 6], 1), Sampling(30, stop=("<",)), RandomKey(1, "r"))
    session.submit(Prompt([7], 2), Sampling(1), RandomKey(1, "r"))
    stopped, next_one = finish(session)
    assert (len(stopped.ids), stopped.reason, next_one.reason) == (1, "stop", "limit")
    assert session.num_steps < 10
