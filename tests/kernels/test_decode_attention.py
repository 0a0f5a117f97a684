"""The attention kernels of a decode step against plain torch in fp64: odd sizes, lengths from 0 to a full cache."""

import pytest
import torch
from support.decode_models import DEVICE, SIXTEEN_BITS

from pipeline.kernels import split_kv
from pipeline.kernels.decode_attention import attend, store_prompts
from pipeline.kernels.split_kv import HeadLayout, SplitKVSchedule

ORDERS = ["qkv", "qvk", "kqv", "kvq", "vqk", "vkq"]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, SIXTEEN_BITS: {"rtol": 2e-2, "atol": 2e-2}}


def layout_of(heads: tuple[int, int], head_dim: int, order: str = "qkv") -> HeadLayout:
    widths = {"q": heads[0] * head_dim, "k": heads[1] * head_dim, "v": heads[1] * head_dim}
    offsets, column = {}, 0
    for name in order:
        offsets[name] = column
        column += widths[name]
    return HeadLayout(*heads, head_dim, offsets["q"], offsets["k"], offsets["v"], scale=0.7 * head_dim**-0.5)


def heads_of(rows: torch.Tensor, offset: int, count: int, layout: HeadLayout) -> torch.Tensor:
    """(M, count, D) of the joined projection."""
    return rows[:, offset : offset + count * layout.head_dim].unflatten(1, (count, layout.head_dim))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def plain_attention(
    qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], layout: HeadLayout
) -> torch.Tensor:
    """(M, Hq D) fp64, row by row and head by head."""
    q = heads_of(qkv, layout.q_offset, layout.num_heads, layout).double()
    k, v = (
        heads_of(qkv, offset, layout.num_kv_heads, layout).double() for offset in (layout.k_offset, layout.v_offset)
    )
    group = layout.num_heads // layout.num_kv_heads
    actual = torch.zeros_like(q)
    for m, length in enumerate(lengths):
        for head in range(layout.num_heads):
            shared = head // group
            all_keys = torch.cat([keys[m, shared, :length].double(), k[m, shared : shared + 1]])
            all_values = torch.cat([values[m, shared, :length].double(), v[m, shared : shared + 1]])
            actual[m, head] = (all_keys @ q[m, head] * layout.scale).softmax(0) @ all_values
    return actual.flatten(1)


def run(
    qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: list[int], active: list[int], *,
    layout: HeadLayout, out: torch.Tensor,
) -> None:  # fmt: skip
    """Twice, as two layers of one step would: the second must find nothing of the first."""
    actual = (torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in (lengths, active))
    schedule = SplitKVSchedule.create(*actual, layout=layout, cache_length=keys.shape[2])
    attend(qkv, keys, values, schedule=schedule, layout=layout, out=torch.empty_like(out))
    attend(qkv, keys, values, schedule=schedule, layout=layout, out=out)


def check(
    heads: tuple[int, int], head_dim: int, lengths: list[int], *, cache_length: int, order: str = "qkv",
    dtype: torch.dtype = torch.float32, active: list[int] | None = None,
) -> None:  # fmt: skip
    """Check outputs, what is written and what is left alone; positions that no token has been written to are NaN."""
    layout, rows = layout_of(heads, head_dim, order), len(lengths)
    active = active or [1] * rows
    qkv = random(rows, (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
    keys, values = (random(rows, heads[1], cache_length, head_dim, dtype=dtype) * (1 + n) for n in range(2))
    for m, length in enumerate(lengths):
        keys[m, :, length:], values[m, :, length:] = float("nan"), float("nan")
    expected = plain_attention(qkv, keys, values, lengths, layout)
    caches = [keys.clone(), values.clone()]
    for m, length in enumerate(lengths):
        if active[m]:
            caches[0][m, :, length] = heads_of(qkv, layout.k_offset, heads[1], layout)[m]
            caches[1][m, :, length] = heads_of(qkv, layout.v_offset, heads[1], layout)[m]
    out = torch.full((rows, heads[0] * head_dim), 99.0, dtype=dtype, device=DEVICE)
    before = qkv.clone()
    run(qkv, keys, values, lengths, active, layout=layout, out=out)
    mask = torch.tensor(active, dtype=torch.bool, device=DEVICE)
    torch.testing.assert_close(out[mask].double(), expected[mask], **TOLERANCE[dtype])
    assert (out[~mask] == 99.0).all() and torch.equal(qkv, before)
    for actual, exact in ((keys, caches[0]), (values, caches[1])):
        torch.testing.assert_close(actual, exact, rtol=0.0, atol=0.0, equal_nan=True)


# (query heads, key heads), channels a head: each kernel, powers of two and not.
@pytest.mark.parametrize("head_dim", [4, 20, 64, 80])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
def test_head_sizes_and_groups(heads, head_dim):
    check(heads, head_dim, [0, 1, 6], cache_length=7)


@pytest.mark.parametrize("heads", [(1, 1), (4, 1)])
def test_lengths_on_both_sides_of_a_block_and_up_to_a_full_cache(heads):
    check(heads, 16, [0, 63, 64, 65, 128, 129], cache_length=130)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
def test_a_head_size_above_64_takes_smaller_blocks(heads):
    check(heads, 128, [31, 32, 33, 66], cache_length=67)


@pytest.mark.parametrize("head_dim", [16, 20])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
def test_several_blocks_of_keys_and_what_is_left(heads, head_dim, monkeypatch):
    monkeypatch.setattr(split_kv, "TARGET_WARPS", 1)  # a program a row: all its keys
    check(heads, head_dim, [63, 64, 65, 128, 150, 192], cache_length=193)


def test_splits_of_just_a_block():
    check((1, 1), 4, [512], cache_length=513)


@pytest.mark.slow
def test_many_rows(monkeypatch):
    monkeypatch.setattr(split_kv, "TARGET_WARPS", 1)
    check((1, 1), 4, [130, *(row % 5 for row in range(130)), 64], cache_length=131)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_q_k_and_v_in_any_order(heads, order):
    check(heads, 16, [3, 5], cache_length=6, order=order)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_rows_that_are_not_active_are_left_alone(heads):
    check(heads, 16, [3, 0, 5, 2], cache_length=6, active=[0, 1, 0, 1])


@pytest.mark.few(2)
@pytest.mark.parametrize("active", [[0, 1, 0, 0, 0], [1, 0, 0, 1, 0], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_programs_of_finished_rows_take_splits_of_the_others(heads, active):
    """Up to eight splits of a row; the NaN behind the row's end is in no split's sums."""
    check(heads, 16, [40, 259, 0, 97, 31], cache_length=260, active=active)


def assignments_of(
    lengths: list[int], active: list[int], *, cache_length: int, query_heads: int = 2
) -> list[list[int]]:
    """Return (row, split, splits, keys) of each program that has something to do, for two heads of keys."""
    actual = (torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in (lengths, active))
    layout = HeadLayout(query_heads, 2, 16, 0, 16 * query_heads, 16 * (query_heads + 2), 0.25)
    schedule = SplitKVSchedule.create(*actual, layout=layout, cache_length=cache_length)
    assert schedule.num_active.item() == sum(active) and not schedule.num_done.any()
    return [assignment for assignment in schedule.assignments.tolist() if assignment[2]]


def test_assignments_by_hand(monkeypatch):
    monkeypatch.setattr(split_kv, "TARGET_WARPS", 16)  # eight programs a head
    lengths = [70, 200, 10, 300]
    assert assignments_of(lengths, [1, 1, 1, 1], cache_length=400) == [
        [0, 0, 2, 70], [1, 0, 2, 200], [2, 0, 1, 10], [3, 0, 2, 300],
        [0, 1, 2, 70], [1, 1, 2, 200], [3, 1, 2, 300],
    ]  # fmt: skip
    # 70 keys make three splits, since a split has at least 32 keys.
    assert assignments_of(lengths, [1, 0, 0, 0], cache_length=400) == [[0, split, 3, 70] for split in range(3)]
    assert assignments_of(lengths, [0, 0, 0, 1], cache_length=400) == [[3, split, 8, 300] for split in range(8)]
    assert assignments_of(lengths, [0, 0, 0, 0], cache_length=400) == []
    # Programs of four warps: as many as rows.
    assert assignments_of(lengths, [1, 1, 1, 0], cache_length=400, query_heads=4) == [
        [0, 0, 1, 70],
        [1, 0, 1, 200],
        [2, 0, 1, 10],
    ]
    assert assignments_of(lengths, [0, 1, 0, 1], cache_length=400, query_heads=4) == [
        [1, 0, 2, 200], [3, 0, 2, 300], [1, 1, 2, 200], [3, 1, 2, 300],
    ]  # fmt: skip


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_sixteen_bits(heads):
    check(heads, 24, [2, 70, 0], cache_length=71, dtype=SIXTEEN_BITS)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1)])
def test_large_scores_do_not_overflow(heads):
    """A key that is 1000 times as long as the others takes all the weight, wherever it stands."""
    layout = layout_of(heads, 16)
    qkv = random(3, (heads[0] + 2 * heads[1]) * 16)
    keys, values = random(3, 1, 80, 16), random(3, 1, 80, 16) + 1
    for m, place in enumerate((0, 70)):
        keys[m, :, place] = 1000 * qkv[m, :16]
    qkv[2, layout.k_offset : layout.k_offset + 16] = 1000 * qkv[2, :16]
    lengths = [79, 75, 9]
    expected = plain_attention(qkv, keys, values, lengths, layout)
    out = torch.empty(3, heads[0] * 16, device=DEVICE)
    run(qkv, keys, values, lengths, [1, 1, 1], layout=layout, out=out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["qkv", "vkq"])
@pytest.mark.parametrize("width", [1, 5, 66])
def test_prompts_go_to_the_rows_of_their_responses(width, order):
    """Three responses to two prompts in rows 4, 0 and 2 of five; the others and the positions behind stay."""
    layout = layout_of((4, 2), 12, order)
    qkv = random(2 * width, 8 * 12)
    keys, values = (torch.full((5, 2, width + 3, 12), float("nan"), device=DEVICE) for _ in range(2))
    slots, source = [4, 0, 2], [1, 1, 0]
    store_prompts(
        qkv, keys, values, slots=torch.tensor(slots, device=DEVICE), source=torch.tensor(source, device=DEVICE),
        layout=layout, width=width,
    )  # fmt: skip
    for cache, offset in ((keys, layout.k_offset), (values, layout.v_offset)):
        prompts = heads_of(qkv, offset, 2, layout).unflatten(0, (2, width)).transpose(1, 2)  # (2, Hkv, P, D)
        expected = torch.full_like(cache, float("nan"))
        for slot, prompt in zip(slots, source, strict=True):
            expected[slot, :, :width] = prompts[prompt]
        torch.testing.assert_close(cache, expected, rtol=0.0, atol=0.0, equal_nan=True)
