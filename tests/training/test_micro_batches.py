"""Rows dealt to ranks and cut into micro-batches by their lengths."""

import math
import random
from itertools import combinations, pairwise

import pytest
import torch
from support.tiny_models import EOS

from pipeline.dist import World
from pipeline.training import micro_batches as module
from pipeline.training.micro_batches import (
    Lengths,
    MicroBatch,
    best_cuts,
    by_tokens,
    even_parts,
    micro_batches,
    scoring_batches,
)
from step3_ppo.experience import Responses, batch_rows, span_mask

CPU = torch.device("cpu")


def worlds(size: int) -> list[World]:
    return [World(rank=rank, size=size, device=CPU) for rank in range(size)]


def random_lengths(count: int, seed: int = 0, *, packs: bool = False) -> Lengths:
    """Prompts of 256 tokens and responses of 30 to 256, as in the benchmark of early ends."""
    draw = random.Random(seed)
    return Lengths([256] * count, [draw.randint(30, 256) for _ in range(count)], packs=packs)


def test_dealing_by_hand():
    # Whole lengths 3, 9, 5, 9, 1, 7, 5, 2: longest first 1 3 5 2 6 0 7 4; rounds of two, every other one backwards.
    lengths = Lengths([1] * 8, [2, 8, 4, 8, 0, 6, 4, 1])

    def dealt(rows, world: World) -> list[tuple[int, ...]]:
        return [batch.rows for batch in by_tokens(rows, lengths, world, tokens=1000)]

    assert dealt(range(8), worlds(1)[0]) == [(1, 3, 5, 2, 6, 0, 7, 4)]
    assert [dealt(range(8), world) for world in worlds(2)] == [[(1, 2, 6, 4)], [(3, 5, 0, 7)]]
    # Of one length: in the order given.
    assert [dealt([6, 3, 2, 1], world) for world in worlds(2)] == [[(3, 2)], [(1, 6)]]


def test_micro_batches_by_hand():
    lengths = Lengths([1, 2, 1, 1, 3, 1, 1, 1], [2, 7, 4, 8, 1, 6, 3, 1])
    rows = [7, 6, 5, 4, 3, 2, 1, 0]
    (first, second), (third, fourth) = micro_batches(rows, lengths, rows_per_step=4, world=worlds(1)[0], size=2)
    # Lengths 7 4 4 2 in the room of two of 7: 7 + 12 tokens, not 14 + 8. Then 9 9 5 3: 18 + 10, as 9 9 5 have no room.
    assert [first.rows, second.rows, third.rows, fourth.rows] == [(5,), (6, 4, 7), (3, 1), (2, 0)]
    assert first == MicroBatch(rows=(5,), length=7, width=6, num_response_tokens=6)
    assert second == MicroBatch(rows=(6, 4, 7), length=4, width=3, num_response_tokens=5)


def cost_of(cuts: tuple[int, ...], lengths: list[int], limit: int) -> float:
    """Padded tokens and passes of parts between `cuts`; no number for parts without room."""
    parts = list(pairwise((0, *cuts, len(lengths))))
    if any((stop - start) * lengths[start] > limit and stop - start > 1 for start, stop in parts):
        return math.inf
    return sum((stop - start) * lengths[start] + module.PASS_TOKENS for start, stop in parts)


@pytest.mark.parametrize("pass_tokens", [0, 3, 20])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_cuts_cost_less(monkeypatch, seed, pass_tokens):
    """Against all 512 ways to cut ten rows."""
    monkeypatch.setattr(module, "PASS_TOKENS", pass_tokens)
    draw = random.Random(seed)
    lengths = sorted((draw.randint(1, 12) for _ in range(10)), reverse=True)
    cuts = best_cuts(lengths, limit=30)
    assert cuts[0] == 0 and cuts[-1] == 10
    every = (chosen for count in range(10) for chosen in combinations(range(1, 10), count))
    assert cost_of(tuple(cuts[1:-1]), lengths, 30) == min(cost_of(chosen, lengths, 30) for chosen in every)


@pytest.mark.parametrize("size", [1, 2])
def test_one_very_long_response_lengthens_no_other_row(size):
    """Of 64 rows, 63 of 50 tokens, one of 500: on its rank it passes alone, and on the other one short row does."""
    lengths = Lengths([20] * 64, [30] * 40 + [480] + [30] * 23)
    ranks = [micro_batches(range(64), lengths, rows_per_step=64, world=world, size=16)[0] for world in worlds(size)]
    assert ranks[0][0].rows == (40,) and all(len(rank[0].rows) == 1 for rank in ranks)
    computed = sum(len(batch.rows) * batch.length for rank in ranks for batch in rank)
    assert computed == sum(lengths.whole) and len(ranks[0]) == 2


def test_rows_of_one_length_fill_their_micro_batches():
    assert best_cuts([512] * 64, limit=16 * 512) == [0, 16, 32, 48, 64]
    assert best_cuts([40], limit=30) == [0, 1]


def test_on_a_gpu_lengths_are_whole_units():
    """Rows of 33 and of 17 tokens in units of 32: two of 64 take the room of four of 32."""
    lengths = Lengths([16, 16, 10, 10, 10, 10], [17, 16, 7, 7, 7, 7], unit=32)
    ((first, second),) = micro_batches(range(6), lengths, rows_per_step=6, world=worlds(1)[0], size=2)
    assert first == MicroBatch(rows=(0, 1), length=64, width=17, num_response_tokens=33)
    assert (second.rows, second.length) == ((2, 3, 4, 5), 32)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_a_step_evenly_and_completely(size, packs):
    lengths = random_lengths(96, packs=packs)
    order = random.Random(1).sample(range(96), 96)
    ranks = [micro_batches(order, lengths, rows_per_step=32, world=world, size=4) for world in worlds(size)]
    for number in range(3):
        steps = [rank[number] for rank in ranks]
        rows = [row for step in steps for batch in step for row in batch.rows]
        assert sorted(rows) == sorted(order[32 * number : 32 * number + 32]), "which rows make a step does not change"
        assert len({tuple(len(batch.rows) for batch in step) for step in steps}) == 1, "ranks make the same passes"
        room = 4 * max(lengths.whole[row] for row in rows)
        assert all(batch.num_tokens <= room for step in steps for batch in step)
        tokens = [sum(lengths.whole[row] for batch in step for row in batch.rows) for step in steps]
        assert max(tokens) <= 1.04 * min(tokens)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("rows", [8, 16])
def test_little_of_a_step_is_padding(rows, size):
    """What is computed stays within 8 % of the real tokens; in the rollout's order it would not."""
    lengths = random_lengths(64 * size, seed=2)
    real = sum(lengths.whole[row] for row in range(len(lengths)))
    (batches,) = zip(*(
        micro_batches(range(len(lengths)), lengths, rows_per_step=len(lengths), world=world, size=rows)
        for world in worlds(size)
    ), strict=True)  # fmt: skip
    computed = sum(len(batch.rows) * batch.length for rank in batches for batch in rank)
    assert real <= computed < 1.08 * real
    unsorted = [MicroBatch.of(range(start, start + rows), lengths) for start in range(0, len(lengths), rows)]
    assert sum(len(batch.rows) * batch.length for batch in unsorted) > 1.1 * real


def test_even_parts_by_hand():
    # 23 tokens in parts of 12: two. 8 | 6, then 4 behind the 6, 3 behind the 8, 2 behind the 10.
    assert even_parts([8, 6, 4, 3, 2], limit=12) == [[0, 3], [1, 2, 4]]
    # 11 each would be 22 of 23: three parts then.
    assert even_parts([8, 6, 4, 3, 2], limit=11) == [[0], [1, 4], [2, 3]]
    assert even_parts([9, 9], limit=4) == [[0], [1]] and even_parts([5], limit=9) == [[0]]
    assert even_parts([20, 3, 2, 1], limit=4) == [[0], [1, 2, 3]], "the longest stands alone, the others share its room"


def test_long_rows_do_not_spread_short_ones_over_much_memory():
    """Four rows of 2,148 tokens among 252 of 160: no pass takes more room than four times its tokens' limit."""
    lengths = [2148] * 4 + [160] * 252
    parts = even_parts(lengths, limit=16_384)
    assert sorted(place for part in parts for place in part) == list(range(256))
    assert max(len(part) * lengths[part[0]] for part in parts) <= 4 * 16_384
    assert max(sum(lengths[place] for place in part) for part in parts) <= 16_384 and len(parts) <= 12


def test_a_packed_micro_batch_by_hand():
    """Rows of 4, 7 and 5 tokens as 16; of 512, 510 and 508 padded, since 6 tokens are not worth another kernel."""
    of = MicroBatch.of(range(3), Lengths([1, 2, 3], [3, 5, 2], packs=True))
    assert of == MicroBatch((0, 1, 2), length=7, width=5, num_response_tokens=10, num_packed_tokens=16)
    assert of.num_tokens == 16 and MicroBatch.of(range(3), Lengths([1, 2, 3], [3, 5, 2])).num_tokens == 21
    even = MicroBatch.of(range(3), Lengths([256] * 3, [256, 254, 252], packs=True))
    assert even.num_packed_tokens is None and even.num_tokens == 3 * 512


def test_packed_rows_leave_no_padding_in_few_even_passes():
    """64 rows of which 16 of the longest may pass at once: as many passes as the tokens need, all of one size."""
    lengths = random_lengths(64, packs=True)
    (batches,) = micro_batches(range(64), lengths, rows_per_step=64, world=worlds(1)[0], size=16)
    real = sum(lengths.whole)
    assert sum(batch.num_tokens for batch in batches) == real
    assert len(batches) == math.ceil(real / (16 * max(lengths.whole)))
    sizes = [batch.num_tokens for batch in batches]
    assert max(sizes) < 1.02 * min(sizes)


def test_shared_prompts_by_hand():
    """Rows 0, 2 and 4 have one prompt of 9 tokens, 1 and 3 one of 6: 9 + 9 + 6 of 47 tokens do not pass."""
    lengths = Lengths([9, 6, 9, 6, 9], [1, 2, 3, 1, 1], packs=True, groups=[7, 3, 7, 3, 7])
    batch = MicroBatch.of([4, 1, 2, 0, 3], lengths)
    assert batch.shared == (9, 9, 6) and batch.num_packed_tokens == 47 and batch.num_tokens == 23
    assert MicroBatch.of([0, 1], lengths).shared == () and MicroBatch.of([0, 1], lengths).num_tokens == 18
    assert MicroBatch.of(range(5), Lengths([9] * 5, [1] * 5, groups=[7] * 5)).num_tokens == 50, "padded rows share none"
    few = Lengths([1, 1], [60, 50], packs=True, groups=[7, 7])
    assert MicroBatch.of([0, 1], few).shared == (), "1 of 112 tokens is not worth the copies"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("most", "units"), [(16, 8), (9, 8), (4, 4), (3, 2), (1, 1)])
def test_rows_of_one_prompt_stay_together(size, most, units):
    """16 groups of 8 rows: whole groups in a pass where they fit, else halves, quarters or single rows."""
    draw = random.Random(3)
    groups = draw.sample([group for group in range(16) for _ in range(8)], 128)
    lengths = Lengths([256] * 128, [draw.randint(30, 256) for _ in range(128)], packs=True, groups=groups)
    ranks = [micro_batches(range(128), lengths, rows_per_step=128, world=world, size=most)[0] for world in worlds(size)]
    assert sorted(row for rank in ranks for batch in rank for row in batch.rows) == list(range(128))
    assert len({tuple(len(batch.rows) for batch in rank) for rank in ranks}) == 1, "ranks make the same passes"
    longest = max(lengths.whole)
    for batch in (batch for rank in ranks for batch in rank):
        assert batch.num_packed_tokens is None or batch.num_packed_tokens <= most * longest
        counts = [sum(groups[row] == group for row in batch.rows) for group in {groups[row] for row in batch.rows}]
        assert all(count % units == 0 for count in counts)
        if units > 1:
            assert batch.num_packed_tokens - batch.num_tokens == sum(256 * (count - 1) for count in counts)


def test_groups_of_unequal_size_and_ranks_that_cannot_share_them():
    """Groups of 8 and 4 pass as fours; of 3 groups of 2 two ranks cannot have as many each, so rows pass singly."""
    uneven = Lengths([9] * 12, [2] * 12, packs=True, groups=[0] * 8 + [1] * 4)
    (step,) = micro_batches(range(12), uneven, rows_per_step=12, world=worlds(1)[0], size=4)
    assert [batch.shared for batch in step] == [(9, 9, 9)] * 3
    lengths = Lengths([9] * 6, [2, 3, 4, 5, 6, 7], packs=True, groups=[0, 0, 1, 1, 2, 2])
    ranks = [micro_batches(range(6), lengths, rows_per_step=6, world=world, size=6)[0] for world in worlds(2)]
    # As by length alone: 16 15 14 13 12 11 dealt to 0 1, 1 0, 0 1.
    assert [[batch.rows for batch in rank] for rank in ranks] == [[(5, 2, 1)], [(4, 3, 0)]]
    assert [[batch.shared for batch in rank] for rank in ranks] == [[()], [()]]


def test_a_long_row_in_a_group_does_not_spread_its_short_ones_over_much_memory():
    """Of each 8 rows one has 4,096 tokens and the others 50: no pass takes more than four times its limit, padded."""
    lengths = Lengths([10] * 128, ([4086] + [40] * 7) * 16, packs=True, groups=[n // 8 for n in range(128)])
    for batch in scoring_batches(lengths, world=worlds(1)[0], tokens=16_384):
        assert len(batch.rows) * batch.length <= 4 * 16_384 or len(batch.rows) == 8


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_scoring_batches_keep_to_their_tokens_and_cover_all_rows(monkeypatch, size, packs):
    monkeypatch.setattr(module, "SCORING_TOKENS", 3000)
    lengths = random_lengths(64, packs=packs)
    ranks = [scoring_batches(lengths, world=world) for world in worlds(size)]
    assert sorted(row for rank in ranks for batch in rank for row in batch.rows) == list(range(64))
    assert all(batch.num_tokens <= 3000 for rank in ranks for batch in rank)
    shapes = [[len(batch.rows) for batch in rank] for rank in ranks]
    assert all(shape == shapes[0] for shape in shapes), "ranks must make equally many passes of equally many rows"
    assert min(shapes[0][:-1]) >= 5 and ranks == [scoring_batches(lengths, world=world) for world in worlds(size)]


def test_ranks_cut_their_scoring_batches_at_the_same_places(monkeypatch):
    """The second rank could take two rows of 9 and 8 tokens at once, the first cannot take 10 and 8."""
    monkeypatch.setattr(module, "SCORING_TOKENS", 18)
    found = [scoring_batches(Lengths([1] * 4, [9, 8, 7, 7]), world=world) for world in worlds(2)]
    assert [[batch.rows for batch in rank] for rank in found] == [[(0,), (3,)], [(1,), (2,)]]


def test_a_row_longer_than_a_scoring_batch_stands_alone(monkeypatch):
    monkeypatch.setattr(module, "SCORING_TOKENS", 10)
    found = scoring_batches(Lengths([5, 5, 5, 1], [9, 20, 1, 2]), world=worlds(1)[0])
    assert [batch.rows for batch in found] == [(1,), (0,), (2,), (3,)]


def test_rows_are_cut_to_the_shape_of_their_micro_batch():
    responses = Responses(
        sequences=torch.arange(40).view(4, 10),
        trained=span_mask(torch.tensor([2, 4, 1, 3]), torch.tensor([3, 6, 2, 1]), 10),
        sampler_log_probs=-torch.arange(24.0).view(4, 6),
        finished=torch.ones(4, dtype=torch.bool), valid=torch.ones(4, dtype=torch.bool),
        row_index=torch.full((4,), EOS), order=torch.arange(4),
    )  # fmt: skip
    lengths = responses.lengths()
    assert lengths == Lengths([2, 4, 1, 3], [3, 6, 2, 1], groups=[EOS] * 4) and len(lengths) == 4
    batches = [MicroBatch.of([3, 0], lengths), MicroBatch.of([2], lengths)]
    (_, places, first), (_, _, second) = batch_rows(responses, batches)
    assert places.tolist() == first.order.tolist() == [3, 0]
    assert first.sequences.tolist() == [[30, 31, 32, 33, 34], [0, 1, 2, 3, 4]]
    assert first.sampler_log_probs.tolist() == [[-18, -19, -20], [0, -1, -2]]
    assert second.sequences.tolist() == [[20, 21, 22]] and second.sampler_log_probs.tolist() == [[-12, -13]]
    for batch, _, part in batch_rows(responses, batches):
        assert int(part.trained[:, 1:].sum()) == batch.num_response_tokens
