import math
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from support.ragged import B, T, every_token, gradient, ragged_mask, random_tokens

from step3_ppo.mathematics.estimators import KlEstimator, kl_estimate, next_kl_coef
from step3_ppo.mathematics.losses import kl_loss


def categorical(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy over 5 tokens, to be differentiated, and log-probabilities of a reference."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, generator=generator).requires_grad_()
    return logits, torch.randn(5, generator=generator).log_softmax(0)


def exact_kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum()


def expected_gradient(logits: torch.Tensor, loss_of_token: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """E_{a ~ policy}[grad loss(a)], by enumeration: the sampling itself is not differentiated."""
    total = torch.zeros_like(logits)
    for token in range(len(logits)):
        log_probs = logits.log_softmax(0)
        loss = loss_of_token(log_probs[token].view(1, 1), token)
        total += log_probs[token].exp().detach() * gradient(loss, logits)
    return total


def test_kl_estimators_by_hand():
    # d = log p - log ref = ln 2: k1 = ln 2, k2 = (ln 2)**2 / 2, k3 = 1/2 - 1 + ln 2; and with d = -ln 2 the mirror.
    log_probs, ref = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    ln2 = math.log(2)
    answers: dict[KlEstimator, list[float]] = {"k1": [ln2, -ln2], "k2": [ln2**2 / 2] * 2, "k3": [-0.5 + ln2, 1 - ln2]}
    for estimator, expected in answers.items():
        estimate = kl_estimate(log_probs, ref, estimator=estimator)
        torch.testing.assert_close(estimate, torch.tensor([expected]), rtol=1e-6, atol=0)


def test_kl_estimators_equal_numpy():
    log_probs, ref = random_tokens(0, 2, every_token(B, T))
    d = log_probs.double().numpy() - ref.double().numpy()
    answers: dict[KlEstimator, np.ndarray] = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
    for estimator, expected in answers.items():
        np.testing.assert_allclose(kl_estimate(log_probs, ref, estimator=estimator), expected, rtol=1e-5, atol=1e-6)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    logits, ref = categorical()
    log_probs = logits.detach().log_softmax(0)

    def mean_of(estimator: KlEstimator) -> float:
        return (log_probs.exp() * kl_estimate(log_probs[None], ref[None], estimator=estimator)).sum().item()

    exact = exact_kl(log_probs, ref).item()
    assert mean_of("k1") == pytest.approx(exact, rel=1e-5)
    assert mean_of("k3") == pytest.approx(exact, rel=1e-5)
    assert mean_of("k2") != pytest.approx(exact, rel=0.05)


def test_k3_of_a_tiny_difference_keeps_its_digits():
    # k3 = d**2 / 2 - d**3 / 6 + ...: with d = 0.0007, exp(-d) - 1 + d in fp32 would be off by 1.4 %.
    d = 0.0007
    estimate = kl_estimate(torch.tensor([[d]]), torch.zeros(1, 1), estimator="k3").item()
    assert estimate == pytest.approx(d**2 / 2 - d**3 / 6, rel=1e-3)


def test_k3_of_an_extreme_ratio_stays_finite():
    log_probs = torch.tensor([[-1000.0, 0.0]], requires_grad=True)
    estimate = kl_estimate(log_probs, torch.tensor([[0.0, -1000.0]]), estimator="k3")
    assert estimate[0, 0].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert estimate[0, 1].item() == 999
    assert gradient(estimate.sum(), log_probs).tolist() == [[0, 1]]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_gradient_is_the_gradient_of_the_divergence(estimator):
    logits, ref = categorical()

    def loss_of_token(log_prob: torch.Tensor, token: int) -> torch.Tensor:
        return kl_loss(log_prob, ref[token].view(1, 1), every_token(1, 1), estimator=estimator)

    expected = gradient(exact_kl(logits.log_softmax(0), ref), logits)
    torch.testing.assert_close(expected_gradient(logits, loss_of_token), expected, rtol=1e-5, atol=1e-6)


def test_why_plain_k1_and_k3_are_no_losses():
    """What the docstring of `kl_loss` says of them: k1 has no gradient, k3 has that of KL(ref || policy)."""
    logits, ref = categorical()

    def of_estimator(estimator: KlEstimator) -> torch.Tensor:
        return expected_gradient(logits, lambda lp, a: kl_estimate(lp, ref[a].view(1, 1), estimator=estimator).sum())

    reverse = gradient(exact_kl(ref, logits.log_softmax(0)), logits)
    torch.testing.assert_close(of_estimator("k1"), torch.zeros(5), rtol=0, atol=1e-6)
    torch.testing.assert_close(of_estimator("k3"), reverse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_loss_value_is_the_estimator_over_the_response(estimator):
    mask = ragged_mask(0)
    log_probs, ref = random_tokens(0, 2, mask)
    log_probs.requires_grad_()
    loss = kl_loss(log_probs, ref, mask, estimator=estimator)
    expected = kl_estimate(log_probs[mask][None], ref[mask][None], estimator=estimator).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(loss, log_probs), torch.where(mask, log_probs - ref, 0))


def test_kl_loss_of_an_extreme_ratio_has_a_finite_gradient():
    log_probs = torch.tensor([[-1000.0, 0.0]], requires_grad=True)
    loss = kl_loss(log_probs, torch.tensor([[0.0, -1000.0]]), every_token(1, 2), estimator="k3")
    assert loss.isfinite()
    assert gradient(loss, log_probs).tolist() == [[-1000, 1000]]


def test_estimators_that_cannot_be_used_are_refused():
    one, unknown = torch.zeros(1, 1), cast(KlEstimator, "k4")
    with pytest.raises(ValueError, match="k1 has no gradient"):
        kl_loss(one, one, every_token(1, 1), estimator="k1")
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(one, one, estimator=unknown)
    with pytest.raises(ValueError, match="'k4'"):
        kl_loss(one, one, every_token(1, 1), estimator=unknown)


@pytest.mark.parametrize(
    ("observed_kl", "expected"),
    [
        (6.6, 0.1 * (1 + 0.1 * 64 / 1000)),  # 10 % above the target
        (5.4, 0.1 * (1 - 0.1 * 64 / 1000)),  # 10 % below
        (600.0, 0.1 * (1 + 0.2 * 64 / 1000)),  # far above: the error is clipped to 20 %
        (-3.0, 0.1 * (1 - 0.2 * 64 / 1000)),
        (6.0, 0.1),
    ],
)
def test_adaptive_kl_by_hand(observed_kl, expected):
    assert next_kl_coef(0.1, observed_kl, target=6.0, horizon=1000, num_sequences=64) == pytest.approx(expected)


def test_adaptive_kl_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        next_kl_coef(0.1, math.nan, target=6.0, horizon=1000, num_sequences=64)
