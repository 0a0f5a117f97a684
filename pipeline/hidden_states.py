"""The backbone's forward pass over rows that are padded on the right, or packed.

B rows, S positions, H hidden size.
"""

from typing import Any

import torch

from pipeline.attention_kernels import choose_attention_kernel
from pipeline.modeling import backbone, base_model


def hidden_states(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """(B, S, H) last hidden states of a causal model, in its own type; what stands at padding means nothing.

    Args:
        input_ids: (B, S) int64.
        attention_mask: (B, S) bool, True = real token, and every row padded on the right; or of packed rows
            (B, 1, S, S) bool, True = may attend, or whatever 4-D tensor the model's attention function takes for it.
        position_ids: (B, S) int64 of packed rows; other rows count from 0.
    """
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    if attention_mask.dim() == 2:
        check_padding(attention_mask)
        choose_attention_kernel(model, *input_ids.shape)
        # A causal model never looks to the right: without a mask real tokens get the same numbers, and SDPA its flash
        # kernel. Given positions spare OPT the counting of a mask; one row of them is all that transformers looks
        # through in architectures that ask whether rows are packed.
        mask, positions = None, torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
    else:
        mask, positions = for_attention(model, attention_mask), position_ids
    outputs = backbone(model)(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    return outputs.last_hidden_state


def check_padding(mask: torch.Tensor) -> None:
    """Raise ValueError where a row of the (B, S) mask is padded on its left. Looks at a CPU's masks only.

    On a GPU the answer would have to be waited for, in each forward pass; callers are the same on both.
    """
    if mask.device.type == "cpu" and (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("rows must be padded on the right: a real token stands behind padding")


def for_attention(model: Any, mask: torch.Tensor) -> torch.Tensor:
    """A (B, 1, S, S) bool mask as the model's attention reads it."""
    # Eager attention adds a 4-D mask to its scores: True and False would become 1 and 0, and nothing be hidden.
    if base_model(model).config._attn_implementation != "eager":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
