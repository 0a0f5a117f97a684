"""Tensors written out by hand; the plan of an epoch covers every row once on any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import naming

from pipeline.data.batching import (
    IGNORED,
    SharedTokens,
    balanced_slices,
    block_diagonal_mask,
    epoch_order,
    num_steps,
    pack_rows,
    packed_sft_batch,
    pair_batch,
    rank_slices,
    rows_of_step,
    segment_bounds,
    seq2seq_batch,
)

PAD = 9
SHORT = {"ids": [5, 6], "trained": [False, True]}
LONG = {"ids": [1, 2, 3], "trained": [False, False, True]}


def test_sft_batch_by_hand():
    batch = packed_sft_batch([[LONG], None, [SHORT]], pad_id=PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3], [9, 9, 9], [5, 6, 9]]
    assert batch.attention_mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert batch.trained_mask.tolist() == [[False, False, True], [False] * 3, [False, True, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch.weights.tolist() == [1.0, 0.0, 1.0]
    assert (batch.input_ids.dtype, batch.attention_mask.dtype) == (torch.int64, torch.bool)
    assert (batch.trained_mask.dtype, batch.weights.dtype) == (torch.bool, torch.float32)


def test_masks_do_not_come_from_ids():
    """The real EOS must, with pad = EOS, stay a real, trained token."""
    batch = packed_sft_batch([[{"ids": [4, PAD], "trained": [False, True]}], [LONG]], pad_id=PAD)
    assert batch.attention_mask[0].tolist() == [True, True, False]
    assert batch.trained_mask[0].tolist() == [False, True, False]


def test_packed_batch_by_hand():
    batch = packed_sft_batch([[SHORT, LONG], [LONG, LONG], None], pad_id=PAD)
    assert batch.input_ids.tolist() == [[5, 6, 1, 2, 3, 9], [1, 2, 3, 1, 2, 3], [9] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0] * 6]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 2], [1, 0, 0, 0, 0, 0]]
    assert batch.trained_mask[0].tolist() == [False, True, False, False, True, False]
    assert not batch.trained_mask[2].any()
    assert batch.weights.tolist() == [1.0, 1.0, 0.0]


def test_rows_padded_on_the_left_are_refused_where_they_are_collated():
    """On the host, so that it holds for every device: `to_device` copies batches that were made here."""
    pairs = [{"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4], "prompt_length": 1, "margin": 0.0}]
    for batch in (packed_sft_batch([[LONG], [SHORT]], pad_id=PAD), pair_batch(pairs, pad_id=PAD)):
        flipped = {name: getattr(batch, name).flip(1) for name in ("input_ids", "attention_mask")}
        with pytest.raises(ValueError, match="padded on the right"):
            replace(batch, **flipped)


def test_segment_bounds_by_hand():
    """Two rows of five places: samples of 2, 2, a padding of 1; a sample of 3, a padding of 2."""
    bounds = segment_bounds(torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 0, 0]]))
    assert bounds.tolist() == [0, 2, 4, 5, 8, 10] and bounds.dtype == torch.int32
    # A row's last sample and the next row's first have the same id, and are two.
    assert segment_bounds(torch.tensor([[1, 1], [1, 1]])).tolist() == [0, 2, 4]
    assert packed_sft_batch([[SHORT, LONG], None], pad_id=PAD).segment_bounds.tolist() == [0, 2, 5, 6, 10]


def test_block_diagonal_mask_by_hand():
    mask = block_diagonal_mask(torch.tensor([[1, 1, 2, 2, 0]]))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == expected
    two_pads = block_diagonal_mask(torch.tensor([[1, 0, 0]]))[0, 0].int().tolist()
    assert two_pads == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_packed_samples_do_not_see_each_other():
    """Logits of a packed row equal those of each sample on its own, in a real attention model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    packed = packed_sft_batch([[SHORT, LONG]], pad_id=PAD)
    mask = block_diagonal_mask(packed.segment_ids)
    with torch.no_grad():
        together = model(packed.input_ids, attention_mask=mask, position_ids=packed.position_ids).logits[0]
        alone = [model(torch.tensor([sample["ids"]])).logits[0] for sample in (SHORT, LONG)]
    torch.testing.assert_close(together[:5], torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_pair_batch_by_hand():
    first = {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5], "prompt_length": 2, "margin": 0.5}
    batch = pair_batch([first, None], pad_id=PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [9] * 4, [1, 2, 5, 9], [9] * 4]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0] * 4, [0, 1, 2, 0], [0] * 4]
    assert batch.lengths.tolist() == [4, 1, 3, 1]
    assert batch.prompt_lengths.tolist() == [2, 0]
    assert batch.margins.tolist() == [0.5, 0.0]
    assert batch.weights.tolist() == [1.0, 0.0]
    assert (batch.lengths.dtype, batch.margins.dtype) == (torch.int64, torch.float32)
    assert batch.shared.lengths.tolist() == [0, 0, 2, 0] and (batch.shared.num_tokens, batch.shared.num_shared) == (
        9,
        2,
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3, 4], [1, 2, 3], 2),  # the last token is the row's own: it has a query
        ([1, 2, 3, 4], [2, 2, 3, 4], 0),
        ([5, *[1] * 40], [5, *[2] * 40], 0),  # one token of 82 is not worth it
        ([5, 5, 5, *[1] * 40], [5, 5, 5, *[2] * 40], 3),
    ],
)
def test_what_the_rows_of_a_pair_share(chosen, rejected, shared):
    found = SharedTokens.of_pairs([chosen, rejected])
    assert found.lengths.tolist() == [0, shared] and found.num_shared == shared
    assert found.lengths.dtype == torch.int64 and found.num_tokens == len(chosen) + len(rejected)


def test_first_fit_packing_by_hand():
    assert pack_rows([6, 5, 4, 3, 2, 10], 10) == [[0, 2], [1, 3, 4], [5]]
    assert pack_rows([6, 5, 4], 10, max_open=1) == [[0], [1, 2]]
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens"):
        pack_rows([1, 11], 10)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing_keeps_every_sample_once_and_within_the_limit(sizes):
    packs = pack_rows(sizes, 20)
    assert sorted(index for pack in packs for index in pack) == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in pack) <= 20 for pack in packs)


def test_epoch_order_is_a_function_of_seed_and_epoch():
    state = np.random.get_state()[1].tolist()
    first = epoch_order(1, 0, 50).tolist()
    assert epoch_order(1, 0, 50).tolist() == first
    assert epoch_order(1, 1, 50).tolist() != first
    assert epoch_order(2, 0, 50).tolist() != first
    assert epoch_order(-3, 0, 50).shape == (50,)
    assert sorted(first) == list(range(50))
    assert np.random.get_state()[1].tolist() == state


@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 3))
def test_an_epoch_visits_every_row_once(num_rows, rows_per_step, epoch):
    plans = [
        rows_of_step(7, epoch, step, num_rows, rows_per_step) for step in range(num_steps(num_rows, rows_per_step))
    ]
    assert all(len(plan) == rows_per_step for plan in plans)
    rows = [row for plan in plans for row in plan]
    assert sorted(row for row in rows if row is not None) == list(range(num_rows))
    assert all(row is not None for row in rows[:num_rows])


def test_step_beyond_the_epoch_is_refused():
    with pytest.raises(IndexError, match=naming("step 3 ... 3 steps")):
        rows_of_step(1, 0, 3, 10, 4)


def test_rank_slices_by_hand():
    rows = [0, 1, 2, 3, 4, 5, 6, None]
    assert rank_slices(rows, 2, 0, 2) == [[0, 1], [4, 5]]
    assert rank_slices(rows, 2, 1, 2) == [[2, 3], [6, None]]
    assert rank_slices(rows, 1, 0, 4) == [[0, 1, 2, 3], [4, 5, 6, None]]
    assert rank_slices([0, 1, 2], 2, 1, 2) == [[2, None]]


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 99), min_size=1, max_size=30))
def test_ranks_share_a_step_completely_and_evenly(world_size, micro_batch_size, rows):
    slices = [rank_slices(rows, world_size, rank, micro_batch_size) for rank in range(world_size)]
    assert len({len(micro_batches) for micro_batches in slices}) == 1
    assert all(len(micro) == micro_batch_size for micro_batches in slices for micro in micro_batches)
    seen = [row for micro_batches in slices for micro in micro_batches for row in micro if row is not None]
    assert sorted(seen) == sorted(rows)


def test_balanced_slices_by_hand():
    """Lengths 9 8 7 6 5 4 3 and a padding row: rank 0 is dealt 9 6 5 and padding, rank 1 is dealt 8 7 4 3."""
    lengths = [5, 9, 3, 7, 4, 8, 6]
    rows = [0, 1, 2, 3, 4, 5, 6, None]
    deal = {rank: balanced_slices(rows, lengths, world_size=2, rank=rank, micro_batch_size=2) for rank in (0, 1)}
    assert deal == {0: [[1, 6], [0, None]], 1: [[5, 3], [4, 2]]}
    assert balanced_slices([2, 1], lengths, world_size=1, rank=0, micro_batch_size=4) == [[1, 2, None, None]]


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 99), min_size=1, max_size=30))
def test_balanced_slices_share_a_step_completely_and_evenly(world_size, micro_batch_size, lengths):
    rows = list(range(len(lengths)))
    deal = [
        balanced_slices(rows, lengths, world_size=world_size, rank=rank, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]
    assert len({len(micro_batches) for micro_batches in deal}) == 1
    assert all(len(micro) == micro_batch_size for micro_batches in deal for micro in micro_batches)
    seen = [row for micro_batches in deal for micro in micro_batches for row in micro if row is not None]
    assert sorted(seen) == rows
    tokens = [sum(lengths[row] for micro in part for row in micro if row is not None) for part in deal]
    assert max(tokens) - min(tokens) <= max(lengths)
    for part in deal:
        sizes = [lengths[row] for micro in part for row in micro if row is not None]
        assert sizes == sorted(sizes, reverse=True)


def test_every_epoch_has_an_order_of_its_own():
    orders = {tuple(epoch_order(3, epoch, 40)) for epoch in range(20)}
    assert len(orders) == 20 and all(sorted(order) == list(range(40)) for order in orders)


def test_a_response_of_an_encoder_decoder_model_keeps_what_is_not_trained_without_a_label():
    batch = seq2seq_batch([[{"ids": [5, 6, 7, 8], "trained": [False, True, False, True]}], None], pad_id=0)
    assert batch.labels.tolist() == [[6, IGNORED, 8], [IGNORED] * 3]
    assert batch.input_ids.tolist() == [[5], [0]]
