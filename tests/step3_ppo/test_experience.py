"""Rows of responses: masks, indices between positions and response tokens, packing and gathering."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from support.reward_rows import rows_of
from support.tiny_models import EOS, PAD
from torch import Tensor

from pipeline import dist
from pipeline.generation.rollouts import Rollout
from step3_ppo.experience import (
    Collected,
    Experience,
    Responses,
    ValueTargets,
    gather_responses,
    pack_responses,
)
from step3_ppo.scoring import gather_scores

# Prompt and response lengths: ordinary, EOS only, the longest possible, one token of prompt.
SIZES = [(3, 4), (5, 1), (6, 5), (1, 2)]


def rollout_of(sizes: list[tuple[int, int]]) -> Rollout:
    """Token ids count up from 100 * row, each response ends in EOS; log-probability of token t is -(row + t / 10)."""
    prompts = [100 * n + torch.arange(start) + 10 for n, (start, _) in enumerate(sizes)]
    responses = [torch.cat([100 * n + torch.arange(length - 1) + 50, torch.tensor([EOS])])
                 for n, (_, length) in enumerate(sizes)]  # fmt: skip
    return Rollout(
        prompts=prompts,
        responses=responses,
        sampled=[torch.ones(length, dtype=torch.bool) for _, length in sizes],
        log_probs=[-(n + torch.arange(length) / 10) for n, (_, length) in enumerate(sizes)],
        finished=torch.tensor([n % 2 == 0 for n in range(len(sizes))]),
    )


def packed(sizes: list[tuple[int, int]] = SIZES, *, pad_id: int = PAD, order: list[int] | None = None) -> Responses:
    count = len(sizes)
    return pack_responses(
        rollout_of(sizes),
        pad_id=pad_id,
        max_sequence=14,
        max_response=7,
        valid=torch.tensor([True] * (count - 1) + [False]),
        row_index=torch.arange(count) + 40,
        order=torch.tensor(order or list(range(count))),
    )


def test_packing_by_hand():
    responses = packed([(2, 3), (1, 1)])
    assert responses.sequences[:, :6].tolist() == [[10, 11, 50, 51, EOS, PAD], [110, EOS, PAD, PAD, PAD, PAD]]
    assert responses.sequences.shape == (2, 14) and responses.sampler_log_probs.shape == (2, 7)
    torch.testing.assert_close(responses.sampler_log_probs[:, :4], -torch.tensor([[0, 0.1, 0.2, 0], [1.0, 0, 0, 0]]))
    assert responses.prompt_lengths.tolist() == [2, 1] and responses.response_lengths.tolist() == [3, 1]


@pytest.mark.parametrize("pad_id", [PAD, EOS])
def test_masks_by_hand_even_if_padding_is_the_eos(pad_id):
    # The EOS counts, nothing after it; row 1 is an EOS alone; attention covers prompt and response.
    responses = packed([(2, 3), (1, 1), (1, 1)], pad_id=pad_id).trimmed()
    assert responses.response_mask.int().tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]  # row 2 only fills the batch
    assert responses.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert responses.trained[:, 1:].int().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_selected_positions_predict_exactly_the_response():
    responses = packed()
    for n, (start, length) in enumerate(SIZES):
        predicted = responses.sequences[n, 1:][responses.trained[n, 1:]]
        assert predicted.tolist() == responses.sequences[n, start : start + length].tolist()


@pytest.mark.parametrize("columns", [13, 14])
@pytest.mark.parametrize("trim", [False, True])
def test_response_space_equals_a_slow_loop(columns, trim):
    """Token t of a response takes the number at position prompt_length + t - 1: V(s_t) is known before the token."""
    responses = packed().trimmed() if trim else packed()
    columns = responses.sequences.shape[1] - (14 - columns)
    per_position = torch.arange(float(len(SIZES) * columns)).view(len(SIZES), columns) + 1
    per_position[~responses.attention_mask[:, :columns]] = float("nan")
    expected = np.zeros((len(SIZES), responses.sampler_log_probs.shape[1]), dtype=np.float32)
    for n, (start, length) in enumerate(SIZES):
        for t in range(length):
            expected[n, t] = per_position[n, start + t - 1]
    np.testing.assert_array_equal(responses.in_response_space(per_position).numpy(), expected)


def test_trimming_drops_only_padding():
    responses = packed().trimmed()
    assert responses.sequences.shape == (4, 11) and responses.sampler_log_probs.shape == (4, 5)
    assert responses.response_lengths.tolist() == [length for _, length in SIZES]


def test_selected_rows_keep_everything_together():
    responses = packed()
    chosen = responses.select(torch.tensor([2, 0]))
    assert chosen.row_index.tolist() == [42, 40] and chosen.order.tolist() == [2, 0]
    assert chosen.sequences.equal(responses.sequences[[2, 0]])


def test_gathered_rows_stand_in_the_rollouts_order(monkeypatch):
    first, second = packed(order=[3, 0, 5, 1]), packed(order=[4, 2, 6, 7])
    others = iter([getattr(second, field.name) for field in fields(second)])
    monkeypatch.setattr(dist, "gather_rows", lambda rows: torch.cat([rows, next(others)]))  # those of a second rank
    together = gather_responses(first)
    assert together.order.tolist() == list(range(8))
    assert together.row_index.tolist() == [41, 43, 41, 40, 40, 42, 42, 43]
    assert together.sequences.shape[1] == 11


def scores_of(rows: list[int], width: int) -> list[Tensor]:
    """Values per token and a score per sequence: every number says which row it belongs to."""
    per_token = torch.tensor(rows, dtype=torch.float32).unsqueeze(1).expand(-1, width)
    return [per_token, per_token + 0.3, per_token[:, 0] + 0.4]


def test_gathered_scores_are_widened_and_put_in_order():
    rows = [torch.tensor([2, 0]), torch.tensor([1])]
    log_probs, values, scores = gather_scores([scores_of([2, 0], 3), scores_of([1], 2)], rows, width=4)
    assert log_probs.tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [2, 2, 2, 0]]
    torch.testing.assert_close(scores, torch.tensor([0.4, 1.4, 2.4]))
    torch.testing.assert_close(values[:, 0], torch.tensor([0.3, 1.3, 2.3]))


def test_narrowed_experience_keeps_the_first_tokens():
    token = torch.arange(10.0).view(2, 5)
    found = Experience(token > 3, token, token, token, ValueTargets(token, token + 1)).narrowed(2)
    assert found.targets.returns.tolist() == [[1, 2], [6, 7]] and found.response_mask.shape == (2, 2)


def test_a_rollout_comes_back_from_a_checkpoint_with_every_tensor():
    generator, responses = torch.Generator().manual_seed(0), rows_of([3, 1, 2], [True, False, True])
    *numbers, sampled = torch.randn(6, 3, 3, generator=generator).unbind(0)
    responses = responses.map(lambda tensor: sampled if tensor is responses.sampler_log_probs else tensor)
    old, ref, advantages, values, returns = numbers
    for targets in (ValueTargets(values, returns), None):
        experience = Experience(responses.response_mask, old, ref, advantages, targets)
        whole = Collected(responses, experience, {"objective/kl": 0.5})
        found = Collected.restored(dict(whole.tensors()), whole.metrics, torch.device("cpu"))
        before, after = whole.tensors(), found.tensors()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert found.responses.trained.equal(responses.trained)
        assert len(before) == 7 + 4 + 2 * (targets is not None)
