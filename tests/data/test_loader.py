"""Steps of a loader: grouped by length, the same rows whatever the number of ranks, made ahead of time in a thread."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from pipeline.data.batching import packed_sft_batch
from pipeline.data.loader import PrefetchedSteps, StepLoader, sequence_lengths, to_device

CPU = torch.device("cpu")
SIZES = [3, 11, 5, 2, 8, 13, 4, 6, 9, 7, 12]
ROWS = Dataset.from_list(
    [{"ids": [1 + n] * size, "trained": [True] * size, "num_tokens": size, "num_trained": size - 1}
     for n, size in enumerate(SIZES)]
)  # fmt: skip


def loader(*, micro=2, world_size=1, rank=0, lengths=None, collate=None) -> StepLoader:
    """Eight rows a step."""
    return StepLoader(
        ROWS,
        [[row] for row in range(len(ROWS))],
        collate or (lambda packs: packed_sft_batch(packs, pad_id=0)),
        micro_batch_size=micro,
        accumulation=8 // micro // world_size,
        world_size=world_size,
        rank=rank,
        seed=5,
        lengths=lengths,
    )


def rows_of(step) -> list[int]:
    """Row numbers by the tokens in a step's micro-batches."""
    return [int(row[0]) - 1 for batch in step.micro_batches for row in batch.input_ids if int(row[0])]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_rows_of_a_step_do_not_depend_on_how_it_is_cut(number):
    whole = loader(micro=8).step(number)
    for world_size, micro in ((1, 2), (2, 2), (4, 1)):
        steps = [loader(world_size=world_size, micro=micro, rank=rank).step(number) for rank in range(world_size)]
        assert sorted(row for step in steps for row in rows_of(step)) == sorted(rows_of(whole))
        assert {(step.num_rows, step.num_tokens, step.num_trained) for step in steps} == {
            (whole.num_rows, whole.num_tokens, whole.num_trained)
        }
        assert all(sorted(step.rows) == sorted(rows_of(step)) for step in steps)


def test_micro_batches_are_trimmed_to_rows_of_like_length():
    step = loader().step(0)
    sizes = [[SIZES[row] for row in rows_of(SimpleNamespace(micro_batches=[batch]))] for batch in step.micro_batches]
    assert [batch.input_ids.shape[1] for batch in step.micro_batches] == [max(part) for part in sizes]
    in_order = [size for part in sizes for size in part]
    assert in_order == sorted(in_order, reverse=True)
    computed, real = sum(batch.input_ids.numel() for batch in step.micro_batches), step.num_tokens
    assert computed < 1.2 * real, "little is computed for padding"


def test_rows_may_be_grouped_by_lengths_that_are_given():
    """Pairs are grouped so: the shorter the row here, the earlier it comes."""
    step = loader(lengths=[-size for size in SIZES]).step(0)
    sizes = [SIZES[row] for row in rows_of(step)]
    assert sizes == sorted(sizes)


def test_both_sides_of_a_pair_have_lengths():
    pairs = Dataset.from_list(
        [{"chosen_ids": [1] * a, "rejected_ids": [1] * b} for a, b in ((3, 5), (4, 2), (1, 1), (0, 6))]
    )
    assert sequence_lengths(pairs).tolist() == [[3, 5], [4, 2], [1, 1], [0, 6]]
    assert sequence_lengths(pairs.select([3, 1])).tolist() == [[0, 6], [4, 2]]


def test_a_step_knows_what_attention_costs_whatever_the_packing():
    """Sequences do not see each other, also where they share a row."""
    step = loader(micro=8).step(0)
    assert step.num_squares == sum(SIZES[row] ** 2 for row in step.rows)
    units = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9, 10]]
    packed = StepLoader(
        ROWS, units, lambda packs: packed_sft_batch(packs, pad_id=0), micro_batch_size=8, accumulation=1, world_size=1,
        rank=0, seed=5,
    )  # fmt: skip
    assert packed.step(0).num_squares == sum(size**2 for size in SIZES)


def test_steps_made_ahead_are_the_loaders_own():
    plain = loader()
    with PrefetchedSteps(loader(), end=4, device=CPU) as steps:
        for number in (0, 1, 3, 2, 3, 0):  # also out of order, as after a resume
            ahead, wanted = steps.step(number), plain.step(number)
            assert rows_of(ahead) == rows_of(wanted) and ahead.num_tokens == wanted.num_tokens
    assert not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("next step")]


def test_the_next_step_is_made_while_this_one_is_used_and_none_behind_the_last():
    made = []

    def collate(packs):
        made.append(threading.current_thread().name)
        return packed_sft_batch(packs, pad_id=0)

    with PrefetchedSteps(loader(micro=8, collate=collate), end=2, device=CPU) as steps:
        steps.step(0)
        deadline = time.monotonic() + 10
        while len(made) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(made) == 2, "the second step was made without being asked for"
        steps.step(1)
        steps._thread.submit(int).result()  # whatever was begun before this is done
    assert len(made) == 2
    assert all(name.startswith("next step") for name in made)


class Broken(Exception):
    pass


def test_an_error_of_the_thread_comes_with_its_step():
    calls = []

    def collate(packs):
        calls.append(1)
        if len(calls) == 2:
            raise Broken("row 7")
        return packed_sft_batch(packs, pad_id=0)

    with (
        pytest.raises(Broken, match="row 7"),
        PrefetchedSteps(loader(micro=8, collate=collate), end=9, device=CPU) as steps,
    ):
        steps.step(0)  # the step that can be made is given
        steps.step(1)
    assert not threads()


def test_an_error_of_the_loop_leaves_no_thread_behind():
    with pytest.raises(Broken), PrefetchedSteps(loader(), end=9, device=CPU) as steps:
        steps.step(0)
        raise Broken
    assert not threads()


def test_a_batch_moves_with_all_its_tensors():
    batch = loader().step(0).micro_batches[0]
    moved = to_device(batch, torch.device("meta"))
    assert {getattr(moved, name).device.type for name in batch.__dataclass_fields__} == {"meta"}


@pytest.mark.parametrize("number", range(5))
def test_a_step_that_is_cut_anew_keeps_its_rows_in_later_epochs_too(number):
    """Two steps an epoch: the third is of the second epoch."""
    asked, whole = loader(micro=4), loader(micro=1).step(number)
    step = asked.resized(asked.step(number), 1)
    assert (step.number, rows_of(step)) == (number, rows_of(whole)) and step.num_tokens == whole.num_tokens
    assert len(step.micro_batches) == len(whole.micro_batches) and asked.step(0).micro_batch_size == 1
