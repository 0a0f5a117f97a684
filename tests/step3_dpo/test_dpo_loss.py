"""The losses of DPO and IPO by hand, against a slow loop, and against TRL's trainer."""

import importlib.util
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from step3_dpo.batches import ResponseBatch
from step3_dpo.config import DPOConfig
from step3_dpo.loss import dpo_loss, ipo_loss
from step3_dpo.objective import measured

WEIGHTS = torch.tensor([1.0, 1, 0.5, 1, 0, 2, 0])


def log_ratios(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = 3 * torch.randn(2, 7, generator=generator)
    return chosen, rejected


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_by_hand():
    # beta d = ln 3 and -ln 3: sigmoid 3/4 and 1/4; weights 1 and 2.
    chosen, rejected, weights = (
        torch.tensor([math.log(3), 0.0]),
        torch.tensor([0.0, math.log(9)]),
        torch.tensor([1.0, 2]),
    )
    loss = dpo_loss(chosen * 2, rejected, weights, beta=0.5)
    assert loss.item() == pytest.approx(math.log(4 / 3) + 2 * math.log(4))
    # d - 1 / (2 * 0.25) = 1 - 2 and -3 - 2.
    loss = ipo_loss(torch.tensor([1.5, 0.0]), torch.tensor([0.5, 3.0]), weights, beta=0.25)
    assert loss.item() == pytest.approx(1 + 2 * 25)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_equals_a_slow_loop(smoothing):
    chosen, rejected = log_ratios()
    expected = 0.0
    for c, r, w in zip(chosen.tolist(), rejected.tolist(), WEIGHTS.tolist(), strict=True):
        d = 0.3 * (c - r)
        expected -= w * ((1 - smoothing) * log_sigmoid(d) + smoothing * log_sigmoid(-d))
    loss = dpo_loss(chosen, rejected, WEIGHTS, beta=0.3, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("of_pair", [dpo_loss, ipo_loss])
def test_a_pair_that_fills_the_batch_changes_nothing(of_pair):
    chosen, rejected = log_ratios()
    chosen[4], rejected[6] = math.nan, math.inf
    chosen.requires_grad_(True)
    loss = of_pair(chosen, rejected, WEIGHTS, beta=0.3)
    loss.backward()
    real = WEIGHTS > 0
    assert loss.item() == pytest.approx(of_pair(chosen[real], rejected[real], WEIGHTS[real], beta=0.3).item())
    assert chosen.grad is not None and chosen.grad[~real].eq(0).all() and chosen.grad[real].ne(0).all()


@pytest.mark.parametrize(("kind", "method"), [("sigmoid", "dpo"), ("ipo", "ipo")])
def test_loss_and_gradient_are_those_of_trl(kind, method):
    """TRL's method on a stand-in of its trainer: both get the log-probabilities of the same tokens."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed, whose trainer these numbers are compared with")
    from trl import DPOTrainer

    generator = torch.Generator().manual_seed(1)
    policy = (-torch.rand(6, 9, generator=generator)).requires_grad_(True)
    reference = -torch.rand(6, 9, generator=generator)
    mask = torch.zeros(6, 10, dtype=torch.bool)
    for row, (start, end) in enumerate([(2, 10), (3, 7), (4, 5), (2, 6), (3, 10), (4, 9)]):
        mask[row, start:end] = True
    counted = mask[:, 1:]
    chosen_ref, rejected_ref = (reference * counted).sum(1).chunk(2)
    zeros = torch.zeros(6, 9)
    # TRL's head gives 0 where a label is masked.
    outputs = SimpleNamespace(log_probs=policy * counted, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, beta=0.3, ld_alpha=None, label_smoothing=0.0,
        aux_loss_enabled=False, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[kind],
        loss_weights=[1.0], use_weighting=False, _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    inputs = {"input_ids": torch.ones(6, 10, dtype=torch.long), "completion_mask": mask.long()}
    inputs |= {"ref_chosen_logps": chosen_ref, "ref_rejected_logps": rejected_ref}
    theirs = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    (expected,) = torch.autograd.grad(theirs, policy)

    ratios = (policy * counted).sum(1) - torch.cat([chosen_ref, rejected_ref])
    if method == "ipo":
        ratios = ratios / counted.sum(1)
    loss_of = dpo_loss if method == "dpo" else ipo_loss
    ours = loss_of(*ratios.chunk(2), torch.ones(3), beta=0.3) / 3
    (found,) = torch.autograd.grad(ours, policy)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["dpo", "ipo", "kto"])
@pytest.mark.parametrize(
    ("dtype", "difference", "won"),
    [
        (torch.float32, 0.0, 0.5),
        (torch.float32, 1e-5, 0.5),  # nats, of a sum of -40: four units in its last place
        (torch.float32, 1e-3, 1.0),
        (torch.bfloat16, 0.05, 0.5),  # of 16 tokens, the third place of each of which is rounded
        (torch.bfloat16, 0.5, 1.0),
    ],
)
def test_a_tie_within_rounding_is_half_a_win(method: str, dtype: torch.dtype, difference: float, won: float):
    """A pair by a difference and one by its opposite; of KTO good responses alone."""
    labels = torch.tensor([True, True, method == "kto", method == "kto"])
    batch = ResponseBatch(
        *[torch.zeros(4, 0, dtype=torch.int64)] * 3, lengths=torch.full((4,), 20), prompt_lengths=torch.full((4,), 4),
        labels=labels, reference=torch.full((4,), -40.0), weights=torch.ones(4),
        shared=None,
    )  # fmt: skip
    ratios = torch.tensor([difference, -difference, 0.0, 0.0])
    eps = torch.finfo(dtype).eps
    for signs, wins in ((1, won), (-1, 1 - won)):
        counts = torch.tensor([1.0, 0.0, 1.0, 0.0])
        one = ResponseBatch(**{name: getattr(batch, name) for name in batch.__slots__} | {"weights": counts})
        found, _ = measured(DPOConfig(method=method), signs * ratios, one, 0.0, eps)
        assert (found[1] / found[2]).item() == (wins if method != "kto" else (wins + 0.5) / 2)
