"""The backbone's forward pass over rows that are padded on the right, or packed.

B rows, S positions, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.kernels.attention_choice import choose_attention_kernel
from pipeline.models.loading import backbone, base_model
from pipeline.models.packed_attention import uses_packed_attention
from pipeline.tensor_ops import round_up

# Tokens of a pass without padding are a multiple of this: memory that one pass leaves then fits the next.
PACKED_UNIT = 64


def hidden_states(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None,
    *,
    num_tokens: int | None = None,
) -> Tensor:
    """(B, S, H) last hidden states of a causal model, in its own type; what stands at padding means nothing.

    Args:
        input_ids: (B, S) int64.
        attention_mask: (B, S) bool, True = real token, and every row padded on the right; or of packed rows
            (B, 1, S, S) bool, True = may attend, or whatever 4-D tensor the model's attention function takes for it.
        position_ids: (B, S) int64 of packed rows; other rows count from 0.
        num_tokens: of padded rows, how many of the B * S are real: only these pass through the model then, where its
            attention can keep the rows apart (`enable_packed_attention`). None: padding passes too.
    """
    if attention_mask.dim() != 2:
        mask = for_attention(model, attention_mask)
        return last_hidden(model, input_ids=input_ids, attention_mask=mask, position_ids=position_ids)
    check_padding(attention_mask)
    if num_tokens is not None and uses_packed_attention(base_model(model).config):
        return without_padding(model, input_ids, attention_mask, num_tokens)
    choose_attention_kernel(model, *input_ids.shape)
    # A causal model never looks to the right: without a mask real tokens get the same numbers, and SDPA its flash
    # kernel. Given positions spare OPT the counting of a mask; one row of them is all that transformers looks
    # through in architectures that ask whether rows are packed.
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
    return last_hidden(model, input_ids=input_ids, attention_mask=None, position_ids=positions)


def last_hidden(model: Any, **inputs: Any) -> Tensor:
    """What the backbone gives for `inputs`, without a cache."""
    found: Tensor = backbone(model)(**inputs, use_cache=False).last_hidden_state
    return found


def without_padding(model: Any, input_ids: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """The real tokens of padded rows in one row, sequence after sequence, and back: (B, S, H), 0 at padding."""
    rows, width = input_ids.shape
    places = torch.nonzero_static(mask.flatten(), size=round_up(num_tokens, PACKED_UNIT), fill_value=0).squeeze(1)
    # The tokens that round their number up are a sequence of their own, behind the others.
    ends = functional.pad(mask.sum(1).cumsum(0), (1, 1), value=len(places)).to(torch.int32)
    ends[0] = 0
    hidden = last_hidden(
        model,
        input_ids=input_ids.flatten()[places].unsqueeze(0),
        attention_mask=ends.view(1, 1, 1, -1),
        position_ids=(places % width).unsqueeze(0),
        max_length_q=max(width, PACKED_UNIT),
        max_length_k=max(width, PACKED_UNIT),
    )[0, :num_tokens]
    whole = hidden.new_zeros(rows * width, hidden.shape[-1])
    return whole.index_copy_(0, places[:num_tokens], hidden).view(rows, width, -1)


def check_padding(mask: Tensor) -> None:
    """Raise ValueError where a row of the (B, S) mask is padded on its left. Looks at a CPU's masks only.

    On a GPU the answer would have to be waited for, in each forward pass; callers are the same on both.
    """
    if mask.device.type == "cpu" and (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("rows must be padded on the right: a real token stands behind padding")


def for_attention(model: Any, mask: Tensor) -> Tensor:
    """A (B, 1, S, S) bool mask as the model's attention reads it."""
    # Eager attention adds a 4-D mask to its scores: True and False would become 1 and 0, and nothing be hidden.
    if base_model(model).config._attn_implementation != "eager":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
