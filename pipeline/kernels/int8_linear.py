"""Linear layers whose frozen weights are int8 codes with one scale per output channel, in plain torch.

Quantised bases under LoRA consist of them. Trainer, reference policy and sampler call these layers, so that all three
compute with the same dequantised values. Each product dequantises the weight first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

LARGEST_CODE = 127  # largest magnitude of an int8 code


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes (outputs, inputs) and fp32 scales (outputs, 1); the largest magnitude of a row has code 127."""
    scale = weight.float().abs().amax(1, keepdim=True) / LARGEST_CODE
    codes = (weight.float() / scale.clamp_min(torch.finfo(torch.float32).tiny)).round()
    return codes.to(torch.int8), scale


def dequantise_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes * scale, computed in fp32 and rounded once to `dtype`, without an fp32 copy."""
    return torch.mul(codes, scale, out=torch.empty_like(codes, dtype=dtype))


class DequantisedLinear(torch.autograd.Function):
    """A linear map whose backward pass dequantises again, so that a 16-bit weight is freed after each product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return functional.linear(x, dequantise_rows(codes, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        return grads[0] @ dequantise_rows(codes, scale, grads[0].dtype), None, None, None


class Int8Linear(nn.Linear):
    """A frozen linear layer whose weight is int8 codes (outputs, inputs) times fp32 scales (outputs, 1)."""

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        weight = layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight, self.scale = (nn.Parameter(part, requires_grad=False) for part in quantise_rows(weight))
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs) in the input's dtype."""
        result: Tensor = DequantisedLinear.apply(input, self.weight, self.scale, self.bias)
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Linear":
        """Apply `fn`, which moves or casts; scales move but stay fp32: rounded scales would change the weights."""
        scale = self.scale.data
        super()._apply(fn, recurse)
        self.scale.data = scale.to(self.weight.device)
        return self
