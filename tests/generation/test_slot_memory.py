"""Slots of the KV cache are those for which a device has memory; copies of weights must fit beside them."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.decode_models import (
    DEVICE,
    EOS,
    assert_same,
    fused,
    generator_of,
    llama,
    opt,
    poll_often,
    random_prompts,
    rollouts,
)
from support.messages import naming

from pipeline.errors import InputError
from pipeline.generation import device_work, generator
from pipeline.generation.backends import cached_tokens_that_fit, check_copies_fit, no_slot_fits
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import NoAnswers, generate
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import FIRST_NEW_TOKENS, Generator
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.generation.session import Capacity
from pipeline.generation.slots import GenerationBuffers
from pipeline.kernels.split_kv import MAX_SPLITS, MIN_KEYS_PER_SPLIT

PROMPTS = random_prompts((3, 5, 1))
ENDS = [EOS, *range(20, 70)]
ONE_TOKEN: dict[str, Any] = {"num_samples": 1, "num_slots": 1, "sampling": Sampling(1), "key": RandomKey(3, "r")}
MIB = 2**20


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 MiB are free, and 24 MiB that torch has reserved are unused."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 124 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * MIB, 2000 * MIB))


def model_on(device: str, mib_per_token: int) -> Any:
    layout = SimpleNamespace(bytes_per_token=mib_per_token * MIB)
    return SimpleNamespace(device=torch.device(device), cache_layout=layout)


def test_cached_tokens_are_those_that_fit_in_memory(free_memory, caplog):
    with caplog.at_level(logging.INFO, logger="pipeline.generation.backends"):
        assert cached_tokens_that_fit(model_on("cuda", 2)) == 460, "0.9 * 1024 MiB of 2 MiB each"
    assert caplog.text == naming("1.00 GiB ... 460 tokens of 2048 KiB")


def test_not_even_one_slot_is_an_error_that_says_what_to_do(monkeypatch, free_memory):
    complaint = naming("--max-answer-seq-len ... 64 tokens ... 1.25 GiB of KV cache, 1.00 GiB")
    assert str(no_slot_fits(model_on("cuda", 20), 64)) == complaint
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: 63)
    with pytest.raises(InputError, match=naming("--max-answer-seq-len ... 64 tokens")):
        generate(generator_of(StaticCacheForward(llama())), PROMPTS, **ONE_TOKEN)


def test_a_cpu_has_no_limit(free_memory):
    assert cached_tokens_that_fit(model_on("cpu", 20)) > 10**15
    check_copies_fit(2**40, torch.device("cpu"))


def test_weights_that_do_not_fit_are_refused_before_they_are_copied(free_memory, caplog):
    with caplog.at_level("INFO"):
        check_copies_fit(2**29, torch.device("cuda"))
    assert caplog.text == naming("0.50 GiB of the 1.00 GiB")
    with pytest.raises(InputError, match=naming("1.50 GiB ... 1.00 GiB ... --inference-tp-size")):
        check_copies_fit(3 * 2**29, torch.device("cuda"))


def test_fewer_slots_than_requested_change_no_token(monkeypatch, caplog):
    poll_often(monkeypatch)
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: 2 * 64 + 63)
    model = llama()
    gen: Generator = generator_of(StaticCacheForward(model), ENDS)
    assert_same(*rollouts(model, gen, PROMPTS, sampling=Sampling(4), num_samples=2, num_slots=6, ends=ENDS))
    assert gen._buffers.num_slots == 2 and gen.forward.device.type == DEVICE.type
    assert caplog.text == naming("2 slots of 64 tokens, not 6")


@pytest.fixture
def short_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that may grow has a position for one new token at first; no decode step writes behind its end.

    Finished slots are seen in the iteration that finished them, on a GPU too.
    """
    decode = GenerationBuffers.decode

    def checked(buffers: GenerationBuffers, num_steps: int) -> None:
        slots = buffers.slots
        assert (slots.lengths * slots.active).max() + num_steps * slots.active.max() <= buffers.cache_length
        decode(buffers, num_steps)

    monkeypatch.setattr(GenerationBuffers, "decode", checked)
    poll_often(monkeypatch)
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset())
    monkeypatch.setattr(generator, "FIRST_NEW_TOKENS", 1)
    for module in ("generator", "slots"):
        monkeypatch.setattr(f"pipeline.generation.{module}.CACHE_LENGTH_MULTIPLE", 1)


@pytest.mark.parametrize(("ends", "lengths"), [((), [5 + 6]), (range(301), [5 + 1])], ids=["all of it", "none"])
def test_the_cache_grows_with_the_responses(short_cache, ends, lengths):
    """Nothing ends, or everything at once; the longest prompt has 5 tokens."""
    model = opt()
    gen = generator_of(fused(model), ends)
    settings: dict[str, Any] = {"sampling": Sampling(6), "num_slots": 2, "ends": ends}
    actual, expected = rollouts(model, gen, PROMPTS, **settings)
    assert_same(actual, expected)
    buffers = gen._buffers
    assert buffers.cache.keys[0].shape[2] == buffers.cache.values[1].shape[2] == buffers.cache_length
    assert buffers.cache_length in lengths and buffers.capacity.max_length == 5 + 6


@pytest.mark.slow
def test_the_cache_grows_under_overlapped_prefills(monkeypatch, short_cache):
    monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset({DEVICE.type}))
    model = opt()
    gen = generator_of(fused(model), ENDS)
    settings: dict[str, Any] = {"sampling": Sampling(7), "num_samples": 2, "num_slots": 3, "ends": ENDS}
    assert_same(*rollouts(model, gen, PROMPTS, **settings))
    assert 5 + 1 < gen._buffers.cache_length <= gen._buffers.capacity.max_length


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("memory", "ends", "left"),
    [(36, (), []), (20, (), [2, 1]), (12, (), [1]), pytest.param(20, ENDS, [2, 1], id="beside a prefill")],
)
def test_slots_are_lost_when_responses_outgrow_the_memory(monkeypatch, short_cache, caplog, memory, ends, left):
    """Prompts of 3, 5 and 1 tokens and 7 new ones need 12 positions; slots begin with 6, where there is memory."""
    if ends:
        monkeypatch.setattr(device_work, "DEFERRED_POLL_DEVICES", frozenset({DEVICE.type}))
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: memory)
    model = opt()
    gen = generator_of(fused(model), ends)
    settings: dict[str, Any] = {"sampling": Sampling(7), "num_samples": 3 if ends else 1, "num_slots": 3, "ends": ends}
    with caplog.at_level(logging.INFO, logger="pipeline.generation.scheduler"):
        assert_same(*rollouts(model, gen, PROMPTS, **settings))
    assert left == [int(slots) for slots in re.findall(r"memory for (\d+) slots, not \d+, as", caplog.text)]
    buffers = gen._buffers
    assert buffers.num_slots * buffers.cache_length <= memory
    assert buffers.cache_length == buffers.capacity.max_length == 12
    assert buffers.can_serve(buffers.capacity) == (not left), "the next call begins with all slots"


@pytest.mark.slow
def test_responses_that_lost_their_slots_start_again_before_those_that_wait(monkeypatch, short_cache, caplog):
    """Three of five begin, and two at a time can end: the third is the shortest, and starts again beside the fourth."""
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: 20)
    gen, ended = generator_of(fused(opt()), ()), list[int]()
    request: dict[str, Any] = {"num_samples": 1, "num_slots": 3, "sampling": Sampling(3), "key": RandomKey(3, "r")}
    with caplog.at_level(logging.INFO, logger="pipeline.generation.scheduler"):
        prompts = random_prompts((3, 5, 1, 2, 2))
        generate(gen, prompts, **request, answers=NoAnswers(lambda episode: ended.append(episode.number)))
    assert naming("2 slots, not 3 ... 1 responses start again") in caplog.text.splitlines()
    assert [sorted(ended[:2]), sorted(ended[2:4]), ended[4:]] == [[0, 1], [2, 3], [4]]


@pytest.mark.few(1)
@pytest.mark.parametrize(("memory", "left"), [(14, 1), (99, 2)])
def test_a_prompt_may_be_longer_than_the_cache_is_at_first(monkeypatch, short_cache, memory, left):
    """It has positions for 4 tokens, and a prompt 8: it grows, or the prompt waits for the only slot that is left."""
    monkeypatch.setattr(generator, "cached_tokens_that_fit", lambda forward: memory)
    model, found = llama(), []
    gen = generator_of(fused(model), ())
    for source in (gen, EagerGenerator(model, gen.vocabulary)):
        session = source.session(Capacity(2, 9, 12))
        session.submit(Prompt([7, 8], 1), Sampling(9), RandomKey(3, "r"))
        events = session.advance()
        session.submit(Prompt([*range(11, 19)], 2), Sampling(3), RandomKey(3, "r"))
        while not session.is_idle:
            events += session.advance()
        found.append({event.request.number: event.ids.tolist() for event in events})
    assert found[0] == found[1] and (len(found[0][0]), len(found[0][1])) == (9, 3)
    assert gen._buffers.num_slots == left


def test_caches_whose_length_changes_results_do_not_grow(short_cache):
    """Masked attention over all positions, and splits of fewer keys than those of long caches."""
    model = llama()
    gen = generator_of(StaticCacheForward(model), range(301))
    assert_same(*rollouts(model, gen, PROMPTS, sampling=Sampling(6), ends=range(301)))
    assert gen._buffers.cache_length == gen._buffers.capacity.max_length == 5 + 6
    assert FIRST_NEW_TOKENS >= MAX_SPLITS * MIN_KEYS_PER_SPLIT


def test_a_call_of_few_new_tokens_has_its_cache_at_once():
    model = opt()
    gen = generator_of(fused(model))
    generate(gen, PROMPTS, **ONE_TOKEN)
    assert gen._buffers.cache_length == gen._buffers.capacity.max_length == 64
