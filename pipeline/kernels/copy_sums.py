"""A Triton kernel that adds up the gradients of copies: one program for each token and block of columns.

Shapes: P tokens, C copies of them, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_copies(gradient, order, starts, out, columns, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(tl.load(starts + token), tl.load(starts + token + 1)):
        copy = tl.load(order + number)
        total += tl.load(gradient + copy * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


def sum_copies(gradient: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return (P, K) sums of rows of `gradient` (C, K), in its type and added in fp32, in the order of `order`.

    Args:
        order: (C,) int64, copies of token 0, then those of token 1, ...
        starts: (P + 1,) int64, where each token's copies begin in `order`, and C.
    """
    tokens, columns = len(starts) - 1, gradient.shape[1]
    out = torch.empty(tokens, columns, dtype=gradient.dtype, device=gradient.device)
    block = min(1024, triton.next_power_of_2(columns))
    _sum_copies[(tokens, triton.cdiv(columns, block))](gradient, order, starts, out, columns, BLOCK=block)
    return out
