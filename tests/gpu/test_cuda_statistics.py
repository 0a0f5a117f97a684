"""The kernels of the head's log-probabilities, compiled: against torch in fp32, with gradients, in 16 bits and fp32."""

from collections.abc import Callable

import pytest
import torch
from support.decode_models import DEVICE

from pipeline.kernels.token_draw import Slots, draw_tokens, padded_eos
from pipeline.kernels.token_statistics import LogitScaling, plain_statistics, token_statistics

pytestmark = pytest.mark.gpu

# OPT's vocabulary, GPT-2's (rows that are not aligned), and one within a block.
VOCABULARIES = (50272, 50257, 301)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", VOCABULARIES)
def test_compiled_kernels_equal_torch(num_tokens, dtype):
    torch.manual_seed(0)
    given = (3 * torch.randn(300, num_tokens, device="cuda")).to(dtype)
    targets = torch.randint(num_tokens, (300,), device="cuda")
    weights, others = torch.randn(2, 300, device="cuda")
    scaling = LogitScaling(temperature=0.7)
    actual, gradients = [], []
    for compute in (token_statistics, plain_statistics):
        leaf = given.clone().requires_grad_()
        logits = leaf * 1.0  # the backward kernel writes over it
        log_probs, entropy = compute(logits, targets, scaling, with_entropy=True)
        (log_probs * weights + entropy * others).sum().backward()
        actual.append((log_probs.detach(), entropy.detach()))
        gradients.append(leaf.grad.float())
    for mine, theirs in zip(*actual, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert error < {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]


# --- a large vocabulary: no second copy of the logits ---

LARGE = (1024, 262_144)  # half a GiB in 16 bits


def bytes_beside(logits: torch.Tensor, work: Callable[[], object]) -> float:
    """Return the most memory that `work` takes beside what is allocated already, as a share of the logits' bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / logits.nbytes


def test_log_probabilities_of_256k_tokens_copy_no_logits():
    """Forward and backward: the gradient takes the place of the logits."""
    head = torch.randn(LARGE[1], 16, device="cuda", dtype=torch.bfloat16).requires_grad_()
    logits = torch.randn(LARGE[0], 16, device="cuda", dtype=torch.bfloat16) @ head.T
    targets = torch.randint(LARGE[1], LARGE[:1], device="cuda")

    def work() -> None:
        log_probs, _ = token_statistics(logits, targets, LogitScaling(temperature=0.7), with_entropy=True)
        log_probs.sum().backward()

    assert bytes_beside(logits, work) < 0.1
    assert head.grad is not None and bool(head.grad.isfinite().all())


def test_draws_from_256k_tokens_copy_no_logits():
    logits = torch.randn(LARGE, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(LARGE[0], device="cuda")
    slots, eos = Slots.empty(LARGE[0], 1, DEVICE), padded_eos(frozenset(), DEVICE)
    slots.active.fill_(1)
    slots.temperature.fill_(1.0)
    slots.top_p.fill_(1.0)
    uniforms = torch.rand(LARGE[0], device="cuda", dtype=torch.float64)

    def work() -> None:
        draw_tokens(logits, rows, rows, slots, uniforms=uniforms, eos=eos, num_known=LARGE[1])

    assert bytes_beside(logits, work) < 0.1
    assert slots.written.unique().numel() > 500
