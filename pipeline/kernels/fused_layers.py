"""Fused norms and ReLUs for transformers models in training: the same function in fewer passes over memory on a GPU.

A layer changes its class, not its weights or their names: what is saved, and what LoRA or DeepSpeed see, stays as it
was. On a CPU, on small inputs, and where types are mixed, it computes as before. The kernels are in norm_kernels.py.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from pipeline.kernels.token_statistics import has_triton

# RMSNorms of transformers that normalise in fp32, round, and multiply by the weight.
RMS_NORMS = frozenset(f"{name}RMSNorm" for name in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3", "SmolLM3"))
# Outputs of a layer above which the kernels save more time on the device than their launch costs on the host; measured
# on an H200 (docs/experiments.md, "Norms and ReLUs in training").
MIN_ELEMENTS = 2**23


def can_use_kernels(x: Tensor, size: int, *parameters: Tensor | None) -> bool:
    """Return True where a kernel should compute `size` outputs: on a GPU, many, all of one type, without autocast."""
    able = x.is_cuda and is_large(size) and not torch.is_autocast_enabled("cuda")
    return able and all(p is None or p.dtype == x.dtype for p in parameters)


class LayerNorm(nn.LayerNorm):
    """A LayerNorm over the last axis, by one kernel where `can_use_kernels` allows."""

    def forward(self, input: Tensor) -> Tensor:
        """Norm (..., H) over the last axis."""
        if not can_use_kernels(input, input.numel(), self.weight, self.bias):
            return super().forward(input)
        from pipeline.kernels.norm_kernels import FusedNorm

        return FusedNorm.apply(input, self.weight, self.bias, (self.eps, False))


class RMSNorm(nn.Module):
    """An RMSNorm by one kernel where `can_use_kernels` allows; the base class before one of RMS_NORMS."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm (..., H) over the last axis."""
        if not can_use_kernels(hidden_states, hidden_states.numel(), self.weight):
            return super().forward(hidden_states)
        from pipeline.kernels.norm_kernels import FusedNorm

        return FusedNorm.apply(hidden_states, self.weight, None, (self.variance_epsilon, True))


class ReluLinear(nn.Linear):
    """A linear layer with the ReLU that follows it."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute relu(input @ W.T + b): (..., H) -> (..., F)."""
        size = input.numel() // self.in_features * self.out_features
        if not can_use_kernels(input, size, self.weight, self.bias):
            return functional.relu(super().forward(input))
        from pipeline.kernels.norm_kernels import FusedReluLinear

        return FusedReluLinear.apply(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], -1)


def fuse_layers(model: nn.Module, device: torch.device) -> int:
    """Fuse the norms and ReLUs of a model, after LoRA has been added; return the number of layers that were fused.

    Needs a GPU with triton. Norms: LayerNorms, and RMS_NORMS. ReLUs: those of OPT after a linear layer without LoRA.
    """
    if device.type != "cuda" or not has_triton():
        return 0
    return sum(_fuse(module) for module in list(model.modules()))


def is_large(size: int) -> bool:
    """Tell whether a layer of `size` outputs is worth a kernel's launch."""
    return size > MIN_ELEMENTS


@cache
def norm_class(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `base`, which norms in place of `kind`, and `kind`; one class for all norms of a kind."""
    return type(kind.__name__, (base, kind), {})


def _fuse(module: Any) -> bool:
    kind: Any = type(module)
    if kind is nn.LayerNorm and len(module.normalized_shape) == 1:
        module.__class__ = LayerNorm
    elif kind.__name__ in RMS_NORMS and not issubclass(kind, RMSNorm):
        module.__class__ = norm_class(kind, RMSNorm)
    elif kind is OPTDecoderLayer and type(module.activation_fn) is nn.ReLU and type(module.fc1) is nn.Linear:
        if module.fc1.bias is None:
            return False
        module.fc1.__class__ = ReluLinear
        module.activation_fn = nn.Identity()
    else:
        return False
    return True
