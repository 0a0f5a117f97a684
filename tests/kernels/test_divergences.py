"""Exact divergences of two models' distributions: by a slow loop, by TRL, and from hidden states piece by piece."""

import importlib.util
import math
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from pipeline.kernels import token_statistics
from pipeline.kernels.divergences import divergences
from pipeline.models.forward import causal_lm
from pipeline.models.forward.causal_lm import CausalLM, Comparison

KINDS = ("reverse_kl", "forward_kl", "jsd")
ROWS, LENGTH, TEMPERATURE = 3, 9, 0.7
VOCABULARY, PADDED, HIDDEN = 100, 128, (32, 48)


def by_loop(p: list[float], q: list[float], kind: str) -> float:
    """The definitions, over the vocabulary, in the precision of Python's numbers; p and q are probabilities."""
    if kind == "jsd":
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        return (by_loop(p, middle, "reverse_kl") + by_loop(q, middle, "reverse_kl")) / 2
    first, second = (p, q) if kind == "reverse_kl" else (q, p)
    return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_is_its_definition_and_its_gradient_is_that_of_finite_differences(kind):
    logits, other = 2 * torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits.requires_grad_(True)
    found = divergences(torch.log_softmax(logits, -1), torch.log_softmax(other, -1), kind=kind)
    pairs = zip(torch.softmax(logits, -1).tolist(), torch.softmax(other, -1).tolist(), strict=True)
    assert found.tolist() == pytest.approx([by_loop(p, q, kind) for p, q in pairs], rel=1e-9)
    assert (found > 0).all() and (kind != "jsd" or (found < math.log(2)).all())

    def total(one: torch.Tensor) -> torch.Tensor:
        return divergences(torch.log_softmax(one, -1), torch.log_softmax(other, -1), kind=kind).sum()

    assert torch.autograd.gradcheck(total, (logits,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_one_model_excludes_adds_no_nan(kind):
    """A probability of 0 adds 0 to the sum; where the other model has none, the divergence is beyond any bound."""
    logits = torch.tensor([[0.3, -math.inf, 1.0], [0.2, 0.1, 0.4]], requires_grad=True)
    other = torch.tensor([[0.1, -math.inf, 0.2], [-0.5, 0.3, 0.1]])
    found = divergences(torch.log_softmax(logits, -1), torch.log_softmax(other, -1), kind=kind)
    p, q = (torch.softmax(one, -1)[0].tolist() for one in (logits, other))
    assert found[0].item() == pytest.approx(by_loop([p[0], p[2]], [q[0], q[2]], kind), rel=1e-5)
    found.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed, whose losses these are")
@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("jsd", 0.5), ("reverse_kl", 1.0)])
def test_it_is_the_loss_of_trl(kind, beta):
    """Of GKDTrainer, on the same logits, divided by the same temperature."""
    from trl.experimental.gkd import GKDTrainer

    logits, other = torch.randn(2, 2, 6, 11, generator=torch.Generator().manual_seed(2))
    mine, theirs = logits.clone().requires_grad_(True), logits.clone().requires_grad_(True)
    expected = GKDTrainer.generalized_jsd_loss(theirs, other, beta=beta, temperature=TEMPERATURE, reduction="sum")
    scaled = [torch.log_softmax(one.flatten(0, 1) / TEMPERATURE, -1) for one in (mine, other)]
    found = divergences(*scaled, kind=kind).sum()
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def model_of(seed: int, **changes: Any) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(AutoModelForCausalLM.from_config(tiny_config("llama", **changes))).eval()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    """Rows of different lengths; responses begin at different positions, and one row has no selected token."""
    generator = torch.Generator().manual_seed(3)
    lengths, starts = torch.tensor([9, 6, 4]), torch.tensor([3, 1, 8])
    positions = torch.arange(LENGTH)
    mask = positions < lengths.unsqueeze(1)
    selected = (mask & (positions >= starts.unsqueeze(1)))[:, 1:]
    ids = torch.randint(5, 90, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "selected": selected}


class Largest(TorchDispatchMode):
    """Records the most tokens of any tensor of logits that an operation makes: (tokens, vocabulary)."""

    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            is_logits = isinstance(one, torch.Tensor) and one.dim() == 2 and one.shape[1] in (VOCABULARY, PADDED)
            if is_logits and one.shape[0] not in HIDDEN:  # those are weights
                self.tokens = max(self.tokens, one.shape[0])
        return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("piece", [3, 1000], ids=["pieces", "whole"])
def test_pieces_of_the_tokens_give_value_and_gradient_of_all_logits(inputs, monkeypatch, kind, piece):
    """A policy beside a wider teacher whose head is padded further, against both models' own logits."""
    policy = model_of(4, vocab_size=VOCABULARY, hidden_size=HIDDEN[0])
    teacher = model_of(5, vocab_size=PADDED, hidden_size=HIDDEN[1])
    monkeypatch.setattr(causal_lm, "COMPARED_BYTES", piece * VOCABULARY * 4)
    calls = []
    policy.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        hidden = teacher(**inputs, hidden_only=True)
    with Largest() as seen:
        comparison = Comparison(kind, hidden, teacher, LENGTH - 1)
        output = policy(**inputs, temperature=TEMPERATURE, with_entropy=True, comparison=comparison)
        weights = torch.rand(output.divergence.shape, generator=torch.Generator().manual_seed(6))
        (output.divergence * weights + 0.1 * output.log_probs).sum().backward()
    if piece == 3:
        pieces = ROWS * (LENGTH - 1) // piece
        assert seen.tokens <= piece and len(calls) == 2 * pieces, "each piece is made again for the backward pass"
    else:
        assert seen.tokens == inputs["selected"].sum() and len(calls) == 1
    found = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    own, other = (
        torch.log_softmax(model.model(inputs["input_ids"]).logits[:, :-1, :VOCABULARY] / TEMPERATURE, -1)
        for model in (policy, teacher)
    )
    pairs = zip(own[inputs["selected"]].exp().tolist(), other[inputs["selected"]].exp().tolist(), strict=True)
    by_hand = torch.zeros(inputs["selected"].shape)
    by_hand[inputs["selected"]] = torch.tensor([by_loop(p, q, kind) for p, q in pairs])
    torch.testing.assert_close(output.divergence, by_hand, rtol=1e-4, atol=1e-6)
    chosen = own.gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
    plain = divergences(own.flatten(0, 1), other.detach().flatten(0, 1), kind=kind).view_as(by_hand)
    torch.where(inputs["selected"], plain * weights + 0.1 * chosen, 0.0).sum().backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_model_scales_its_own_logits_and_both_are_compared_in_fp32(inputs, monkeypatch, dtype):
    """Cohere multiplies, Gemma 2 caps; in 16 bits the softmax of V logits is that of their values in fp32."""
    policy, teacher = (model_of(seed, vocab_size=VOCABULARY).to(dtype) for seed in (4, 5))
    monkeypatch.setattr(token_statistics, "declared", lambda config, name: getattr(config, name, None))
    policy.config.final_logit_softcapping, teacher.config.logit_scale = 0.8, 3.0
    with torch.no_grad():
        hidden = teacher(**inputs, hidden_only=True)
        comparison = Comparison("reverse_kl", hidden, teacher, LENGTH - 1)
        output = policy(**inputs, temperature=TEMPERATURE, comparison=comparison)
        own, other = (model.model(inputs["input_ids"]).logits[:, :-1].double() for model in (policy, teacher))
    capped = torch.log_softmax(0.8 * torch.tanh(own / 0.8) / TEMPERATURE, -1)
    scaled = torch.log_softmax(3.0 * other / TEMPERATURE, -1)
    expected = (capped.exp() * (capped - scaled)).sum(-1)[inputs["selected"]]
    found = output.divergence[inputs["selected"]]
    assert found.dtype == torch.float32 and (expected > 0.01).all()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-6)


def test_without_a_comparison_nothing_is_compared(inputs):
    output = model_of(4)(**inputs)
    assert output.divergence is None and output.entropy is None
