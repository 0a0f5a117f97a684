"""Tokens drawn by the kernels: their distribution, its exact inverse, and the state of slots and responses.

The kernels read the vocabulary in blocks; tests that draw much make the blocks small instead of the vocabulary
large.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.chi_square import exact_probabilities, p_value
from support.decode_models import DEVICE, PAD
from support.marks import rare_but
from support.messages import naming

from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Truncation, Vocabulary, rollout_uniforms
from pipeline.generation.session import Capacity, Request
from pipeline.generation.slots import GenerationBuffers, slot_settings
from pipeline.kernels import token_draw
from pipeline.kernels.token_draw import Slots, draw_tokens, padded_eos, slot_uniforms
from pipeline.random_numbers import uniforms

NEAR_0, NEAR_1 = 2.0**-53, 1.0 - 2.0**-53
MOST_LIKELY_BY_CHANCE = 1e-3


@dataclass
class Drawn:
    """The result of one draw of M rows, each in its own slot."""

    slots: Slots

    @property
    def tokens(self) -> torch.Tensor:
        return self.slots.written[:, 0]

    @property
    def log_probs(self) -> torch.Tensor:
        return self.slots.log_probs[:, 0]


def slots_of(samplings: Sequence[Sampling]) -> Slots:
    """Active slots with these settings, before their first token."""
    count = len(samplings)
    slots = Slots.empty(count, max(sampling.max_new_tokens for sampling in samplings), DEVICE)
    tickets = [Request(n, Prompt([5], n), sampling, RandomKey(1, "r"), 0) for n, sampling in enumerate(samplings)]
    settings, numbers = (values.to(DEVICE) for values in slot_settings(tickets))
    lengths = torch.ones(count, dtype=torch.int32, device=DEVICE)
    slots.start(torch.arange(count, device=DEVICE), lengths, settings, numbers)
    return slots


def drawn(
    logits: torch.Tensor, uniforms: torch.Tensor | list[float], *, ends: tuple[int, ...] = (),
    num_tokens: int | None = None, samplings: Sequence[Sampling] | None = None, **given: Any,
) -> Drawn:  # fmt: skip
    """The first token of each row, by settings of its own or `given` ones."""
    rows = len(logits)
    samplings = samplings or [Sampling(1, **given)] * rows
    forward: Any = SimpleNamespace(device=DEVICE, prepare=lambda length: None, new_cache=max, addresses=tuple)
    vocabulary = Vocabulary(frozenset(ends), PAD, num_tokens)
    buffers = GenerationBuffers(forward, Capacity(rows, 1, 1), vocabulary, cache_length=1, max_cached_tokens=10**9)
    buffers.slots = slots_of(samplings)
    buffers.truncate(Truncation.of(samplings))
    numbers = torch.arange(rows, device=DEVICE)
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64, device=DEVICE).reshape(rows)
    buffers.draw(logits.to(DEVICE).contiguous(), numbers, numbers, uniforms=uniforms)
    return Drawn(buffers.slots)


def keyed_uniforms(count: int, seed: int) -> torch.Tensor:
    """Return the uniforms of `count` responses to one prompt, as in a rollout."""
    prompt_ids, samples = torch.full((count,), 12345, device=DEVICE), torch.arange(count, device=DEVICE) % 4096
    return rollout_uniforms(RandomKey(seed, "rollout", 1), prompt_ids, samples, 1)


# --- the distribution ---

LOGITS = torch.tensor([1.2, -0.5, 0.3, 2.0, -3.0, 0.0, 1.9, -1.0, 0.8, 0.81, -0.2, 1.0, -float("inf"), 0.5, 1.5])
CHI_SQUARES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.75},
    "top_k": {"top_k": 6},
    "all": {"temperature": 1.7, "top_p": 0.8, "top_k": 9},
}
EVERYTHING_KEPT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def counts(settings: dict[str, Any], draws: int, seed: int = 1) -> torch.Tensor:
    tokens = drawn(LOGITS.expand(draws, -1), keyed_uniforms(draws, seed), **settings).tokens
    return torch.bincount(tokens.cpu(), minlength=len(LOGITS))


def expected(settings: dict[str, Any]) -> torch.Tensor:
    return exact_probabilities(LOGITS, **(EVERYTHING_KEPT | settings))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of the vocabulary of LOGITS, the last one with 3 tokens."""
    monkeypatch.setattr(token_draw, "VOCABULARY_BLOCK", 4)


@pytest.mark.slow
def test_draws_follow_the_exact_distribution_and_no_other(small_blocks):
    actual = counts({}, 200)
    assert p_value(actual, expected({})) > MOST_LIKELY_BY_CHANCE
    for settings in ({"temperature": 0.6}, {"temperature": 2.5}, {"top_p": 0.9}, {"top_k": 8}):
        assert p_value(actual, expected(settings)) < MOST_LIKELY_BY_CHANCE, settings


def test_truncated_draws_follow_the_exact_distribution(small_blocks):
    settings = CHI_SQUARES["all"]
    assert p_value(counts(settings, 100), expected(settings)) > MOST_LIKELY_BY_CHANCE


@pytest.mark.parametrize("name", rare_but(["all"], CHI_SQUARES))
def test_many_draws_follow_the_exact_distribution(small_blocks, name):
    assert p_value(counts(CHI_SQUARES[name], 2000), expected(CHI_SQUARES[name])) > MOST_LIKELY_BY_CHANCE


def test_the_chi_square_test_by_hand():
    """Quantiles from tables: 3.841 with 1 degree of freedom, 5.991 with 2."""
    assert p_value(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)
    third = torch.ones(3) / 3
    assert p_value(torch.tensor([100, 100, 100]), third) == pytest.approx(1.0)
    assert p_value(torch.tensor([117, 100, 83]), third) == pytest.approx(0.0555, abs=1e-3)
    assert p_value(torch.tensor([1, 99]), torch.tensor([0.0, 1.0])) == 0.0


# --- the inverse of the cumulative distribution ---


def by_the_book(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    return (cumulative <= uniforms.reshape(-1, 1)).sum(-1)


# Sizes about a block of 2048: below, at, above, several, not a multiple.
@pytest.mark.parametrize("width", [1, 2, 301, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_log_probs_at_odd_sizes(width, dtype):
    generator = torch.Generator().manual_seed(width)
    logits = (3 * torch.randn(6, width, generator=generator)).to(dtype)
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64)
    actual = drawn(logits, uniforms, temperature=0.9)
    expected = by_the_book(logits, uniforms, 0.9)
    assert actual.tokens.tolist() == expected.tolist()
    log_probs = (logits.double() / 0.9).log_softmax(-1).gather(1, expected[:, None])[:, 0]
    torch.testing.assert_close(actual.log_probs.cpu().double(), log_probs, rtol=0.0, atol=1e-5)


def test_equal_logits_are_equally_likely():
    """The token is floor(u V), also where u falls into another block."""
    width = 5000
    uniforms = [NEAR_0, 0.25, 2047.5 / width, 2048.5 / width, 0.9, NEAR_1]
    actual = drawn(torch.full((6, width), -7.25), uniforms)
    assert actual.tokens.tolist() == [0, 1250, 2047, 2048, 4500, 4999]
    torch.testing.assert_close(actual.log_probs.cpu(), torch.full((6,), 1 / width).log(), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("place", [0, 2047, 2048, 4999])
def test_the_only_possible_token_is_drawn(place):
    logits = torch.full((3, 5000), -float("inf"))
    logits[:, place] = 3.0
    actual = drawn(logits, [NEAR_0, 0.5, NEAR_1])
    assert actual.tokens.tolist() == [place] * 3 and actual.log_probs.tolist() == [0.0] * 3


def test_blocks_without_any_mass_are_skipped():
    """Only tokens 2100 and 2101 of three blocks have any mass."""
    logits = torch.full((4, 5000), -float("inf"))
    logits[:, 2100:2102] = 0.5
    assert drawn(logits, [NEAR_0, 0.49, 0.51, NEAR_1]).tokens.tolist() == [2100, 2100, 2101, 2101]


def test_tokens_that_underflow_are_never_drawn():
    """Mass lies in the first block alone; at both ends of [0, 1] rounding must not lead out of it."""
    logits = torch.full((2, 5000), -500.0)
    logits[:, 7:9] = 40.0
    assert drawn(logits, [NEAR_0, NEAR_1]).tokens.tolist() == [7, 8]


@pytest.mark.parametrize("width", [300, 2100])
def test_rounding_never_leads_past_the_last_token(width):
    """Sums of fp32 numbers are not those of fp64: the target may lie beyond all of them."""
    logits = 2 * torch.randn(12, width, generator=torch.Generator().manual_seed(1))
    logits[6:, -40:] = -float("inf")
    assert drawn(logits, [NEAR_1] * 12).tokens.tolist() == [width - 1] * 6 + [width - 41] * 6


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.7, "temperature": 0.5}])
def test_truncated_draws_keep_the_whole_distributions_log_probs(settings):
    """PPO's ratio needs log-probabilities at the temperature, over all tokens."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0]]).repeat(5, 1)
    actual = drawn(logits, [NEAR_0, 0.3, 0.6, 0.9, NEAR_1], **settings)
    kept = exact_probabilities(logits[0], **(EVERYTHING_KEPT | settings))
    assert kept[actual.tokens.cpu()].min() > 0
    assert actual.tokens[-1] == kept.nonzero().max(), "u near 1 gives the last token that is kept"
    expected = (logits[0] / settings.get("temperature", 1.0)).log_softmax(0)[actual.tokens.cpu()]
    torch.testing.assert_close(actual.log_probs.cpu(), expected, rtol=0.0, atol=1e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("num_tokens", [3, 4, 6, 11])
@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"top_p": 0.8, "temperature": 1.5}], ids=str)
def test_rows_that_pad_a_vocabulary_are_never_drawn(small_blocks, num_tokens, settings):
    """The same draws as of logits without these rows, with log-probabilities over all: blocks of four columns."""
    logits = torch.cat([LOGITS[:num_tokens], LOGITS + 3.0]).repeat(12, 1)
    uniforms = keyed_uniforms(12, 3)
    actual = drawn(logits, uniforms, num_tokens=num_tokens, **settings)
    alone = drawn(logits[:, :num_tokens], uniforms, **settings)
    assert actual.tokens.tolist() == alone.tokens.tolist() and len(set(actual.tokens.tolist())) > 1
    whole = (logits[0] / settings.get("temperature", 1.0)).log_softmax(0)
    torch.testing.assert_close(actual.log_probs.cpu(), whole[actual.tokens.cpu()], rtol=0.0, atol=1e-5)


def test_a_vocabulary_smaller_than_its_tokenizer_is_drawn_whole():
    uniforms = keyed_uniforms(16, 2)
    actual = drawn(LOGITS.expand(16, -1), uniforms, num_tokens=len(LOGITS) + 7)
    assert actual.tokens.tolist() == drawn(LOGITS.expand(16, -1), uniforms).tokens.tolist()


def test_rows_of_equal_logits_differ_by_their_uniforms():
    actual = drawn(LOGITS.expand(16, -1), keyed_uniforms(16, 2))
    assert len(set(actual.tokens.tolist())) > 4
    assert actual.tokens.tolist() == drawn(LOGITS.expand(16, -1), keyed_uniforms(16, 2)).tokens.tolist()
    assert actual.tokens.tolist() != drawn(LOGITS.expand(16, -1), keyed_uniforms(16, 3)).tokens.tolist()


# --- the state of rows ---


def fill(values: torch.Tensor, numbers: list[int]) -> None:
    values.copy_(torch.tensor(numbers))


def test_a_draw_moves_its_row_on_and_leaves_the_others_alone():
    """Four slots, three rows of logits in another order; slot 1 is not active, slot 3 is not asked for.

    Slot 0 writes the last token of its response, slot 2 writes an end as its second of five.
    """
    slots = slots_of([Sampling(3), Sampling(5), Sampling(5), Sampling(4)])
    fill(slots.tokens, [50, 51, 52, 53])
    fill(slots.lengths, [9, 8, 7, 6])
    fill(slots.active, [1, 0, 1, 1])
    fill(slots.position, [2, 1, 1, 0])
    one_hot = torch.full((3, 8), -float("inf"))
    one_hot[2, 5], one_hot[0, 4], one_hot[1, 3] = 0.0, 0.0, 0.0
    rows, index = torch.tensor([[2, 0, 1], [2, 1, 0]], device=DEVICE)
    draw_tokens(
        one_hot.to(DEVICE), rows, index, slots, uniforms=torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE),
        eos=padded_eos(frozenset({5, 6, 7}), DEVICE), num_known=8,
    )  # fmt: skip
    assert slots.tokens.tolist() == [3, 51, 5, 53]
    assert slots.lengths.tolist() == [9, 8, 7, 6]
    assert slots.active.tolist() == [0, 0, 0, 1]
    assert slots.position.tolist() == [3, 1, 2, 0]
    assert slots.written.tolist() == [[0, 0, 3, 0, 0], [0] * 5, [0, 5, 0, 0, 0], [0] * 5]
    assert slots.ended.tolist() == [0, 0, 1, 0], "a cut response has no end"


def test_the_numbers_of_slots_are_those_of_the_random_number_contract():
    """Keys with a top bit, prompt ids of 63 bits, late positions; a greedy slot has none."""
    keys = [
        RandomKey(seed, purpose, epoch) for seed, purpose, epoch in ((3, "rollout", 0), (4, "eval", 9), (0, "x", 1))
    ]
    samples, ids, positions = (0, 4095, 17), (1, 2**63 - 1, 2**40 + 5), (0, 300, 2**20)
    tickets = [Request(n, Prompt([1], ids[n]), Sampling(2**21), keys[n], samples[n]) for n in range(3)]
    tickets.append(Request(3, Prompt([1], 7), Sampling(5, temperature=0), keys[0], 0))
    slots = Slots.empty(5, 1, DEVICE)
    index = torch.tensor([4, 0, 2, 1], device=DEVICE)
    settings, numbers = (values.to(DEVICE) for values in slot_settings(tickets))
    slots.start(index, torch.ones(4, dtype=torch.int32, device=DEVICE), settings, numbers)
    slots.position[index] = torch.tensor([*positions, 0], dtype=torch.int32, device=DEVICE)
    expected = [
        uniforms(
            seed=key.seed, purpose=key.purpose, epoch=key.epoch, prompt_ids=torch.tensor([ids[n]]),
            sample_index=torch.tensor([samples[n]]), position=positions[n],
        ).item()
        for n, key in enumerate(keys)
    ]  # fmt: skip
    assert slot_uniforms(slots, index).tolist() == [*expected, 0.0]
    with pytest.raises(ValueError, match=naming("sample index ... [0, 2**12) ... 4096")):
        slot_settings([Request(0, Prompt([1], 1), Sampling(1), keys[0], 4096)])


def test_each_slot_draws_by_its_own_settings():
    """Every row as in a draw of its own, whatever the settings beside it; a greedy one takes the first of the best."""
    samplings = [
        Sampling(1), Sampling(1, 0.6), Sampling(1, 1.7, top_k=4), Sampling(1, top_p=0.7), Sampling(1, 0),
        Sampling(1, 0.8, top_p=0.5, top_k=9),
    ]  # fmt: skip
    logits = LOGITS.repeat(6, 1)
    logits[4, 10] = logits[4, 3] = 5.0
    for seed in range(3):
        uniforms = keyed_uniforms(6, seed)
        uniforms[4] = 0.0  # as `slot_uniforms` gives it
        together = drawn(logits, uniforms, samplings=samplings)
        for n, sampling in enumerate(samplings):
            alone = drawn(logits[n : n + 1], uniforms[n : n + 1], samplings=[sampling])
            assert together.tokens[n] == alone.tokens[0] and together.log_probs[n] == alone.log_probs[0]
        assert together.tokens[4] == 3


def test_end_ids_are_filled_up_with_what_no_token_is():
    assert padded_eos(frozenset({9, 2, 5}), DEVICE).tolist() == [2, 5, 9, -1]
    assert padded_eos(frozenset(), DEVICE).tolist() == [-1]
    assert padded_eos(frozenset({4}), DEVICE).tolist() == [4]
