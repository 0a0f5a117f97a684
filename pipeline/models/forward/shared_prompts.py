"""Rows that begin with the same tokens, such as answers to one prompt: these tokens pass through a model once.

What a causal model computes at a token depends on the tokens before it alone. So rows of one beginning have the same
hidden states, keys and values there: one row computes them, and the others copy them. Their gradients are added.
B rows, W positions, N real tokens of all rows; P tokens that pass through the model, C of copies.
"""

from dataclasses import dataclass
from typing import Any, Self, TypedDict

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.data.batching import SharedTokens
from pipeline.tensor_ops import round_up

# Tokens of a pass without padding are a multiple of this, so that the allocator can reuse memory of earlier passes.
PACKED_UNIT = 64


def bounds_of(mask: Tensor, end: int) -> Tensor:
    """Return where each row of `mask` (B, W) bool begins among its true places, where the last ends, and `end`."""
    bounds = functional.pad(mask.sum(1).cumsum(0), (1, 1), value=end).to(torch.int32)
    bounds[0] = 0
    return bounds


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The first tokens that rows of a batch take from other rows.

    owners: (B,) int64, the row that computes a row's first tokens; itself if it takes none.
    lengths: (B,) int64, number of first tokens that a row takes from its owner, which takes none itself: fewer than
        the row has.
    num_tokens: their sum, on the host.
    """

    owners: Tensor
    lengths: Tensor
    num_tokens: int

    @classmethod
    def of_groups(cls, groups: Tensor, prompt_lengths: Tensor, *, num_tokens: int) -> Self:
        """Let rows of one number in `groups` (B,) int64 share their prompts of `prompt_lengths` (B,) int64 tokens."""
        owners = (groups.unsqueeze(1) == groups).int().argmax(1)  # the first row of each group
        places = torch.arange(len(groups), device=groups.device)
        return cls(owners, torch.where(owners == places, 0, prompt_lengths), num_tokens)

    def passing(self, mask: Tensor) -> Tensor:
        """Return which tokens pass through the model, (B, W) bool; `mask` (B, W) bool, True = real token."""
        return mask & (torch.arange(mask.shape[1], device=mask.device) >= self.lengths.unsqueeze(1))

    def copies(self, mask: Tensor, passing: Tensor, num_tokens: int, num_passed: int) -> "Copies":
        """Return the copies of passed tokens that make up all real tokens, row after row; `num_tokens` is N.

        Copies of the fillers follow, in which the P = `num_passed` tokens end, up to a multiple of PACKED_UNIT.
        """
        number = (passing.flatten().cumsum(0) - 1).view_as(passing)  # of the passed token at each place
        source = torch.where(passing, number, number[self.owners]).flatten()
        places = torch.nonzero_static(mask.flatten(), size=num_tokens).squeeze(1)
        count = num_tokens - self.num_tokens
        fillers = round_up(num_tokens + num_passed - count, PACKED_UNIT) - num_tokens
        filler = torch.arange(count, count + fillers, device=mask.device).clamp(max=num_passed - 1)
        index = torch.cat([source[places], filler])
        return Copies.of(index, num_passed, places, bounds_of(mask, len(index)))


class RowSettings(TypedDict, total=False):
    """Settings by which the rows of a batch pass through a model (see `hidden_states`).

    num_tokens: number of real tokens, to compute padded rows without their padding; None: padding passes too.
    right_padded: True: the caller knows it; else rows are checked for padding on their left, which synchronises with a
        GPU.
    shared: first tokens that rows have in common.
    """

    num_tokens: int | None
    right_padded: bool
    shared: SharedPrompts | None


def settings_of_pairs(tokens: SharedTokens | None) -> RowSettings:
    """Return how the rows of a batch pass through a model: padded, unless those of pairs have tokens in common."""
    if tokens is None or not tokens.num_shared:
        return {"right_padded": True}
    first = torch.arange(len(tokens.lengths) // 2, device=tokens.lengths.device)
    shared = SharedPrompts(first.repeat(2), tokens.lengths, tokens.num_shared)
    return {"right_padded": True, "num_tokens": tokens.num_tokens, "shared": shared}


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of tokens, and where each token's copies are.

    index: (C,) int64, the token that each copy is of.
    order: (C,) int64, the copies, those of one token after another.
    starts: (P + 1,) int64, the first copy of each token in `order`, and C.
    places: (N,) int64, places of the real tokens in (B, W), whose copies come first.
    bounds: (B + 2,) int32, first copies of rows and of the fillers, and C.
    """

    index: Tensor
    order: Tensor
    starts: Tensor
    places: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, index: Tensor, num_passed: int, places: Tensor, bounds: Tensor) -> Self:
        """Return the copies (C,) int64 of P = `num_passed` tokens."""
        ordered, order = index.sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(num_passed + 1, device=index.device))
        return cls(index, order, starts, places, bounds)

    def copied(self, values: Tensor) -> Tensor:
        """Return copies (C, ...) of the tokens' values (P, ...); gradients are added in fp32."""
        copied: Tensor = CopiedValues.apply(values, self)
        return copied


class CopiedValues(torch.autograd.Function):
    """`Copies.copied` with its gradient. Sums in a fixed order, as torch's own for an index are not on a GPU."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, copies: Copies) -> Tensor:
        """Copy the values (P, ...) to (C, ...)."""
        ctx.copies = copies
        return values[copies.index]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients (C, ...) of each token's copies in fp32: (P, ...)."""
        copies, gradient = ctx.copies, gradients[0].contiguous()
        shape = (len(copies.starts) - 1, *gradient.shape[1:])
        if gradient.is_cuda:
            from pipeline.kernels.copy_sums import sum_copies

            return sum_copies(gradient.flatten(1), copies.order, copies.starts).view(shape), None
        sums = torch.zeros(shape, dtype=torch.float32, device=gradient.device)
        return sums.index_add_(0, copies.index, gradient.float()).to(gradient.dtype), None
