import math

import numpy as np
import pytest
import torch

from step2_reward.loss import bradley_terry_loss, per_token_loss

LOG2 = math.log(2)


def log_loss(margin: float) -> float:
    return math.log1p(math.exp(-margin))


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def random_scores() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chosen and rejected scores, weights (two rows only fill the batch) and margins, all (B,)."""
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margins = 2 * torch.randn(3, 7, generator=generator)
    return chosen, rejected, torch.tensor([1.0, 1, 0.5, 1, 0, 2, 0]), margins.abs()


# --- bradley_terry_loss ---


def test_pair_loss_by_hand():
    # Margins ln 3 and -ln 3: sigmoid 3/4 and 1/4; losses ln 4/3 and ln 4; weights 1 and 2.
    chosen, rejected = torch.tensor([math.log(3), 0.0]), torch.tensor([0.0, math.log(3)])
    loss = bradley_terry_loss(chosen, rejected, torch.tensor([1.0, 2.0]))
    assert loss.item() == pytest.approx(math.log(4 / 3) + 2 * math.log(4))


def test_margin_and_centering_by_hand():
    # c - r - m = 2 - 1 - 1 = 0: log 2. Centering 0.1 * (2 + 1)**2 = 0.9. Weight 3.
    loss = bradley_terry_loss(
        torch.tensor([2.0]),
        torch.tensor([1.0]),
        torch.tensor([3.0]),
        margins=torch.tensor([1.0]),
        centering_coef=0.1,
    )
    assert loss.item() == pytest.approx(3 * (LOG2 + 0.9))


@pytest.mark.parametrize("with_margins", [False, True])
@pytest.mark.parametrize("centering_coef", [0.0, 0.3])
def test_pair_loss_equals_a_slow_loop(with_margins, centering_coef):
    chosen, rejected, weights, margins = random_scores()
    expected = 0.0
    for c, r, w, m in np.stack([t.double().numpy() for t in (chosen, rejected, weights, margins)], axis=1):
        expected += w * (log_loss(c - r - (m if with_margins else 0)) + centering_coef * (c + r) ** 2)
    loss = bradley_terry_loss(
        chosen, rejected, weights, margins=margins if with_margins else None, centering_coef=centering_coef
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_gradient_pushes_the_pair_apart_and_centering_towards_zero():
    # d/dc -log sigmoid(c - r) = -sigmoid(r - c) = -1/2 at c = r = 1; centering adds 2 * 0.1 * (c + r) = 0.4 to both.
    scores = torch.ones(2, 1, requires_grad=True)
    loss = bradley_terry_loss(scores[0], scores[1], torch.ones(1), centering_coef=0.1)
    torch.testing.assert_close(gradient(loss, scores), torch.tensor([[-0.1], [0.9]]))


def test_large_margins_neither_overflow_nor_vanish():
    chosen = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.zeros(2), torch.ones(2))
    assert loss.item() == 1000
    assert gradient(loss, chosen).tolist() == [-1, 0]


def test_half_precision_scores_are_compared_in_fp32():
    # In bf16 the loss itself, ln 2 + ..., would be rounded to 8 bits.
    chosen, rejected = torch.tensor([0.3, 1.7]).bfloat16(), torch.tensor([0.1, 2.2]).bfloat16()
    loss = bradley_terry_loss(chosen, rejected, torch.ones(2), centering_coef=0.1)
    assert loss.dtype == torch.float32
    assert loss.item() == bradley_terry_loss(chosen.float(), rejected.float(), torch.ones(2), centering_coef=0.1).item()


def test_rows_of_weight_zero_change_nothing():
    chosen, rejected, weights, margins = random_scores()
    garbage = torch.where(weights > 0, chosen, math.nan).requires_grad_()
    clean = bradley_terry_loss(chosen, rejected, weights, margins=margins, centering_coef=0.1)
    loss = bradley_terry_loss(garbage, rejected, weights, margins=margins, centering_coef=0.1)
    assert loss.item() == clean.item()
    assert gradient(loss, garbage).isfinite().all()
    assert (gradient(loss, garbage)[weights == 0] == 0).all()


# --- per_token_loss ---


def random_pairs() -> dict[str, torch.Tensor]:
    """Right-padded pairs with common prompts of every length from 0 up; padding is id 0, which also occurs inside."""
    generator = torch.Generator().manual_seed(3)
    rows, width = 40, 8
    ids = torch.randint(0, 3, (2, rows, width), generator=generator)
    lengths = torch.randint(1, width + 1, (2, rows), generator=generator)
    for row in range(rows):
        common = torch.randint(0, 7, (), generator=generator)
        ids[1, row, :common] = ids[0, row, :common]
        for side in range(2):
            ids[side, row, lengths[side, row] :] = 0
    ids[1, 0], lengths[1, 0] = ids[0, 0], lengths[0, 0]  # a row that never differs
    values = 2 * torch.randn(2, rows, width, generator=generator)
    weights = torch.randint(0, 3, (rows,), generator=generator).float()
    weights[0] = 1
    return {
        "chosen_values": values[0],
        "rejected_values": values[1],
        "chosen_ids": ids[0],
        "rejected_ids": ids[1],
        "chosen_lengths": lengths[0],
        "rejected_lengths": lengths[1],
        "weights": weights,
    }


def slow_pair_loss(c, r, chosen_ids, rejected_ids, chosen_length, rejected_length) -> float:
    chosen_row, rejected_row = list(chosen_ids[:chosen_length]), list(rejected_ids[:rejected_length])
    end = max(chosen_length, rejected_length)
    start = next((t for t in range(end) if chosen_row[t : t + 1] != rejected_row[t : t + 1]), None)
    if start is None:
        return LOG2
    return sum(log_loss(c[t] - r[t]) for t in range(start, end)) / (end - start)


def one_pair(chosen_ids, rejected_ids, chosen_length, rejected_length, chosen_values) -> tuple[float, list[float]]:
    """Loss and gradient of the chosen values for one pair of weight 1 whose rejected values are all zero."""
    values = torch.tensor([chosen_values], requires_grad=True)
    loss = per_token_loss(
        values,
        torch.zeros_like(values),
        torch.tensor([chosen_ids]),
        torch.tensor([rejected_ids]),
        torch.tensor([chosen_length]),
        torch.tensor([rejected_length]),
        torch.ones(1),
    )
    return loss.item(), gradient(loss, values)[0].tolist()


def test_per_token_loss_by_hand():
    # The rows differ from t = 1 on; the longer one ends at 3. Margins ln 3 and 0: (ln 4/3 + ln 2) / 2.
    loss, gradient = one_pair([5, 6, 7, 0], [5, 8, 0, 0], 3, 2, [9.0, math.log(3), 0.0, 9.0])
    assert loss == pytest.approx((math.log(4 / 3) + LOG2) / 2)
    # -sigmoid(-ln 3) / 2 = -1/8 and -sigmoid(0) / 2 = -1/4; nothing before the difference or after the end.
    assert gradient == pytest.approx([0, -1 / 8, -1 / 4, 0])


def test_an_answer_that_continues_the_other_differs_where_the_other_ends():
    # Padding is the id 7, and the longer row's real token at t = 2 is 7 too: ids alone would see no difference.
    loss, gradient = one_pair([5, 6, 7, 7], [5, 6, 7, 7], 3, 2, [9.0, 9.0, math.log(3), 9.0])
    assert loss == pytest.approx(math.log(4 / 3))
    assert gradient == pytest.approx([0, 0, -1 / 4, 0])


def test_rows_that_never_differ_count_log_2_without_gradient():
    loss, gradient = one_pair([5, 6, 0], [5, 6, 0], 2, 2, [1.0, 2.0, 3.0])
    assert loss == pytest.approx(LOG2)
    assert gradient == [0, 0, 0]


def test_rows_may_differ_at_the_first_token():
    # DeepSpeed-Chat asserts that this does not happen, which fails for tokenizers without a BOS.
    loss, gradient = one_pair([5], [6], 1, 1, [math.log(3)])
    assert loss == pytest.approx(math.log(4 / 3))
    assert gradient == pytest.approx([-1 / 4])


def test_per_token_loss_equals_a_slow_loop():
    batch = random_pairs()
    *rows, weights = (tensor.tolist() for tensor in batch.values())
    expected = sum(w * slow_pair_loss(*row) for *row, w in zip(*rows, weights, strict=True))
    assert per_token_loss(**batch).item() == pytest.approx(expected, rel=1e-6)


def test_per_token_rows_of_weight_zero_change_nothing():
    batch = random_pairs()
    expected = per_token_loss(**batch).item()
    fills = (batch["weights"] == 0).unsqueeze(1)
    garbage = torch.where(fills, math.nan, batch["chosen_values"]).requires_grad_()
    loss = per_token_loss(**(batch | {"chosen_values": garbage}))
    assert fills.any()
    assert loss.item() == expected
    assert gradient(loss, garbage).isfinite().all()


# --- both ---


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 4], [2, 0, 5]])
def test_pair_loss_is_a_sum_over_any_split(sizes):
    chosen, rejected, weights, margins = random_scores()
    whole = bradley_terry_loss(chosen, rejected, weights, margins=margins, centering_coef=0.1)
    parts = zip(*(tensor.split(sizes) for tensor in (chosen, rejected, weights, margins)), strict=True)
    summed = sum(bradley_terry_loss(c, r, w, margins=m, centering_coef=0.1) for c, r, w, m in parts)
    torch.testing.assert_close(summed, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sizes", [[40], [1] * 40, [13, 27]])
def test_per_token_loss_is_a_sum_over_any_split_with_its_gradient(sizes):
    batch = random_pairs()
    leaf = batch["chosen_values"].requires_grad_()
    whole = per_token_loss(**batch)
    splits = zip(*(tensor.split(sizes) for tensor in batch.values()), strict=True)
    summed = torch.stack([per_token_loss(*part) for part in splits]).sum()
    torch.testing.assert_close(summed, whole, rtol=1e-6, atol=0)
    gradients = [gradient(loss, leaf) for loss in (summed, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)
