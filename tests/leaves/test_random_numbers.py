import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import naming

from pipeline.random_numbers import derive_key, permutation, philox4x32, seed_dropout, uniforms, words_to_uniform

# Random123, tests/kat_vectors, philox4x32 with 10 rounds: (counter, key, result).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's unbounded integers, written from the paper, not from the module."""
    (a, b, c, d), (k, m) = counter, key
    for step in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        key0, key1 = (k + step * 0x9E3779B9) % 2**32, (m + step * 0xBB67AE85) % 2**32
        a, b, c, d = right // 2**32 ^ b ^ key0, right % 2**32, left // 2**32 ^ d ^ key1, left % 2**32
    return [a, b, c, d]


def slow_uniform(seed: int, purpose: str, epoch: int, prompt_id: int, sample: int, position: int) -> float:
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    key = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
    w0, w1, _, _ = slow_philox([prompt_id % 2**32, prompt_id // 2**32, position, epoch * 4096 + sample], key)
    return (w0 // 64 * 2**26 + w1 // 64 + 0.5) / 2**52


def draw(n: int = 1, **changes: Any) -> torch.Tensor:
    """Uniforms (n,) for prompt ids 0..n-1, with any argument replaced."""
    arguments: dict[str, Any] = {"seed": 1, "purpose": "rollout", "epoch": 0, "position": 0}
    arguments |= {"prompt_ids": torch.arange(n), "sample_index": torch.tensor([0])}
    return uniforms(**(arguments | changes))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    k0, k1 = words(key)
    result = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert [word.item() for word in result] == words(expected)
    assert slow_philox(words(counter), words(key)) == words(expected)


def test_philox_is_vectorised():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(2**32, (4, 50), generator=generator)
    result = torch.stack(philox4x32(tuple(counters), (0xDEADBEEF, 0x80000001)), dim=1)
    assert result.tolist() == [slow_philox(row, [0xDEADBEEF, 0x80000001]) for row in counters.T.tolist()]


@pytest.mark.parametrize(
    ("seed", "purpose", "epoch", "prompt_id", "sample", "position"),
    [
        (0, "rollout", 0, 0, 0, 0),
        (1234, "eval", 3, 2**63 - 1, 4095, 2**32 - 1),
        (-1, "rollout", 2**20 - 1, 2**32, 1, 77),
        (2**70, "shuffle", 1, 0x123456789ABCDEF0, 17, 512),
    ],
)
def test_uniforms_follow_the_documented_layout(seed, purpose, epoch, prompt_id, sample, position):
    drawn = uniforms(
        seed=seed,
        purpose=purpose,
        epoch=epoch,
        prompt_ids=torch.tensor([prompt_id]),
        sample_index=torch.tensor([sample]),
        position=position,
    )
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [slow_uniform(seed, purpose, epoch, prompt_id, sample, position)]


def test_the_interval_is_open():
    lowest, highest = torch.tensor(0), torch.tensor(2**32 - 1)
    assert words_to_uniform(lowest, lowest).item() == 2.0**-53
    assert words_to_uniform(highest, highest).item() == 1 - 2.0**-53


def test_uniforms_do_not_depend_on_the_batch():
    ids, samples = torch.randint(2**63 - 1, (20,), generator=torch.Generator().manual_seed(0)), torch.arange(20)
    whole = draw(prompt_ids=ids, sample_index=samples, position=5)
    order = torch.tensor([7, 3, 19])
    assert draw(prompt_ids=ids[order], sample_index=samples[order], position=5).equal(whole[order])
    one_by_one = [draw(prompt_ids=i[None], sample_index=s[None], position=5) for i, s in zip(ids, samples, strict=True)]
    assert torch.cat(one_by_one).equal(whole)


def test_positions_of_their_own_and_blocks_of_positions():
    block = draw(prompt_ids=torch.arange(3)[:, None], position=torch.arange(4))  # (3, 4)
    assert block.shape == (3, 4)
    for position in range(4):
        assert draw(3, position=position).equal(block[:, position])
    assert draw(3, position=torch.tensor([2, 0, 3])).equal(block[torch.arange(3), torch.tensor([2, 0, 3])])


def test_no_global_generator_is_read_or_moved():
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), draw(5)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(1)
    assert draw(5).equal(first)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"purpose": "eval"},
        {"epoch": 1},
        {"prompt_ids": torch.tensor([1])},
        {"prompt_ids": torch.tensor([2**32])},
        {"sample_index": torch.tensor([1])},
        {"position": 1},
    ],
)
def test_every_argument_matters(change):
    assert draw(**change).item() != draw().item()


def test_seed_and_purpose_cannot_run_into_each_other():
    assert derive_key(1, "2/x") != derive_key(12, "/x") != derive_key(1, "2x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 2**20}, naming("epoch ... [0, 2**20) ... 1048576")),
        ({"epoch": -1}, "epoch"),
        ({"prompt_ids": torch.tensor([0, -5])}, "prompt id .* got -5"),
        ({"sample_index": torch.tensor([4096])}, "sample index"),
        ({"sample_index": torch.tensor([-1])}, "sample index"),
        ({"position": 2**32}, "position"),
        ({"position": -1}, "position"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        draw(**change)


def chi_square(observed: np.ndarray, expected: float) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


STREAMS = {
    "prompt ids": lambda n: draw(n),
    "scattered prompt ids": lambda n: draw(prompt_ids=torch.arange(n) * 0x1_0000_0001),
    "positions": lambda n: draw(position=torch.arange(n)),
    "samples": lambda n: draw(prompt_ids=torch.arange(n // 4000)[:, None], sample_index=torch.arange(4000)).flatten(),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_uniforms_are_uniform(stream):
    # 99 degrees of freedom: mean 99, standard deviation sqrt(198) = 14.1; the bounds are 4.5 deviations out.
    drawn = STREAMS[stream](100_000).numpy()
    for shifted in (drawn, drawn * 1000 % 1):  # the leading digits, and the ones behind them
        assert 36 < chi_square(np.histogram(shifted, bins=100, range=(0, 1))[0], len(drawn) / 100) < 162


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("lag", [1, 2, 7, 64])
def test_neighbours_are_independent(stream, lag):
    drawn = STREAMS[stream](100_000).numpy()
    correlation = np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]
    assert abs(correlation) < 4.5 / np.sqrt(len(drawn))
    pairs = np.histogram2d(drawn[:-lag], drawn[lag:], bins=10, range=((0, 1), (0, 1)))[0]
    assert 36 < chi_square(pairs, pairs.sum() / 100) < 162


@pytest.mark.parametrize("change", [{"seed": 2}, {"purpose": "eval"}, {"epoch": 1}, {"position": 1}])
def test_streams_are_independent_of_each_other(change):
    correlation = np.corrcoef(draw(50_000).numpy(), draw(50_000, **change).numpy())[0, 1]
    assert abs(correlation) < 4.5 / np.sqrt(50_000)


def test_permutation_is_the_order_of_the_uniforms():
    keys = [slow_uniform(7, "shuffle", 3, index, 0, 0) for index in range(50)]
    shuffled = permutation(50, seed=7, purpose="shuffle", epoch=3)
    assert shuffled.tolist() == sorted(range(50), key=keys.__getitem__)
    assert shuffled.dtype == torch.int64


def test_permutation_depends_on_seed_purpose_and_epoch():
    base: dict[str, Any] = {"seed": 7, "purpose": "shuffle", "epoch": 3}
    changes: list[dict[str, Any]] = [{}, {"seed": 8}, {"purpose": "prompts"}, {"epoch": 4}]
    orders = [permutation(50, **(base | change)).tolist() for change in changes]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert permutation(0, **base).tolist() == []


def test_all_permutations_are_equally_likely():
    # 6 orders of 3, 600 epochs: 5 degrees of freedom, P(chi-square > 26) < 1e-4.
    codes = [permutation(3, seed=0, purpose="shuffle", epoch=epoch) @ torch.tensor([9, 3, 1]) for epoch in range(600)]
    counts = torch.stack(codes).unique(return_counts=True)[1].numpy()
    assert len(counts) == 6
    assert chi_square(counts, 100) < 26


def test_dropout_of_each_seed_step_and_rank_has_numbers_of_its_own_that_come_again():
    drawn = {}
    with torch.random.fork_rng(devices=[]):
        for place in [(seed, step, rank) for seed in (7, 8) for step in range(3) for rank in range(3)]:
            for _ in range(2):
                torch.rand(5)  # whatever was drawn before
                seed_dropout(place[0], step=place[1], rank=place[2])
                numbers = tuple(torch.rand(8).tolist())
                assert drawn.setdefault(place, numbers) == numbers
    assert len(set(drawn.values())) == 18
