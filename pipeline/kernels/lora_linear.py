"""A linear map with its LoRA adapter as one function in plain torch, with fewer passes over inputs and outputs.

`models/forward/fused_layers.py` calls it. Shapes: T tokens, R the adapter's rank. Separate operations would write the
adapter's output, scale it, and write its sum with the base's output. Here the matrix products scale and add in place
(`addmm_`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kernels.int8_linear import dequantise_rows


class Frozen(NamedTuple):
    """The frozen part of an adapted linear map.

    weight: (outputs, inputs), or its int8 codes.
    scales: fp32 scales of the codes, (outputs, 1); None for a weight that is not quantised.
    bias: (outputs,), or None.
    scaling: factor of the adapter's output.
    """

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None
    scaling: float

    def whole_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight; int8 codes are dequantised to a copy in `dtype`."""
        return self.weight if self.scales is None else dequantise_rows(self.weight, self.scales, dtype)


class AdaptedLinear(torch.autograd.Function):
    """A frozen linear map with a trained adapter: x W^T + bias + scaling * (x A^T) B^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, frozen: Frozen, a: Tensor, b: Tensor) -> Tensor:
        """Map x (..., inputs) to (..., outputs); a is (R, inputs), b (outputs, R). All but codes have one type."""
        out = functional.linear(x, frozen.whole_weight(x.dtype), frozen.bias)
        hidden = x.reshape(-1, x.shape[-1]) @ a.t()  # (T, R)
        out.view(-1, out.shape[-1]).addmm_(hidden, b.t(), alpha=frozen.scaling)
        ctx.save_for_backward(x, hidden, frozen.weight, frozen.scales, a, b)
        ctx.scaling = frozen.scaling
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, a and b."""
        x, hidden, weight, scales, a, b = ctx.saved_tensors
        needs_x, _, needs_a, needs_b = ctx.needs_input_grad
        gradient = grads[0].reshape(-1, len(b))
        # With beta 0 a product uses only the shape of its first argument.
        of_hidden = torch.addmm(hidden, gradient, b, beta=0, alpha=ctx.scaling)  # (T, R)
        of_x = None
        if needs_x:
            of_x = gradient @ Frozen(weight, scales, None, ctx.scaling).whole_weight(x.dtype)
            of_x = of_x.addmm_(of_hidden, a).view(x.shape)
        return (
            of_x,
            None,
            of_hidden.t() @ x.reshape(-1, x.shape[-1]) if needs_a else None,
            torch.addmm(b, gradient.t(), hidden, beta=0, alpha=ctx.scaling) if needs_b else None,
        )
