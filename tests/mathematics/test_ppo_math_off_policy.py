"""Weights of tokens that another policy drew: by a slow loop, and by enumeration of all that it could have drawn."""

import itertools
import math

import numpy as np
import pytest
import torch
from support.ragged import every_token, gradient, ragged_mask, random_tokens, sequences

from pipeline.tensor_ops import lengths_to_mask
from step3_ppo.mathematics.losses import policy_loss
from step3_ppo.mathematics.off_policy import WeightKind, difference_metrics, importance_weights, weight_shares

NAN = math.nan
KINDS: list[WeightKind] = [
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]  # fmt: skip


def test_weights_by_hand():
    # Ratios 4, 1/2, 1 of a row: product 2, geometric mean 2^(1/3) = 1.26. Row 1: 1/8.
    old = torch.tensor([[4.0, 0.5, 1.0], [0.125, NAN, NAN]]).log()
    mu, mask = torch.where(old.isnan(), NAN, 0.0), lengths_to_mask(torch.tensor([3, 1]), 3)
    by_hand: list[tuple[WeightKind, float, float, list[list[float]]]] = [
        ("token_truncate", 3.0, 0.0, [[3, 0.5, 1], [0.125, 0, 0]]),
        ("token_mask", 3.0, 0.4, [[0, 0.5, 1], [0, 0, 0]]),
        ("token_mask", 5.0, 0.0, [[4, 0.5, 1], [0.125, 0, 0]]),
        ("sequence_truncate", 1.5, 0.0, [[1.5, 1.5, 1.5], [0.125, 0, 0]]),
        ("sequence_mask", 3.0, 0.2, [[2, 2, 2], [0, 0, 0]]),
        ("sequence_mask", 1.5, 0.1, [[0, 0, 0], [0.125, 0, 0]]),
        ("geometric_mask", 1.3, 0.2, [[1, 1, 1], [0, 0, 0]]),
        ("geometric_mask", 1.2, 0.1, [[0, 0, 0], [1, 0, 0]]),
    ]
    for kind, cap, low, expected in by_hand:
        weights = importance_weights(old, mu, mask, kind=kind, cap=cap, low=low)
        torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_weights_equal_a_slow_loop(seed, kind):
    mask = ragged_mask(seed)
    old, mu = random_tokens(seed, 2, mask)
    old.requires_grad_()
    weights = importance_weights(old, mu, mask, kind=kind, cap=1.7, low=0.6)
    assert not weights.requires_grad and (weights[~mask] == 0).all()
    for new, before, found in sequences(mask, old.detach(), mu, weights):
        tokens = [math.exp(n - b) for n, b in zip(new, before, strict=True)]
        product = math.prod(tokens)
        of_row = product ** (1 / max(len(tokens), 1)) if kind == "geometric_mask" else product
        expected = []
        for token in tokens:
            ratio = token if kind in ("token_truncate", "token_mask") else of_row
            if kind in ("token_truncate", "sequence_truncate"):
                weight = min(ratio, 1.7)
            else:
                weight = (1 if kind == "geometric_mask" else ratio) if 0.6 <= ratio <= 1.7 else 0
            expected.append(weight)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_samplers_own_policy_weighs_one(kind):
    mask = ragged_mask(1)
    (old,) = random_tokens(1, 1, mask)
    weights = importance_weights(old, old.clone(), mask, kind=kind, cap=2.0, low=0.5)
    assert weights.equal(mask.float())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_outside_the_mask_and_the_order_of_rows_change_nothing(kind):
    mask = ragged_mask(2)
    old, mu = random_tokens(2, 2, mask)
    settings = {"kind": kind, "cap": 1.5, "low": 0.5}
    weights = importance_weights(old, mu, mask, **settings)
    filled = [torch.where(mask, tensor, number) for tensor, number in ((old, 7.0), (mu, -math.inf))]
    assert importance_weights(*filled, mask, **settings).equal(weights)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for part in order.split([1, 3, 2]):
        assert importance_weights(old[part], mu[part], mask[part], **settings).equal(weights[part])


def test_an_extreme_difference_stays_finite():
    old, mu = torch.tensor([[1000.0, -1000.0], [900.0, 900.0]]), torch.zeros(2, 2)
    for kind in KINDS:
        assert importance_weights(old, mu, every_token(2, 2), kind=kind, cap=math.inf).isfinite().all()
    assert difference_metrics(old, mu, every_token(2, 2)).kl.isfinite()


# --- metrics ---


def test_metrics_by_hand():
    # Ratios 2, 1/8, 4 of three tokens: |log| ln 2, 3 ln 2, 2 ln 2; k3 of KL(mu || old) is w - 1 - log w; effective
    # share 6.125^2 / (3 * (4 + 1/64 + 16)).
    old = torch.tensor([[2.0, 0.125, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]]).log()
    mu, mask = torch.where(old.isnan(), NAN, 0.0), lengths_to_mask(torch.tensor([2, 1, 0]), 3)
    found = difference_metrics(old, mu, mask)
    ln2 = math.log(2)
    k3 = [1 - ln2, -0.875 + 3 * ln2, 3 - 2 * ln2]
    expected = (2 * ln2, 3 * ln2, sum(k3) / 3, 6.125**2 / (3 * (20 + 1 / 64)))
    assert [each.item() for each in found] == pytest.approx(expected)
    nothing = difference_metrics(old, mu, torch.zeros_like(mask))
    assert [each.item() for each in nothing] == [0, 0, 0, 0]


def test_the_divergence_is_that_of_the_sampler_from_the_trainer():
    """By enumeration of the sampler's tokens; the other direction is another number."""
    generator = torch.Generator().manual_seed(0)
    old, mu = torch.randn(2, 5, generator=generator).log_softmax(1)
    exact = (mu.exp() * (mu - old)).sum().item()
    each = [difference_metrics(old[a].view(1, 1), mu[a].view(1, 1), every_token(1, 1)).kl.item() for a in range(5)]
    assert np.dot(mu.exp(), each) == pytest.approx(exact, rel=1e-5)
    assert (old.exp() * (old - mu)).sum().item() != pytest.approx(exact, rel=0.05)


def test_shares_of_weights_by_hand():
    # Cap 1.3, which fp32 does not hold exactly: 3 of 5 tokens cut or 0; one of two rows is rejected, one has no token.
    mask = lengths_to_mask(torch.tensor([3, 2, 0]), 3)
    weights = torch.tensor([[1.29, 1.3, 1.0], [0.0, 0.0, NAN], [NAN, NAN, NAN]])
    shares = weight_shares(weights, mask, cap=1.3)
    assert (shares.clipped.item(), shares.rejected.item()) == (pytest.approx(3 / 5), 1 / 2)
    assert [share.item() for share in weight_shares(weights, torch.zeros_like(mask), cap=1.3)] == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_shares_count_what_the_weights_have_cut(kind):
    mask = ragged_mask(4)
    old, mu = random_tokens(4, 2, mask)
    free = importance_weights(old, mu, mask, kind=kind, cap=1e6)
    weights = importance_weights(old, mu, mask, kind=kind, cap=1.3, low=0.8)
    shares = weight_shares(weights, mask, cap=1.3)
    cut = (weights != free)[mask].float().mean().item()
    assert shares.clipped.item() == pytest.approx(cut) and cut > 0
    rows = [row for row in range(len(mask)) if mask[row].any()]
    rejected = np.mean([float((weights[row][mask[row]] == 0).all()) for row in rows])
    assert shares.rejected.item() == pytest.approx(rejected)


# --- expected gradients, of everything that could have been drawn ---


class TwoTokens:
    """A policy over 3 tokens, two of which make a response; the second depends on the first. Rewards are of the pair.

    logits: (4, 3): of the first token, and of the second after each first one.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(4, 3, generator=generator).requires_grad_()
        self.sampler = (self.logits + 0.7 * torch.randn(4, 3, generator=generator)).detach()
        self.rewards = torch.randn(3, 3, generator=generator)

    @staticmethod
    def log_probs(logits: torch.Tensor, first: int, second: int) -> torch.Tensor:
        """(1, 2)."""
        table = logits.log_softmax(1)
        return torch.stack([table[0, first], table[1 + first, second]]).unsqueeze(0)

    def exact(self) -> torch.Tensor:
        """Gradient of minus the expected reward, by autograd through the probabilities of all pairs."""
        table = self.logits.log_softmax(1)
        pairs = (table[0].unsqueeze(1) + table[1:]).exp()
        return gradient(-(pairs * self.rewards).sum(), self.logits)

    def expected(
        self, kind: WeightKind | None, cap: float, low: float = 0.0, *, onpolicy: bool = False
    ) -> torch.Tensor:
        """Mean gradient of the policy loss with these weights over all pairs that the sampler may draw."""
        total = torch.zeros_like(self.logits)
        for first, second in itertools.product(range(3), repeat=2):
            new = self.log_probs(self.logits, first, second)
            mu = new.detach() if onpolicy else self.log_probs(self.sampler, first, second)
            mask = every_token(1, 2)
            weights = None
            if kind is not None:
                weights = importance_weights(new, mu, mask, kind=kind, cap=cap, low=low)
            advantages = self.rewards[first, second].expand(1, 2)
            loss, _ = policy_loss(new, new.detach(), advantages, mask, policy_clip=0.2, weights=weights)
            total += mu.sum().exp() * gradient(loss, self.logits)
        return total

    def by_hand(self, cap: float, *, whole: bool) -> torch.Tensor:
        """The same mean without autograd: sum over pairs of mu * weight * reward * (indicator - probability)."""
        policy, sampler = self.logits.detach().softmax(1).numpy(), self.sampler.softmax(1).numpy()
        total = np.zeros((4, 3))
        for first, second in itertools.product(range(3), repeat=2):
            rows, tokens = (0, 1 + first), (first, second)
            ratios = [policy[row, token] / sampler[row, token] for row, token in zip(rows, tokens, strict=True)]
            probability = sampler[0, first] * sampler[1 + first, second]
            for row, token, ratio in zip(rows, tokens, ratios, strict=True):
                weight = min(math.prod(ratios) if whole else ratio, cap)
                score = (np.arange(3) == token) - policy[row]
                total[row] -= probability * weight * self.rewards[first, second].item() * score
        return torch.tensor(total, dtype=torch.float32)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("seed", range(3))
def test_the_weight_of_a_sequence_without_a_cap_gives_the_gradient_of_the_policy(seed):
    model = TwoTokens(seed)
    exact = model.exact()
    assert distance(model.expected(None, 0.0, onpolicy=True), exact) < 1e-5
    for kind in ("sequence_truncate", "sequence_mask"):
        assert distance(model.expected(kind, math.inf), exact) < 1e-5
    assert distance(model.expected(None, 0.0), exact) > 0.1  # what is corrected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cap", [math.inf, 1.1])
def test_the_bias_of_capped_weights_and_of_weights_of_tokens_is_that_of_enumeration(seed, cap):
    """A token's weight leaves out the other token of its pair: even without a cap it is no gradient of the policy."""
    model = TwoTokens(seed)
    exact = model.exact()
    for kind, whole in (("token_truncate", False), ("sequence_truncate", True)):
        found, expected = model.expected(kind, cap), model.by_hand(cap, whole=whole)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        biased = not whole or cap < math.inf
        assert (distance(found, exact) > 0.02) == biased


def test_the_weight_of_a_token_is_exact_for_responses_of_one_token():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, generator=generator).requires_grad_()
    sampler, rewards = torch.randn(5, generator=generator).log_softmax(0), torch.randn(5, generator=generator)
    exact = gradient(-(logits.softmax(0) * rewards).sum(), logits)
    means = []
    for cap in (math.inf, 1.2):
        total = torch.zeros(5)
        for token in range(5):
            new, mu = logits.log_softmax(0)[token].view(1, 1), sampler[token].view(1, 1)
            weights = importance_weights(new, mu, every_token(1, 1), kind="token_truncate", cap=cap)
            loss, _ = policy_loss(
                new, new.detach(), rewards[token].view(1, 1), every_token(1, 1), policy_clip=0.2, weights=weights
            )
            total += sampler[token].exp() * gradient(loss, logits)
        means.append(total)
    assert distance(means[0], exact) < 1e-5 and distance(means[1], exact) > 0.05
