"""Triton kernels of gates and rotary positions in training, forward and backward, each one pass over memory.

`models/forward/fused_layers.py` calls them. Shapes: B rows, S positions, H heads of D channels. All arithmetic is fp32,
and results are rounded once. The activation of a gate is also rounded before its product, as in torch and in
`decode_layers.gated`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.decode_layers import activated, tanh_gelu_exponent

GATE_BLOCK = 1024  # numbers a program: with four warps and 16-bit types 16 bytes a thread, the widest access


@triton.jit
def _gate_forward(gate, up, out, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """Store activation(gate) * up, each of `size` numbers."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    active = activated(g, ACTIVATION).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (active * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_gradients(
    gradient, gate, up, gate_gradient, up_gradient, size, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Store the gradients of gate and up from that of the product; recompute the activation, x sigmoid(y(x))."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    d = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    exponent, slope = g, 1.0
    if ACTIVATION == "gelu_tanh":
        exponent, slope = tanh_gelu_exponent(g)
    share = tl.sigmoid(exponent)
    of_gate = d * u * share * (1.0 + g * (1.0 - share) * slope)
    tl.store(gate_gradient + at, of_gate.to(gate_gradient.dtype.element_ty), mask=inside)
    tl.store(up_gradient + at, (d * g * share).to(up_gradient.dtype.element_ty), mask=inside)


class FusedGate(torch.autograd.Function):
    """The gate of an MLP, activation(gate) * up (Shazeer 2020, SwiGLU and GEGLU); saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """Multiply gate and up, of one shape and floating type; `activation` is silu or gelu_tanh."""
        gate, up = gate.contiguous(), up.contiguous()
        out, size = torch.empty_like(gate), gate.numel()
        if size:
            _gate_forward[(triton.cdiv(size, GATE_BLOCK),)](
                gate, up, out, size, BLOCK=GATE_BLOCK, ACTIVATION=activation
            )
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of gate and up from that of the output, all of one shape."""
        gate, up = ctx.saved_tensors
        of_gate, of_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        if size:
            _gate_gradients[(triton.cdiv(size, GATE_BLOCK),)](
                gradient.contiguous(), gate, up, of_gate, of_up, size, BLOCK=GATE_BLOCK, ACTIVATION=ctx.activation
            )
        return of_gate, of_up, None


@triton.jit
def _rotate_heads(
    x, out, c, s, row, position, length, row_stride, head_stride, position_stride,
    HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one token of x (B, HEADS, S, D) by cos and sin c, s (1, HALF) into out (B, S, HEADS, D)."""
    n, h = tl.arange(0, ALL_HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (n < HEADS) & (h < D // 2)
    at = x + row * row_stride + position * position_stride + n * head_stride + h
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
    to = out + ((row * length + position) * HEADS + n) * D + h
    tl.store(to, (low * c - high * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + D // 2, (high * c + low * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_pair(
    q, k, q_out, k_out, cos, sin, sign, length, cos_row_stride,
    q_row, q_head, q_position, k_row, k_head, k_position,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, ALL_HEADS: tl.constexpr, ALL_KV_HEADS: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate q and k of one token by `sign` times its angles; q_row, ... are strides."""
    token = tl.program_id(0).to(tl.int64)
    row, position = token // length, token % length
    h = tl.arange(0, HALF)[None, :]
    at = row * cos_row_stride + position * D + h
    c = tl.load(cos + at, mask=h < D // 2, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=h < D // 2, other=0.0).to(tl.float32) * sign
    _rotate_heads(q, q_out, c, s, row, position, length, q_row, q_head, q_position, HEADS, ALL_HEADS, D, HALF)
    _rotate_heads(k, k_out, c, s, row, position, length, k_row, k_head, k_position, KV_HEADS, ALL_KV_HEADS, D, HALF)


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Rotate q (B, H, S, D) and k (B, Hkv, S, D) by `sign` times their angles.

    cos, sin: (B or 1, S, D), contiguous.
    Returns tensors of the shapes of q and k whose memory layout is (B, S, heads, D), as that of projections.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (rows, heads, length, size), kv_heads = q.shape, k.shape[1]
    outs = [
        x.new_empty_strided(x.shape, (length * n * size, size, n * size, 1)) for x, n in ((q, heads), (k, kv_heads))
    ]
    if rows * length:
        _rotate_pair[(rows * length,)](
            q, k, *outs, cos, sin, sign, length, cos.stride(0) if len(cos) > 1 else 0, *q.stride()[:3], *k.stride()[:3],
            HEADS=heads, KV_HEADS=kv_heads, ALL_HEADS=triton.next_power_of_2(heads),
            ALL_KV_HEADS=triton.next_power_of_2(kv_heads), D=size, HALF=triton.next_power_of_2(size // 2),
        )  # fmt: skip
    return outs[0], outs[1]


class FusedRotary(torch.autograd.Function):
    """Rotary positions of q and k (Su et al. 2021); the backward pass rotates the gradients back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (B, H, S, D) and k (B, Hkv, S, D) by cos and sin (B or 1, S, D), whose two halves are equal."""
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return rotate_pair(q, k, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, q_gradient: Tensor, k_gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of q and k from the gradients of the rotated q and k."""
        cos, sin = ctx.saved_tensors
        return *rotate_pair(q_gradient, k_gradient, cos, sin, -1.0), None, None
