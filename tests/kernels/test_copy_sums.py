"""Sums of copies' gradients: the kernel gives what torch adds up in fp32.

On a CPU the Triton kernel runs in triton's interpreter; tests/gpu compares 16 bits.
"""

import pytest
import torch
from support.decode_models import DEVICE

from pipeline.models.forward.shared_prompts import Copies

pytest.importorskip("triton")


@pytest.mark.parametrize("columns", [1, 64, 1100])
def test_sums_of_copies(columns):
    """Tokens without a copy, with one, and with nine; columns of less than a block, of one and of more."""
    from pipeline.kernels.copy_sums import sum_copies

    draw = torch.Generator().manual_seed(1)
    index = torch.cat([torch.arange(5), torch.full((8,), 3), torch.tensor([6, 6])])[torch.randperm(15, generator=draw)]
    copies = Copies.of(index, 7, index[:0], torch.zeros(2, dtype=torch.int32))
    gradient = torch.randn(15, columns, generator=draw)
    wanted = torch.zeros(7, columns).index_add_(0, index, gradient)
    found = sum_copies(gradient.to(DEVICE), copies.order.to(DEVICE), copies.starts.to(DEVICE)).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert (found[5] == 0).all()
