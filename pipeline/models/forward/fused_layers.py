"""Fused parts of transformers models in training: the same function in fewer passes over memory on a GPU.

The parts are norms, ReLUs, the gates of MLPs, rotary positions, and LoRA layers. `fuse_layers` changes the class of a
layer; weights and their names stay, so checkpoints, peft and DeepSpeed see the same model. A fused layer computes as
the original does:
- on a CPU, and under autocast;
- with inputs of mixed types;
- with small outputs, except for LoRA layers.

The kernels are in `pipeline/kernels/`: norm_kernels.py and gate_kernels.py; LoRA's function is in lora_linear.py.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from types import FunctionType
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
from pipeline.model_types import fused_classes

# Classes of transformers: RMSNorms that normalise in fp32, round, and multiply by the weight; gated MLPs; attention.
RMS_NORMS = fused_classes("norm", "RMSNorm")
GATED_MLPS = fused_classes("gate", "MLP")
ROTARY_ATTENTIONS = fused_classes("rotary", "Attention")
# Names of activations: class in transformers -> name in the kernels.
GATE_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
ROTARY = "apply_rotary_pos_emb"  # name of the function in the model files of transformers
# Outputs of a layer above which the kernels save more time on the device than their launch costs on the host; measured
# on an H200 (benchmarks/reports/kernels.md, "Norms and ReLUs in training").
MIN_ELEMENTS = 2**23


def can_use_kernels(x: Tensor, size: int, *parameters: Tensor | None) -> bool:
    """Return True if a kernel should compute `size` outputs: many, on a GPU, all of one type, without autocast."""
    return is_large(size) and is_of_one_type(x, *parameters)


def is_of_one_type(x: Tensor, *parameters: Tensor | None) -> bool:
    """Return True if a layer computes on a GPU in the type of its parameters, without autocast."""
    able = x.is_cuda and not torch.is_autocast_enabled("cuda")
    return able and all(p is None or p.dtype == x.dtype for p in parameters)


class LayerNorm(nn.LayerNorm):
    """A LayerNorm over the last axis, computed by one kernel if `can_use_kernels` allows."""

    def forward(self, input: Tensor) -> Tensor:
        """Norm (..., H) over the last axis."""
        if not can_use_kernels(input, input.numel(), self.weight, self.bias):
            return super().forward(input)
        from pipeline.kernels.norm_kernels import FusedNorm

        return FusedNorm.apply(input, self.weight, self.bias, (self.eps, False))


class RMSNorm(nn.Module):
    """An RMSNorm, computed by one kernel if `can_use_kernels` allows; `joined_class` adds it to one of RMS_NORMS."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm (..., H) over the last axis."""
        if not can_use_kernels(hidden_states, hidden_states.numel(), self.weight):
            return super().forward(hidden_states)
        from pipeline.kernels.norm_kernels import FusedNorm

        return FusedNorm.apply(hidden_states, self.weight, None, (self.variance_epsilon, True))


class ReluLinear(nn.Linear):
    """A linear layer together with the ReLU that follows it."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute relu(input @ W.T + b): (..., H) -> (..., F)."""
        size = input.numel() // self.in_features * self.out_features
        if not can_use_kernels(input, size, self.weight, self.bias):
            return functional.relu(super().forward(input))
        from pipeline.kernels.norm_kernels import FusedReluLinear

        return FusedReluLinear.apply(input.flatten(0, -2), self.weight, self.bias).view(*input.shape[:-1], -1)


class LoraLinear(PeftLinear):
    """peft's linear layer with LoRA; the product of a single plain adapter is added into the base's output."""

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
        """Return the name of the single plain adapter; None for several, or one with a variant, bias or dropout."""
        active = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if len(active) != 1 or active[0] in self.lora_variant or self.lora_bias[active[0]]:
            return None
        dropout = self.lora_dropout[active[0]]
        return None if dropout.training and type(dropout) is not nn.Identity else active[0]


def reads_plainly(base: Any) -> bool:
    """Return True if a base layer is linear and frozen, and its weight can be read without a call of the layer.

    It cannot if ZeRO-3 gathers the weight only around calls of the layer (`zero3.py`).
    """
    if type(base) not in (nn.Linear, Conv1D, Int8Linear) or getattr(base.weight, "gathered_by_layer", False):
        return False
    return not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)


class GatedMLP(nn.Module):
    """An MLP whose gate is one kernel if `can_use_kernels` allows; `joined_class` adds it to one of GATED_MLPS."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., H) to (..., H)."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not can_use_kernels(gate, gate.numel(), up):
            product = self.act_fn(gate) * up
        else:
            from pipeline.kernels.gate_kernels import FusedGate

            product = FusedGate.apply(gate, up, GATE_ACTIVATIONS[type(self.act_fn).__name__])
        out: Tensor = self.down_proj(product)
        return out


def rotate_positions(
    usual: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Rotate q (B, H, S, D) and k (B, Hkv, S, D) as transformers' function `usual` does, by one kernel if possible.

    cos, sin: (B or 1, S, D). With fewer channels than D, which rotate a part of each head, this calls `usual`.
    """
    if settings or cos.shape[-1] != q.shape[-1] or not can_use_kernels(q, q.numel(), k, cos, sin):
        return usual(q, k, cos, sin, **settings)
    from pipeline.kernels.gate_kernels import FusedRotary

    return FusedRotary.apply(q, k, cos, sin)


def fuse_layers(model: nn.Module, device: torch.device) -> int:
    """Fuse the layers of a model, to which LoRA has been added already; return how many were fused.

    Without a GPU and triton it fuses none. It fuses:
    - norms: LayerNorm, and RMS_NORMS;
    - ReLUs of OPT after a linear layer without LoRA;
    - gates of GATED_MLPS, with or without LoRA;
    - rotary positions of ROTARY_ATTENTIONS;
    - peft's linear layers with LoRA.
    """
    if device.type != "cuda" or not has_triton():
        return 0
    return sum(_fuse(module) for module in list(model.modules()))


def is_large(size: int) -> bool:
    """Return True if a layer of `size` outputs saves more time by a kernel than the launch costs."""
    return size > MIN_ELEMENTS


@cache
def joined_class(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `base` and `kind` in which `base` computes the forward pass; one class for each pair."""
    return type(kind.__name__, (base, kind), {})


def forward_with_rotary(kind: type[nn.Module]) -> Any:
    """Return the function that calls ROTARY: the forward pass of `kind`, or what its decorators call."""
    return inspect.unwrap(kind.forward, stop=lambda function: ROTARY in function.__code__.co_names)


@cache
def rotary_class(kind: type[nn.Module], rotate: Callable[..., tuple[Tensor, Tensor]]) -> type[nn.Module]:
    """Return a subclass of the attention class `kind` whose forward pass calls `rotate` in place of ROTARY.

    The subclass copies the forward function and its globals, so that other models still call transformers' function.
    """
    usual = forward_with_rotary(kind)
    names = usual.__globals__ | {ROTARY: partial(rotate, usual.__globals__[ROTARY])}
    forward = FunctionType(usual.__code__, names, closure=usual.__closure__)
    forward.__defaults__, forward.__kwdefaults__ = usual.__defaults__, usual.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": update_wrapper(forward, usual)})


def class_in_place(
    module: Any, norm: Any, mlp: Any, rotate: Callable[..., tuple[Tensor, Tensor]]
) -> type[nn.Module] | None:
    """Return the class that replaces the class of `module`, a part of a decoder layer; None if the class stays.

    norm, mlp: classes that compute norms and MLPs.
    rotate: function that attention layers call with transformers' function and then its arguments.
    """
    kind: Any = type(module)
    if kind.__name__ in RMS_NORMS and not issubclass(kind, norm):
        return joined_class(kind, norm)
    if kind.__name__ in GATED_MLPS and not issubclass(kind, mlp):
        return joined_class(kind, mlp) if type(module.act_fn).__name__ in GATE_ACTIVATIONS else None
    used = getattr(forward_with_rotary(kind), "__globals__", {}).get(ROTARY)
    if kind.__name__ in ROTARY_ATTENTIONS and used is not None and not isinstance(used, partial):
        return rotary_class(kind, rotate)
    return None


def _fuse(module: Any) -> bool:
    kind: Any = type(module)
    if kind is nn.LayerNorm and len(module.normalized_shape) == 1:
        module.__class__ = LayerNorm
    elif kind is PeftLinear:
        module.__class__ = LoraLinear
    elif (other := class_in_place(module, RMSNorm, GatedMLP, rotate_positions)) is not None:
        module.__class__ = other
    elif kind is OPTDecoderLayer and type(module.activation_fn) is nn.ReLU and type(module.fc1) is nn.Linear:
        if module.fc1.bias is None:
            return False
        module.fc1.__class__ = ReluLinear
        module.activation_fn = nn.Identity()
    else:
        return False
    return True
