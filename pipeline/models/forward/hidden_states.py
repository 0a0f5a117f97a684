"""Run a backbone's forward pass over rows that are padded on the right, or packed.

B rows, S positions, H hidden size. `packed_attention.py` separates packed rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.kernels.attention_choice import choose_attention_kernel
from pipeline.model_types import declared
from pipeline.models.forward.packed_attention import uses_packed_attention
from pipeline.models.forward.shared_prompts import PACKED_UNIT, SharedPrompts, bounds_of
from pipeline.models.loading import backbone, base_model
from pipeline.tensor_ops import check_right_padded, round_up

SLIDING = "sliding_attention"  # transformers' name of layers that see a window of tokens


def hidden_states(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None,
    *,
    num_tokens: int | None = None,
    right_padded: bool = False,
    shared: SharedPrompts | None = None,
) -> Tensor:
    """Return (B, S, H) last hidden states of a causal model in its dtype; values at padding are undefined.

    Args:
        input_ids: (B, S) int64.
        attention_mask: (B, S) bool, True = real token, and every row padded on the right; or of packed rows
            (B, 1, S, S) bool, True = may attend, or whatever 4-D tensor the model's attention function takes for it.
        position_ids: (B, S) int64 of packed rows; other rows count from 0.
        num_tokens: number of real tokens in padded rows. Only these pass through the model then, if its attention can
            keep rows apart (`enable_packed_attention`). None: padding passes through it too.
        right_padded: True: the caller knows that rows are padded on the right, as those of a collated batch are;
            False: it is checked here, which synchronises with a GPU.
        shared: first tokens that rows have in common, which pass once where rows pass without their padding.

    Raises:
        ValueError: a row is padded on its left: its tokens would attend to the padding.
    """
    if attention_mask.dim() != 2:
        if attention_mask.dtype == torch.bool:
            columns = torch.arange(input_ids.shape[1], device=input_ids.device)
            mask: Any = masks_of_layers(model, attention_mask, columns[:, None], columns)
        else:
            mask = attention_mask
        return last_hidden(model, input_ids=input_ids, attention_mask=mask, position_ids=position_ids)
    if not right_padded:
        check_right_padded(attention_mask)
    if num_tokens is not None and uses_packed_attention(base_model(model).config):
        return without_padding(model, input_ids, attention_mask, num_tokens, shared)
    choose_attention_kernel(model, *input_ids.shape)
    # Real tokens of a causal model never attend to padding on their right: without a mask the numbers are the same, and
    # SDPA takes its flash kernel. Explicit positions spare OPT a cumulative sum over a mask; a single row of them keeps
    # transformers' test for packed rows short.
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
    return last_hidden(model, input_ids=input_ids, attention_mask=None, position_ids=positions)


def masks_of_layers(model: nn.Module, visible: Tensor, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
    """Return a dense mask as the model's layers take it, limited to the window of those that have one.

    transformers takes a mask of four dimensions as it is, also for layers that see a window of tokens only.

    Args:
        visible: (B, 1, Q, K) bool, True = query may attend to key.
        queries, keys: int64 that broadcast to it: their positions.
    """
    inner = base_model(model)
    config = inner.config.get_text_config()
    window, kinds = declared(config, "sliding_window"), declared(config, "layer_types")

    def as_taken(mask: Tensor) -> Tensor:
        if inner.config._attn_implementation != "eager":
            return mask
        added = torch.zeros(mask.shape, dtype=inner.dtype, device=mask.device)  # to the scores, by eager attention
        return added.masked_fill(~mask, torch.finfo(added.dtype).min)

    if not window or (kinds and SLIDING not in kinds):
        return as_taken(visible)
    windowed = as_taken(visible & (queries < keys + window))
    return {"full_attention": as_taken(visible), SLIDING: windowed} if kinds else windowed


def last_hidden(model: nn.Module, **inputs: Any) -> Tensor:
    """Call the backbone without a KV cache and return its last hidden states."""
    hidden: Tensor = backbone(model)(**inputs, use_cache=False).last_hidden_state
    return hidden


def without_padding(
    model: nn.Module, input_ids: Tensor, mask: Tensor, num_tokens: int, shared: SharedPrompts | None = None
) -> Tensor:
    """Return (B, S, H) hidden states, 0 at padding, from one packed row of the real tokens of padded rows."""
    rows, width = input_ids.shape
    passing, count, longest = mask, num_tokens, max(width, PACKED_UNIT)
    if shared is not None:  # the fillers are at least one: their keys are more than a unit, and need a query
        passing, count, longest = shared.passing(mask), num_tokens - shared.num_tokens + 1, max(width, 2 * PACKED_UNIT)
    places = torch.nonzero_static(passing.flatten(), size=round_up(count, PACKED_UNIT), fill_value=0).squeeze(1)
    # The tokens that round the number up to PACKED_UNIT are a sequence of their own behind the others.
    bounds, copies = [bounds_of(passing, len(places))], None
    if shared is not None:
        copies = shared.copies(mask, passing, num_tokens, len(places))
        bounds.append(copies.bounds)
    hidden = last_hidden(
        model,
        input_ids=input_ids.flatten()[places].unsqueeze(0),
        attention_mask=torch.stack(bounds).view(1, 1, len(bounds), -1),
        position_ids=(places % width).unsqueeze(0),
        max_length_q=longest,
        max_length_k=longest,
        key_copies=copies,
    )[0]
    if copies is not None:
        places, hidden = copies.places, copies.copied(hidden)
    whole = hidden.new_zeros(rows * width, hidden.shape[-1])
    return whole.index_copy_(0, places[:num_tokens], hidden[:num_tokens]).view(rows, width, -1)
