"""Requests of unlike settings where they share something: ranks in lockstep, lost slots, a padded vocabulary."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from support.decode_models import PAD, llama, poll_often, random_ids

from pipeline.generation import scheduler
from pipeline.generation.device_work import Lockstep
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
from pipeline.generation.session import Finished, Room, Session, finish
from pipeline.generation.slots import GenerationBuffers


def decode(ids: Sequence[int]) -> str:
    """A text in which every token is a word."""
    return "".join(f"<{token}>" for token in ids)


class TwoThreads(Lockstep):
    """The lockstep of two threads, each a rank; triton's interpreter runs in one of them at a time."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[int, ...]] = {}
        self.barrier, self.turn = threading.Barrier(2, timeout=20), threading.Lock()

    def meet(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def largest(self, *values: int) -> Sequence[int]:
        self.values[threading.get_ident()] = values
        self.meet()
        found = [max(pair) for pair in zip(*self.values.values(), strict=True)]
        self.meet()
        return found


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
        session = source.session(Room(1, 8, 12))
        session.lockstep = lockstep
        ranks.append(threading.Thread(target=sample, args=(rank, session)))
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert [len(found[rank][0].ids) for rank in range(2)] == [8, 8]
    first, second = steps.values()
    assert first == second and sum(first) == 7
