"""Triton kernels of log-probabilities and entropies: one program reads the logits of one token and sums in fp32.

token_statistics.py calls them. Shapes: M tokens, V vocabulary. They store neither an fp32 copy of the logits nor their
softmax.
"""

from typing import Any

import torch
import triton
import triton.language as tl

# Most columns that a program holds at a time: 16 numbers per thread with 8 warps, for the widest loads. Chosen by hand.
MAX_BLOCK = 4096
NUM_WARPS = 8
# Finite number below every logit, because -inf - -inf would be NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _scaled(x, factor, bound, CAPPED: tl.constexpr):
    """Return x * factor, or bound * tanh(x * factor) for a soft cap."""
    x = x.to(tl.float32) * factor
    return bound * (2.0 * tl.sigmoid(2.0 * x) - 1.0) if CAPPED else x


@triton.jit
def forward_kernel(
    logits, targets, log_probs, normalisers, entropies, factor, bound, num_columns, WITH_ENTROPY: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute log-sum-exp, log-probability of the target and entropy of a row of scaled logits, block by block."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)  # sum of exp(x - largest)
    weighted = tl.full((), 0.0, tl.float32)  # sum of (x - largest) * exp(x - largest)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        x = tl.load(logits + start + columns, mask=inside, other=-float("inf"))
        x = tl.where(inside, _scaled(x, factor, bound, CAPPED), -float("inf"))
        before = largest
        largest = tl.maximum(before, tl.max(x, axis=0))
        shrink = tl.exp(before - largest)
        weights = tl.exp(x - largest)
        if WITH_ENTROPY:
            # 0 * -inf would be NaN, for columns beyond the last and for tokens of probability 0.
            distance = tl.where(x > -float("inf"), x - largest, 0.0)
            weighted = shrink * (weighted + (before - largest) * total) + tl.sum(distance * weights, axis=0)
        total = shrink * total + tl.sum(weights, axis=0)
    normaliser = largest + tl.log(total)
    chosen = _scaled(tl.load(logits + tl.load(targets + row)), factor, bound, CAPPED)
    tl.store(log_probs + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    if WITH_ENTROPY:
        tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def backward_kernel(
    logits, targets, normalisers, entropies, gradients, entropy_gradients, factor, bound, num_columns,
    WITH_ENTROPY: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite the logits by their gradient: (gradient * (1 at the target - softmax) + entropy term) * slope.

    The entropy term is entropy gradient * -softmax * (log softmax + entropy); the slope is the scaling's derivative.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = logits + row * num_columns + columns
    x = _scaled(tl.load(places, mask=inside, other=0.0), factor, bound, CAPPED)
    slope = factor * (bound - x * x / bound) if CAPPED else factor
    normaliser = tl.load(normalisers + row)
    probabilities = tl.exp(x - normaliser)
    is_target = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    gradient = (is_target - probabilities) * (tl.load(gradients + row) * slope)
    if WITH_ENTROPY:
        surprise = tl.where(x > -float("inf"), x - normaliser, 0.0) + tl.load(entropies + row)
        gradient -= probabilities * surprise * (tl.load(entropy_gradients + row) * slope)
    tl.store(places, gradient.to(logits.dtype.element_ty), mask=inside)


class FusedStatistics(torch.autograd.Function):
    """The function `token_statistics`, computed by kernels from logits (M, V), a scaling and targets (M,)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scaling: tuple[float, float], with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (M,) fp32 log-probabilities, and (M,) fp32 entropies or None; save the logits for `backward`.

        Args:
            scaling: factor and bound: logits become logits * factor, or bound * tanh(logits * factor) if bound > 0.
        """
        factor, bound = scaling
        assert logits.dim() == 2 and logits.is_contiguous() and factor > 0, (logits.shape, logits.stride(), factor)
        assert targets.shape == logits.shape[:1] and targets.dtype == torch.int64, (targets.shape, targets.dtype)
        targets = targets.contiguous()
        log_probs, normalisers, entropies = (
            torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        if len(logits):
            forward_kernel[(len(logits),)](
                logits, targets, log_probs, normalisers, entropies, factor, bound, logits.shape[1],
                WITH_ENTROPY=with_entropy, CAPPED=bound > 0, BLOCK=block_size(logits), num_warps=NUM_WARPS,
            )  # fmt: skip
        ctx.save_for_backward(logits, targets, normalisers, entropies)
        ctx.scaling, ctx.with_entropy = scaling, with_entropy
        return log_probs, entropies if with_entropy else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, gradients: torch.Tensor, entropy_gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        """Overwrite the logits by their gradient (M, V), computed from (M,) gradients of both outputs.

        A second backward pass would read the overwritten logits, so only one is possible.
        """
        logits, targets, normalisers, entropies = ctx.saved_tensors
        if len(logits):
            block = block_size(logits)
            backward_kernel[(len(logits), triton.cdiv(logits.shape[1], block))](
                logits, targets, normalisers, entropies, gradients.contiguous(),
                None if entropy_gradients is None else entropy_gradients.contiguous(), *ctx.scaling, logits.shape[1],
                WITH_ENTROPY=ctx.with_entropy, CAPPED=ctx.scaling[1] > 0, BLOCK=block, num_warps=NUM_WARPS,
            )  # fmt: skip
        return logits, None, None, None


def block_size(logits: torch.Tensor) -> int:
    """Return the number of columns that one program reads at a time."""
    return min(MAX_BLOCK, triton.next_power_of_2(logits.shape[1]))
