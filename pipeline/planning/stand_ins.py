"""Stand-ins for GPU kernels on the meta device.

The kernels store and move fewer bytes than torch's plain functions. A stand-in stores and moves the same bytes as its
kernel, and computes no values. There are stand-ins for flash attention, fused norms, gates, rotary positions and the
statistics of logits.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pipeline.kernels.token_statistics import LogitScaling
from pipeline.models.forward.causal_lm import CausalLM, Comparison, TokenStatistics
from pipeline.models.forward.fused_layers import GatedMLP, is_large
from pipeline.models.forward.seq2seq_lm import Seq2SeqLM

COUNTED_ATTENTION = "counted_attention"


def counted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as torch's flash kernel does, with any mask: it saves inputs, output and one number per query.

    With a learned bias (T5), attend as the memory-efficient kernel, which also saves bias and mask of all rows.
    """
    if position_bias is None:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        out = attend(query, key, value, 0.0, True, False, scale=scaling)[0]
    else:
        bias = position_bias.to(query.dtype).expand(len(query), -1, -1, -1).contiguous()
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        out = attend(query, key, value, bias, True, 0.0, False, scale=scaling)[0]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(COUNTED_ATTENTION, counted_attention)


class KeepsInput(torch.autograd.Function):
    """Saves the tensors that the fused norms of `pipeline/kernels/norm_kernels.py` save: input and weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mul(x, weight, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mul(x, gradients[0], out=torch.empty_like(x)), torch.empty_like(weight)


class CountedNorm(nn.Module):
    """An RMSNorm that saves the same tensors as on a GPU with triton; the base class in front of one of RMS_NORMS."""

    weight: nn.Parameter

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (..., H) to (..., H) without values if the tensor is large enough for the kernel."""
        if not is_large(hidden_states.numel()):
            return super().forward(hidden_states)
        return KeepsInput.apply(hidden_states, self.weight)


class KeepsGate(torch.autograd.Function):
    """Saves the tensors that `FusedGate` of `pipeline/kernels/gate_kernels.py` saves: gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.mul(gate, up, out=torch.empty_like(gate))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        read = (tensor.expand(2, *tensor.shape) for tensor in (*gradients, *ctx.saved_tensors))
        both = gradients[0].new_empty(2, *gradients[0].shape)
        return torch.addcmul(*read, out=both).unbind()  # reads three tensors and writes two, as the kernel does


class CountedMLP(GatedMLP):
    """An MLP that saves the same tensors as on a GPU with triton; the base class in front of one of GATED_MLPS."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., H) to (..., H) without values if the tensor is large enough for the kernel."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: Tensor = self.down_proj(KeepsGate.apply(gate, up) if is_large(gate.numel()) else self.act_fn(gate) * up)
        return out


class Rotated(torch.autograd.Function):
    """Reads and writes a tensor once in each direction, as `FusedRotary` does with q and k."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return torch.mul(x, angles, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.mul(gradients[0], ctx.saved_tensors[0], out=torch.empty_like(gradients[0])), None


def counted_rotary(usual: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Map q and k (B, heads, S, D) to tensors of their shapes without values, if the kernel would rotate them."""
    if cos.shape[-1] != q.shape[-1] or not is_large(q.numel()):
        return usual(q, k, cos, sin)
    return Rotated.apply(q, cos.unsqueeze(1)), Rotated.apply(k, sin.unsqueeze(1))


class KeepsLogits(torch.autograd.Function):
    """Saves the logits, as `FusedStatistics` of `pipeline/kernels/token_kernels.py`; the gradient overwrites them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.sum(1, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        logits: Tensor = ctx.saved_tensors[0]
        return logits.mul_(gradients[0].unsqueeze(1))


class CountedLM(CausalLM):
    """A causal language model whose head saves the same tensors as on a GPU with triton."""

    def head(
        self,
        hidden: Tensor,
        targets: Tensor,
        scaling: LogitScaling,
        with_entropy: bool,
        comparison: Comparison | None,
    ) -> TokenStatistics:
        """Map (m, H) hidden states to (m,) log-probabilities without values, and divergences if they are compared."""
        logits = self.logits(hidden)
        divergence = None if comparison is None else self.compared(logits, comparison, scaling)
        return TokenStatistics(KeepsLogits.apply(logits), divergence=divergence)


class KeepsSelectedLogits(KeepsLogits):
    """Saves a copy of selected rows of logits; unlike in `KeepsLogits`, the gradient is a new tensor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return KeepsLogits.forward(ctx, logits.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty_like(KeepsLogits.backward(ctx, *gradients))


class CountedSeq2SeqLM(Seq2SeqLM):
    """An encoder-decoder model that saves the same tensors as on a GPU with triton; every position has a label."""

    def label_log_probs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Map (B, T, V) logits to (B, T) log-probabilities without values."""
        return KeepsSelectedLogits.apply(logits.flatten(0, 1)).view_as(labels)
