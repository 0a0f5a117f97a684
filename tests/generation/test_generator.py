"""Whole generations in slots against the eager loop: equal tokens, log-probabilities and ends, whatever the slots."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.decode_models import (
    DEVICE,
    EOS,
    FUNCTIONS,
    NUM_TOKENS,
    PAD,
    assert_same,
    fused,
    generator_of,
    llama,
    opt,
    poll_often,
    random_prompts,
    rollouts,
)
from support.marks import slow

from pipeline.generation import device_work, prefills, scheduler
from pipeline.generation.episodes import generate
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import Generator
from pipeline.generation.rollouts import GenerationStopped, RandomKey, Sampling, Vocabulary
from pipeline.generation.session import Capacity
from pipeline.generation.slots import CACHE_LENGTH_MULTIPLE, GenerationBuffers

# Many tokens end a response, so that rows end at different times.
ENDS = [EOS, *range(20, 70)]
PROMPTS = random_prompts((3, 5, 1))


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [opt, llama])
def test_the_fused_backend_samples_what_the_eager_loop_does(make):
    """Six responses in three slots: later ones get the slots of those that ended."""
    model = make()
    actual, expected = rollouts(model, fused(model), PROMPTS, sampling=Sampling(5), num_samples=2, ends=ENDS)
    assert_same(actual, expected)
    assert actual.finished.any() and not actual.finished.all()
    assert len({len(row) for row in actual.responses}) > 1


@pytest.mark.parametrize("settings", [{"temperature": 0.6, "top_k": 9, "top_p": 0.7}, {"max_new_tokens": 1}])
def test_the_fused_backend_knows_the_settings(settings):
    model = opt()
    sampling = Sampling(**({"max_new_tokens": 3} | settings))
    assert_same(*rollouts(model, fused(model), PROMPTS[:2], sampling=sampling, num_slots=2, ends=ENDS))


SETTINGS: dict[str, dict[str, Any]] = {
    "one slot": {"num_slots": 1},
    "two slots, three samples": {"num_slots": 2, "num_samples": 3},
    "more slots than rows": {"num_slots": 50, "num_samples": 2},
    "every token is an end": {"ends": range(NUM_TOKENS)},
    "no token is an end": {"ends": ()},
    "one token": {"max_new_tokens": 1, "num_samples": 2},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 9999},
    "top_p": {"top_p": 0.4},
    "all of it": {"top_p": 0.8, "top_k": 20, "temperature": 1.4, "num_samples": 2, "num_slots": 4},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("every", [1, slow(3)])
@pytest.mark.parametrize(
    "name", ["one slot", "two slots, three samples", "every token is an end", "one token", "all of it"]
)
def test_a_host_that_works_ahead_samples_the_same(monkeypatch, name, every):
    """Deferred polls, as with a GPU: a slot that was assigned since is not assigned once more."""
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(scheduler, "POLL_INTERVAL_WHILE_WAITING", every)
    test_the_static_backend_samples_what_the_eager_loop_does(name)


@pytest.fixture
def overlapped_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Overlap as with a GPU; return a list with an entry for each overlapped prefill."""
    seen, opened = [], device_work.SideStream.enqueuing
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset({DEVICE.type}))
    monkeypatch.setattr(device_work.SideStream, "enqueuing", lambda side: (seen.append(1), opened(side))[1])
    return seen


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("every", "num_slots", "num_samples", "ends", "overlaps"),
    [
        (1, 1, 1, ENDS, False),  # when the only row has ended there is no decode step to overlap
        (1, 2, 3, ENDS[:20], True),
        slow((3, 2, 3, ENDS[:20], True)),
        slow((1, 3, 3, ENDS, True)),
        slow((3, 3, 2, (), False)),  # all end at once
        (1, 2, 2, range(NUM_TOKENS), False),  # all have ended before a step
    ],
)
def test_overlapped_prefills_sample_the_same(
    monkeypatch, overlapped_prefills, every, num_slots, num_samples, ends, overlaps
):
    """Their responses start an iteration later, in slots that are given to no other response, and none is lost."""
    monkeypatch.setattr(scheduler, "POLL_INTERVAL_OVERLAPPED", every)
    model, settings = opt(), {"num_samples": num_samples, "num_slots": num_slots, "ends": ends}
    assert_same(*rollouts(model, fused(model), PROMPTS, sampling=Sampling(8), **settings))
    assert bool(overlapped_prefills) is overlaps


@pytest.mark.slow
def test_the_static_backend_and_ranks_in_lockstep_do_not_overlap_prefills(overlapped_prefills):
    """The first writes a key in free slots too; the others meet in collectives."""
    model = opt()
    rollouts(model, StaticCacheForward(model), PROMPTS, sampling=Sampling(8), num_samples=3, num_slots=3, ends=ENDS)
    function = fused(model)
    function.lockstep = device_work.Lockstep()
    gen = generator_of(function, ENDS)
    rollouts(model, gen, PROMPTS, sampling=Sampling(8), num_samples=3, num_slots=3, ends=ENDS)
    assert not overlapped_prefills
    function.lockstep, function.group = None, SimpleNamespace(size=2)
    assert generator_of(function).stream is None


@pytest.mark.parametrize("deferred_polls", [(), ("cpu",)])
@pytest.mark.parametrize(
    ("num_slots", "steps", "ends"), [(6, 6, ()), slow((3, 12, ())), slow((1, 36, ())), (6, 5, range(NUM_TOKENS))]
)
def test_no_decode_step_is_made_in_vain(monkeypatch, num_slots, steps, ends, deferred_polls):
    """Six responses of seven tokens, the first of which the prefill draws; or that end there, before a poll."""
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset(deferred_polls))
    monkeypatch.setattr(scheduler, "POLL_INTERVAL", 5)
    monkeypatch.setattr(scheduler, "POLL_INTERVAL_WHILE_WAITING", 4)
    made, advance = [], GenerationBuffers.decode
    monkeypatch.setattr(
        GenerationBuffers, "decode", lambda buffers, count: (made.append(count), advance(buffers, count))[1]
    )
    model = opt()
    rollouts(
        model, StaticCacheForward(model), PROMPTS, sampling=Sampling(7), num_samples=2, num_slots=num_slots, ends=ends
    )
    assert sum(made) == steps and max(made) <= 5


def sampling_of(settings: dict[str, Any]) -> Sampling:
    names = ("max_new_tokens", "temperature", "top_p", "top_k")
    return Sampling(**({"max_new_tokens": 7} | {name: settings[name] for name in names if name in settings}))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_static_backend_samples_what_the_eager_loop_does(name):
    settings = SETTINGS[name]
    others = {name: settings[name] for name in ("num_slots", "num_samples", "ends") if name in settings}
    model = llama()
    actual, expected = rollouts(
        model, StaticCacheForward(model), PROMPTS, sampling=sampling_of(settings), **({"ends": ENDS} | others)
    )
    assert_same(actual, expected)
    if name == "every token is an end":
        assert [len(row) for row in actual.responses] == [1, 1, 1] and actual.finished.all()
    if name == "no token is an end":
        assert [len(row) for row in actual.responses] == [7, 7, 7] and not actual.finished.any()


@pytest.mark.parametrize("backend", FUNCTIONS)
def test_equal_prompts_of_other_ids_differ_and_a_seed_repeats_bit_for_bit(backend):
    model = opt()
    ids = PROMPTS[0].ids
    prompts = [type(PROMPTS[0])(ids, 7), type(PROMPTS[0])(ids, 8)]
    settings = {"num_samples": 1, "num_slots": 2, "sampling": Sampling(4), "key": RandomKey(5, "rollout", 2)}
    first, again = (generate(generator_of(FUNCTIONS[backend](model)), prompts, **settings) for _ in range(2))
    assert first.responses[0].tolist() != first.responses[1].tolist()
    for one, other in zip(first.responses + first.log_probs, again.responses + again.log_probs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_further_calls_take_the_same_buffers_and_other_numbers():
    model = opt()
    gen = generator_of(StaticCacheForward(model), ENDS)
    common = {"sampling": Sampling(5), "num_samples": 2, "ends": ENDS}
    actual = []
    for key in (RandomKey(3, "rollout"), RandomKey(3, "rollout", 1), RandomKey(4, "rollout"), RandomKey(3, "rollout")):
        mine, expected = rollouts(model, gen, PROMPTS, key=key, **common)
        assert_same(mine, expected)
        actual.append(mine)
        buffers = gen._buffers
    assert gen._buffers is buffers and buffers.num_slots == 3
    tokens = [[row.tolist() for row in one.responses] for one in actual]
    assert tokens[0] == tokens[3] and len({str(one) for one in tokens}) == 3


def test_a_rollout_is_not_written_over_by_the_next():
    model = opt()
    gen = generator_of(StaticCacheForward(model), ENDS)
    first, expected = rollouts(model, gen, PROMPTS, sampling=Sampling(5), ends=ENDS)
    rollouts(model, gen, PROMPTS, sampling=Sampling(5), ends=ENDS, key=RandomKey(9, "rollout"))
    assert_same(first, expected)


# What a second call changes -> whether the buffers of the first one serve it.
CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "more rows": ({"num_samples": 2}, True),
    "more slots": ({"num_slots": 3}, False),
    "sampling": ({"sampling": Sampling(5, top_k=2)}, True),
    "longer responses": ({"sampling": Sampling(6)}, False),
    "longer prompts": ({"prompts": random_prompts((3, 61, 5))}, False),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES)
def test_larger_jobs_get_other_buffers(change):
    model = llama()
    gen = generator_of(StaticCacheForward(model), ENDS)
    usual = {"prompts": PROMPTS, "sampling": Sampling(5), "num_slots": 2}
    rollouts(model, gen, **usual)
    buffers = gen._buffers
    changed, serves = CHANGES[change]
    assert_same(*rollouts(model, gen, **(usual | changed), ends=ENDS))
    assert (gen._buffers is buffers) is serves


@pytest.mark.slow
def test_evaluations_between_rollouts_take_their_buffers():
    """Fewer rows at once, and more of them: nothing is made anew."""
    model = llama()
    gen = generator_of(StaticCacheForward(model), ENDS)
    rollout = {"prompts": PROMPTS[:2], "num_samples": 2, "num_slots": 4}
    evaluation = {"prompts": [*PROMPTS, *random_prompts((4, 2, 6), seed=9)], "num_slots": 2}
    buffers_seen = []
    for job in (rollout, evaluation, rollout, evaluation):
        assert_same(*rollouts(model, gen, **job, sampling=Sampling(5), ends=ENDS))
        buffers_seen.append(gen._buffers)
    assert len(set(map(id, buffers_seen))) == 1 and buffers_seen[3].num_slots == 4


def test_the_number_of_slots_does_not_follow_from_who_came_first():
    """The last bits of a 16-bit product depend on its rows, and a resumed run may evaluate before it samples."""
    model = llama()
    gen = Generator(StaticCacheForward(model), Vocabulary(frozenset(ENDS), PAD), least=Capacity(5, 0, 0))
    assert_same(*rollouts(model, gen, PROMPTS[:1], sampling=Sampling(5), num_slots=1, ends=ENDS))
    assert gen._buffers.num_slots == 5


def test_weights_that_move_get_other_buffers():
    """A captured graph would read the old addresses."""
    model = llama()
    gen = generator_of(StaticCacheForward(model))
    rollouts(model, gen, PROMPTS, sampling=Sampling(3))
    buffers = gen._buffers
    model.model.norm.weight.data = model.model.norm.weight.data * 1.5
    assert_same(*rollouts(model, gen, PROMPTS, sampling=Sampling(3)))
    assert gen._buffers is not buffers


def test_rows_that_ended_stay_where_they_are():
    """While others go on: their lengths must not exceed the cache."""
    model = llama()
    gen = generator_of(StaticCacheForward(model), ENDS)
    actual, expected = rollouts(model, gen, PROMPTS, sampling=Sampling(9), num_samples=2, num_slots=6, ends=ENDS)
    assert_same(actual, expected)
    ends = [len(prompt) + len(response) - 1 for prompt, response in zip(actual.prompts, actual.responses, strict=True)]
    assert gen._buffers.slots.lengths.tolist() == ends and len({len(row) for row in actual.responses}) > 1


def test_a_slightly_longer_prompt_fits_in_the_same_buffers():
    model = llama()
    gen = generator_of(StaticCacheForward(model))
    rollouts(model, gen, PROMPTS, sampling=Sampling(5))
    buffers = gen._buffers
    assert_same(*rollouts(model, gen, random_prompts((9, 20, 3), seed=8), sampling=Sampling(5)))
    assert gen._buffers is buffers and buffers.cache_length == CACHE_LENGTH_MULTIPLE


@pytest.mark.parametrize("limit", [1, 6, 9])
def test_prefills_have_a_bounded_size(monkeypatch, limit):
    """A prefill has at most `limit` tokens, padding counted, or one prompt."""
    monkeypatch.setattr(prefills, "MAX_PREFILL_TOKENS", limit)
    model = llama()
    function = StaticCacheForward(model)
    shapes = watched_prompts(function, monkeypatch)
    assert_same(*rollouts(model, function, PROMPTS, sampling=Sampling(3), num_samples=2, num_slots=6, ends=ENDS))
    assert all(rows * width <= limit or rows == 1 for rows, width in shapes)
    assert len(shapes) > 2


def watched_prompts(function: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (prompts, tokens) of each prefill from now on."""
    shapes: list[tuple[int, int]] = []
    prompt = function.prefill

    def watched(ids: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        shapes.append(tuple(ids.shape))
        return prompt(ids, *given, **more)

    monkeypatch.setattr(function, "prefill", watched)
    return shapes


def test_samples_of_a_prompt_share_its_prefill(monkeypatch):
    model = llama()
    function = StaticCacheForward(model)
    shapes = watched_prompts(function, monkeypatch)
    assert_same(*rollouts(model, function, PROMPTS[:2], sampling=Sampling(3), num_samples=3, num_slots=6, ends=ENDS))
    assert shapes == [(2, 5)]


# --- stopping ---


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("deferred_polls", "after"), [((), 0), ((DEVICE.type,), 2), slow(((), 2)), slow(((DEVICE.type,), 0))]
)
@pytest.mark.parametrize("backend", FUNCTIONS)
def test_generation_stops_when_asked_and_the_next_call_is_whole(monkeypatch, backend, after, deferred_polls):
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset(deferred_polls))
    model = opt()
    gen = generator_of(FUNCTIONS[backend](model))
    asked: list[None] = []

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) > after

    with pytest.raises(GenerationStopped):
        generate(
            gen,
            PROMPTS[:2],
            num_samples=1,
            num_slots=2,
            sampling=Sampling(6),
            key=RandomKey(3, "r"),
            should_stop=should_stop,
        )
    assert len(asked) == after + 1
    assert_same(*rollouts(model, gen, PROMPTS[1:2] * 2, sampling=Sampling(6), num_slots=2, ends=[EOS]))
