"""Generations that end before all episodes have: which have ended, with which tokens, whatever slots and polls do."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from support.decode_models import EOS, FUNCTIONS, PAD, llama, opt, poll_often, random_ids
from support.marks import slow_but
from support.two_threads import TwoThreads, on_both

from pipeline.generation import device_work, generator
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import Episode, collect_first, generate
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Rollout, Sampling, Vocabulary
from pipeline.generation.session import Capacity, SessionSource

BACKENDS = slow_but(["eager", "static"], ["eager", *FUNCTIONS])
ENDS = frozenset({EOS, *range(20, 120)})  # a third of the tokens end a response
KEY, SAMPLING = RandomKey(3, "rollout"), Sampling(70, 0.9)  # a look at what has ended at each second token
PROMPTS = [Prompt(random_ids((length,), seed=length)[0], 70 + length) for length in (3, 5, 1)]


class FirstOnes:
    """Needs so many episodes; `known` are responses of an earlier generation, of which it adds the first `share`."""

    def __init__(self, needed: int, known: Sequence[torch.Tensor] = (), share: int = 0) -> None:
        self.needed, self.known, self.share, self.looks = needed, known, share, list[int]()

    def begin(self, episodes: Sequence[Episode]) -> None:
        self.episodes = episodes
        for episode, ids in zip(episodes, self.known, strict=False):
            episode.add(ids[: self.share], torch.zeros(len(ids[: self.share])))
            episode.earlier = len(ids[: self.share])
            episode.reason = "end" if len(ids) <= self.share else None

    def is_enough(self, length: int, *, stop: bool) -> bool:
        if stop:
            raise GenerationStopped
        self.looks.append(length)
        return (
            sum(one.reason is not None and one.length - one.earlier <= length for one in self.episodes) >= self.needed
        )


def source_of(backend: str, model: Any) -> SessionSource:
    vocabulary = Vocabulary(ENDS, PAD)
    return EagerGenerator(model, vocabulary) if backend == "eager" else Generator(FUNCTIONS[backend](model), vocabulary)


def rollout(source: SessionSource, *, num_slots: int = 12, **options: Any) -> Rollout:
    return generate(source, PROMPTS, num_samples=4, num_slots=num_slots, sampling=SAMPLING, key=KEY, **options)


def first_ones(whole: Rollout, needed: int) -> tuple[list[list[int]], list[bool], int]:
    """By hand: the tokens of each row up to the even length within which so many have ended, which have, the length."""
    rows = [row.tolist() for row in whole.responses]
    length = next(length for length in count(2, 2) if sum(len(row) <= length for row in rows) >= needed)
    return [row[:length] for row in rows], [len(row) <= length for row in rows], length


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_slots", "memory"), [(12, 1000), (5, 1000), (12, 90)], ids=["12", "5", "slots are lost"])
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_have_their_first_tokens(
    backend: str, deferred: bool, num_slots: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 5 slots most wait, and those that start last decide when the generation ends."""
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset({"cpu", "cuda"} if deferred else ()))
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: memory)
    monkeypatch.setattr(generator, "FIRST_NEW_TOKENS", 1)
    for module in ("generator", "slots"):
        monkeypatch.setattr(f"pipeline.generation.{module}.CACHE_LENGTH_MULTIPLE", 1)
    source = source_of(backend, llama())
    whole, lengths = rollout(source), set[int]()
    for needed in (1, 9, 12):
        supply = FirstOnes(needed)
        found, (rows, ended, length) = rollout(source, num_slots=num_slots, supply=supply), first_ones(whole, needed)
        assert [row.tolist() for row in found.responses] == rows and found.finished.tolist() == ended
        for row, log_probs in zip(found.log_probs, whole.log_probs, strict=True):
            torch.testing.assert_close(row, log_probs[: len(row)], rtol=0.0, atol=1e-4)
        assert supply.looks == list(range(2, length + 1, 2))
        lengths.add(length)
    assert len(lengths) == 3 and whole.finished.all()


@pytest.mark.few(1)
@pytest.mark.parametrize("num_slots", [12, 3])
@pytest.mark.parametrize("backend", slow_but(["static"], FUNCTIONS))
def test_earlier_tokens_are_continued(backend: str, num_slots: int) -> None:
    """The first eight responses have five tokens, or have ended; the others begin. Equal to the eager backend."""
    known = rollout(source_of("eager", model := opt())).responses[:8]
    both = [
        rollout(source_of(name, model), num_slots=slots, supply=FirstOnes(9, known, share=5))
        for name, slots in (("eager", 12), (backend, num_slots))
    ]
    expected, found = ([row.tolist() for row in one.responses] for one in both)
    assert found == expected and both[0].finished.tolist() == both[1].finished.tolist()
    assert all(
        row[: len(first)] == first for row, first in zip(expected, [one[:5].tolist() for one in known], strict=False)
    )
    ended = [len(one) <= 5 for one in known]
    assert {*ended} == {True, False} and all((len(expected[n]) > 5) != one for n, one in enumerate(ended))
    assert 9 <= sum(both[0].finished.tolist()) < 12


@pytest.mark.parametrize("backend", ["eager", "static"])
def test_a_stop_text_may_begin_in_earlier_tokens(backend: str) -> None:
    vocabulary = Vocabulary(ENDS, PAD, decode=lambda ids: "".join(f"<{one}>" for one in ids))
    source: Any = EagerGenerator(llama(), vocabulary)
    known = rollout(source).responses

    def continued(*stop: str) -> Rollout:
        supply = FirstOnes(12, known, share=2)
        return generate(source, PROMPTS, num_samples=4, num_slots=12, sampling=replace(SAMPLING, stop=stop), key=KEY,
                        supply=supply)  # fmt: skip

    rows = [row.tolist() for row in continued().responses]
    source = source if backend == "eager" else Generator(StaticCacheForward(source.model), vocabulary)
    first = next(n for n, row in enumerate(rows) if len(row) > 5)
    stopped = continued(f"<{rows[first][1]}><{rows[first][2]}>")
    assert stopped.responses[first].tolist() == rows[first][:3] and stopped.finished[first]


@pytest.mark.parametrize("backend", ["eager", "static"])
def test_a_stop_waits_for_no_response(backend: str) -> None:
    """Most responses wait for a slot, so that the first look is far away."""
    asked, supply = list[bool](), FirstOnes(12)

    def should_stop() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    with pytest.raises(GenerationStopped):
        rollout(source_of(backend, opt()), num_slots=2, supply=supply, should_stop=should_stop)
    assert asked == [False, False, True] and not supply.looks


def test_ranks_in_lockstep_look_at_the_same_lengths() -> None:
    """One of two ranks has responses that end before, and takes part in the other's steps up to each look."""
    lockstep, model, found = TwoThreads(), llama(), dict[int, list[Episode]]()
    alone = [
        generate(source_of("static", model), PROMPTS[:1], num_samples=2, num_slots=2, sampling=SAMPLING, key=key)
        for key in (RandomKey(0, "r"), RandomKey(5, "r"))
    ]
    needed = {rank: len(one.responses) for rank, one in enumerate(alone)}
    looks = dict[int, list[int]]()

    class Both(FirstOnes):
        """Enough is what both ranks need."""

        def is_enough(self, length: int, *, stop: bool) -> bool:
            mine = super().is_enough(length, stop=stop)
            return not lockstep.largest(not mine)[0]

    def sample(rank: int) -> None:
        session: Any = Generator(StaticCacheForward(model), Vocabulary(ENDS, PAD)).session(Capacity(2, 70, 80))
        session.lockstep = lockstep
        found[rank], supply = [Episode(n, PROMPTS[0], n) for n in range(2)], Both(needed[rank])
        with lockstep.turn:
            collect_first(session, found[rank], sampling=SAMPLING, key=RandomKey(5 * rank, "r"), supply=supply,
                          should_stop=lambda: False)  # fmt: skip
        looks[rank] = supply.looks

    on_both(sample)
    for rank, expected in enumerate(alone):
        assert [one.turns[0] for one in found[rank]] == [row.tolist() for row in expected.responses]
    assert looks[0] == looks[1] and len({len(row) for one in alone for row in one.responses}) > 2
