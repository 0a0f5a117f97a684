"""Fused norms, ReLUs and LoRA layers for models in training: the same function in fewer passes over memory on a GPU.

A layer changes its class, not its weights or their names: what is saved, and what peft or DeepSpeed see, stays as it
was. On a CPU, on small inputs (but of LoRA), and where types are mixed, it computes as before. The kernels are in
norm_kernels.py, LoRA's function is in lora_linear.py.
"""

from functools import cache
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.pytorch_utils import Conv1D

from pipeline.kernels.int8_linear import Int8Linear
from pipeline.kernels.lora_linear import AdaptedLinear, Frozen
from pipeline.kernels.token_statistics import has_triton

# RMSNorms of transformers that normalise in fp32, round, and multiply by the weight.
RMS_NORMS = frozenset(f"{name}RMSNorm" for name in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3", "SmolLM3"))
# Outputs of a layer above which the kernels save more time on the device than their launch costs on the host; measured
# on an H200 (docs/experiments.md, "Norms and ReLUs in training").
MIN_ELEMENTS = 2**23


def can_use_kernels(x: Tensor, size: int, *parameters: Tensor | None) -> bool:
    """Return True where a kernel should compute `size` outputs: on a GPU, many, all of one type, without autocast."""
    return is_large(size) and is_of_one_type(x, *parameters)


def is_of_one_type(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return True where a layer computes on a GPU in the type of its parameters, without autocast."""
    able = x.is_cuda and not torch.is_autocast_enabled("cuda")
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


class LoraLinear(PeftLinear):
    """peft's linear layer with LoRA adapters; a single plain adapter adds to the base's output, where it can."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute base(x) + scaling * B(A(x)): (..., inputs) -> (..., outputs)."""
        base: Any = self.base_layer
        adapter = None if args or kwargs else self.plain_adapter()
        if adapter is None or not reads_plainly(base):
            return super().forward(x, *args, **kwargs)
        down: Any = self.lora_A[adapter]
        up: Any = self.lora_B[adapter]
        weight = base.weight.t() if type(base) is Conv1D else base.weight
        scales = base.scale if type(base) is Int8Linear else None
        if not is_of_one_type(x, weight if scales is None else None, base.bias, down.weight, up.weight):
            return super().forward(x)
        frozen = Frozen(weight, scales, base.bias, self.scaling[adapter])
        result: Tensor = AdaptedLinear.apply(x, frozen, down.weight, up.weight)
        return result

    def plain_adapter(self) -> str | None:
        """Return the adapter that a pass adds to the base; None for none, several, a variant of LoRA, or dropout."""
        active = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if len(active) != 1 or active[0] in self.lora_variant or self.lora_bias[active[0]]:
            return None
        dropout = self.lora_dropout[active[0]]
        return None if dropout.training and type(dropout) is not nn.Identity else active[0]


def reads_plainly(base: Any) -> bool:
    """Tell whether a base layer is a frozen linear one, whose weight is whole without a call of the layer.

    ZeRO-3 can gather weights around the calls of layers, and release them before the backward pass (`zero3.py`).
    """
    if type(base) not in (nn.Linear, Conv1D, Int8Linear) or getattr(base.weight, "gathered_by_layer", False):
        return False
    return not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)


def fuse_layers(model: nn.Module, device: torch.device) -> int:
    """Fuse norms, ReLUs and LoRA layers of a model, after LoRA has been added; return the number of fused layers.

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
    elif kind is PeftLinear:
        module.__class__ = LoraLinear
    elif kind is OPTDecoderLayer and type(module.activation_fn) is nn.ReLU and type(module.fc1) is nn.Linear:
        if module.fc1.bias is None:
            return False
        module.fc1.__class__ = ReluLinear
        module.activation_fn = nn.Identity()
    else:
        return False
    return True
