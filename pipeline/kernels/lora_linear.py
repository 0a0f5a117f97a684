"""A linear map with its LoRA adapter as one function in plain torch, which passes over whole inputs and outputs less.

For fused_layers.py. T tokens, R the adapter's rank. torch's own operations write the adapter's output, scale it, and
write its sum with the base's; here the matrix products add to what is there, and scale by their factor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kernels.int8_linear import dequantise_rows

Base = tuple[Tensor, Tensor | None]  # what a frozen layer's weight is read from


class AdaptedLinear(torch.autograd.Function):
    """A frozen linear map with a trained adapter: x W^T + bias + scaling * (x A^T) B^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Base, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """Map x (..., inputs) to (..., outputs), all of one floating type but the codes.

        Args:
            base: (weight, None), weight (outputs, inputs); or (codes, scales), int8 and fp32 (outputs, 1).
            bias: (outputs,).
            a: (R, inputs).
            b: (outputs, R).
        """
        out = functional.linear(x, whole_weight(*base, x.dtype), bias)
        hidden = x.reshape(-1, x.shape[-1]) @ a.t()  # (T, R)
        out.view(-1, out.shape[-1]).addmm_(hidden, b.t(), alpha=scaling)
        ctx.save_for_backward(x, hidden, *base, a, b)
        ctx.scaling = scaling
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, bias, a and b."""
        x, hidden, weight, scale, a, b = ctx.saved_tensors
        needs_x, _, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
        gradient, rows = grads[0].reshape(-1, len(b)), x.reshape(-1, x.shape[-1])
        # Products with beta 0 do not read their first argument: it gives the shape.
        of_hidden = torch.addmm(hidden, gradient, b, beta=0, alpha=ctx.scaling)  # (T, R)
        of_x = None
        if needs_x:
            of_x = gradient @ whole_weight(weight, scale, x.dtype)
            of_x = of_x.addmm_(of_hidden, a).view(x.shape)
        return (
            of_x,
            None,
            gradient.sum(0) if needs_bias else None,
            of_hidden.t() @ rows if needs_a else None,
            torch.addmm(b, gradient.t(), hidden, beta=0, alpha=ctx.scaling) if needs_b else None,
            None,
        )


def whole_weight(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a weight (outputs, inputs) as it is, or of int8 codes a copy in `dtype`."""
    return weight if scale is None else dequantise_rows(weight, scale, dtype)
