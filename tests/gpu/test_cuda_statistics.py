"""The kernels of the head's log-probabilities, compiled: against torch in fp32, with gradients, in 16 bits and fp32."""

import pytest
import torch

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
    weights = torch.randn(300, device="cuda")
    scaling = LogitScaling(temperature=0.7)
    actual, gradients = [], []
    for compute in (token_statistics, plain_statistics):
        leaf = given.clone().requires_grad_()
        logits = leaf * 1.0  # the backward kernel writes over it
        log_probs, entropy = compute(logits, targets, scaling, with_entropy=True)
        (log_probs * weights).sum().backward()
        actual.append((log_probs.detach(), entropy))
        gradients.append(leaf.grad.float())
    for mine, theirs in zip(*actual, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert error < {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
