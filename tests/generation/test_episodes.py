"""Responses of several turns: what answers a turn goes into the context, whatever slots, ranks and waiting times do."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.decode_models import DEVICE, EOS, FUNCTIONS, PAD, llama, opt, poll_often, random_ids
from support.marks import slow_but
from support.two_threads import TwoThreads, on_both

from pipeline.generation import episodes
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import Episode, collect, generate
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import (
    GenerationStopped,
    Prompt,
    RandomKey,
    Rollout,
    Sampling,
    Vocabulary,
    draw,
    rollout_uniforms,
)
from pipeline.generation.session import Capacity, SessionSource

BACKENDS = slow_but(["eager", "static"], ["eager", *FUNCTIONS])
ENDS = frozenset({EOS, *range(20, 120)})  # a third of the tokens end a turn
KEY, SAMPLING = RandomKey(3, "rollout"), Sampling(14, 0.9)
PROMPTS = [Prompt(random_ids((length,), seed=length)[0], 70 + length) for length in (3, 5, 1)]


class Answered:
    """Answers a turn by its last token and two more, up to a number of turns; the prompt of 5 tokens gets none."""

    def __init__(self, turns: int = 3, wait: Callable[[], None] = lambda: None) -> None:
        self.turns, self.wait, self.over = turns, wait, list[int]()

    def answer(self, episode: Episode) -> Callable[[], list[int]] | None:
        is_last = len(episode.segments) >= 2 * self.turns - 1 or episode.reason != "end"
        if len(episode.prompt.ids) == 5 or is_last:
            return None
        return lambda: self.answer_to(int(episode.segments[-1].ids[-1]))

    def answer_to(self, last: int) -> list[int]:
        self.wait()
        return [200, last + 100, 201]

    def ended(self, episode: Episode) -> None:
        self.over.append(episode.number)


def source_of(backend: str, model: Any) -> SessionSource:
    vocabulary = Vocabulary(ENDS, PAD)
    return EagerGenerator(model, vocabulary) if backend == "eager" else Generator(FUNCTIONS[backend](model), vocabulary)


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


@torch.no_grad()
def by_hand(model: Any, prompt: Prompt, sample: int) -> tuple[list[int], list[bool], list[float], bool]:
    """The ids, which are sampled, their log-probabilities, and whether an end came: one whole forward pass a token."""
    answers, ids, sampled, log_probs, turn = Answered(), list[int](), list[bool](), list[float](), 1
    keyed, first = prompt, 0
    while True:
        uniforms = rollout_uniforms(KEY, torch.tensor([keyed.prompt_id]), torch.tensor([sample]), 14)
        logits = model(torch.tensor([[*prompt.ids, *ids]], device=DEVICE)).logits[:, -1].float() / SAMPLING.temperature
        token = int(draw(logits, uniforms[:, len(ids) - first].to(DEVICE)))
        ids, sampled = [*ids, token], [*sampled, True]
        log_probs.append(float(logits.log_softmax(-1)[0, token]))
        if token in ENDS:
            if turn == 3 or len(prompt.ids) == 5:
                return ids, sampled, log_probs, True
            added = answers.answer_to(token)
            if len(ids) + len(added) >= SAMPLING.max_new_tokens:
                return ids, sampled, log_probs, False
            ids, sampled, turn = [*ids, *added], [*sampled, *[False] * len(added)], turn + 1
            keyed, first = Prompt.of([*prompt.ids, *ids]), len(ids)
        elif len(ids) == SAMPLING.max_new_tokens:
            return ids, sampled, log_probs, False


def rollout(source: SessionSource, answers: Answered, *, num_slots: int = 12) -> Rollout:
    return generate(source, PROMPTS, num_samples=4, num_slots=num_slots, sampling=SAMPLING, key=KEY, answers=answers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_turn_continues_all_tokens_before_it(backend: str) -> None:
    """Ids, masks, log-probabilities and ends are those of whole forward passes, one a token."""
    model, answers = llama(), Answered()
    found = rollout(source_of(backend, model), answers)
    expected = [by_hand(model, prompt, sample) for prompt in PROMPTS for sample in range(4)]
    assert [row.tolist() for row in found.responses] == [ids for ids, *_ in expected]
    assert [row.tolist() for row in found.sampled] == [sampled for _, sampled, *_ in expected]
    assert found.finished.tolist() == [ended for *_, ended in expected]
    for row, (_, _, log_probs, _) in zip(found.log_probs, expected, strict=True):
        torch.testing.assert_close(row.cpu(), torch.tensor(log_probs), rtol=0.0, atol=1e-4)
    turns = [sum(not flag for flag in sampled) // 3 + 1 for _, sampled, *_ in expected]
    assert {1, 2, 3} <= {*turns} and {*turns[4:8]} == {1} and {*found.finished.tolist()} == {True, False}
    assert sorted(answers.over) == list(range(12)), "each ends once"


@pytest.mark.few(1)
@pytest.mark.parametrize("num_slots", [2, 1, 12])
@pytest.mark.parametrize("share", [0.5, 0.0, 9.0])
def test_slots_and_the_time_to_answer_change_nothing(
    num_slots: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are taken in at once, with half of the slots, or once all have ended."""
    monkeypatch.setattr(episodes, "WAITING_SHARE", share)
    clock, model = random.Random(num_slots), opt()
    expected = rollout(source_of("eager", model), Answered())
    slow = Answered(wait=lambda: time.sleep(clock.random() / 100))
    found = rollout(source_of("static", model), slow, num_slots=num_slots)
    assert [row.tolist() for row in found.responses] == [row.tolist() for row in expected.responses]
    assert found.finished.tolist() == expected.finished.tolist()


@pytest.mark.parametrize(("limit", "is_answered"), [(4, False), (5, True)])
def test_an_answer_needs_room_for_one_more_token(limit: int, is_answered: bool) -> None:
    """A turn of one token, three of an answer: four leave no room for another turn, five do."""
    source = source_of("static", opt())
    source.vocabulary = Vocabulary(frozenset(range(301)), PAD)  # each token ends its turn
    (prompt, *_) = PROMPTS
    found = generate(
        source, [prompt], num_samples=1, num_slots=1, sampling=Sampling(limit), key=KEY, answers=Answered(turns=2)
    )
    assert found.sampled[0].tolist() == [True, *([False] * 3 + [True]) * is_answered]
    assert found.finished.tolist() == [is_answered] and len(found.log_probs[0]) == 1 + is_answered


def test_a_stop_while_one_rank_waits_for_an_answer_stops_both() -> None:
    """The next step tells the other rank, which must not find itself in another collective."""
    lockstep, model, ended = TwoThreads(), llama(), dict[int, str]()

    class Stops(Answered):
        def answer_to(self, last: int) -> list[int]:
            raise GenerationStopped

    def sample(rank: int) -> None:
        session: Any = Generator(StaticCacheForward(model), Vocabulary(ENDS, PAD)).session(Capacity(2, 14, 20))
        session.lockstep = lockstep
        rows, answers = [Episode(n, PROMPTS[0], n) for n in range(2)], Stops() if rank else Answered(turns=1)
        with lockstep.turn:
            try:
                collect(session, rows, sampling=SAMPLING, key=KEY, answers=answers, should_stop=lambda: False)
            except GenerationStopped:
                ended[rank] = "stopped"

    on_both(sample)
    assert ended == {0: "stopped", 1: "stopped"}


def test_ranks_in_lockstep_wait_for_the_one_whose_turns_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a collective of both; one of them has no further turns when both are idle."""
    monkeypatch.setattr(episodes, "WAITING_SHARE", 9.0)
    lockstep, model = TwoThreads(), llama()
    alone = [generate(source_of("static", model), PROMPTS[:1], num_samples=2, num_slots=2, sampling=SAMPLING,
                      key=RandomKey(rank, "r"), answers=Answered(3 * rank or 1)) for rank in range(2)]  # fmt: skip
    found = dict[int, list[Episode]]()

    def sample(rank: int) -> None:
        forward: Any = StaticCacheForward(model)
        source = Generator(forward, Vocabulary(ENDS, PAD))
        session = source.session(Capacity(2, 14, 20))
        session.lockstep = lockstep
        found[rank] = [Episode(n, PROMPTS[0], n) for n in range(2)]
        with lockstep.turn:
            collect(session, found[rank], sampling=SAMPLING, key=RandomKey(rank, "r"),
                    answers=Answered(3 * rank or 1), should_stop=lambda: False)  # fmt: skip

    on_both(sample)
    for rank, expected in enumerate(alone):
        ids = [[token for turn in one.turns for token in turn] for one in found[rank]]
        assert ids == [row.tolist() for row in expected.responses], rank
    assert max(len(one.segments) for one in found[1]) > 1 == max(len(one.segments) for one in found[0])
    assert any(one.request is not None and one.request.start for one in found[1]), "a slot is continued"
