"""Attention over rows that hold several sequences, which do not see each other: without a mask where the device can.

A dense mask of a row of S tokens has S x S entries and takes attention off its flash kernel. The kernel can read where
the sequences begin instead. The model sees these bounds as its 4-D attention mask, which transformers hands to the
attention function as it is. B rows, S positions, H heads, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pipeline.data.batching import SFTBatch, block_diagonal_mask

NAME = "packed_sdpa"
MAX_HEAD_SIZE = 256  # of the flash kernel
OLDEST_DEVICE = (8, 0)  # compute capability that it needs
# Architectures that mix the tokens of a row in attention alone, with heads of one size: convolutions and recurrences
# would run on from one sequence into the next.
MODEL_TYPES = frozenset({"opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "olmo2", "phi3", "smollm3"})


def enable_packed_attention(model: Any, *, device: torch.device) -> bool:
    """Let a transformers model take bounds for a mask, where its attention and the device allow it; whether they do.

    Needs one of MODEL_TYPES in 16 bits under sdpa, and a CUDA device with torch's flash kernel. Where they are not
    there, `packed_mask` gives the dense mask, and rows of PPO pass with their padding.
    """
    config = model.config
    heads = getattr(config, "num_attention_heads", 0) or 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    able = (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and hasattr(torch.ops.aten, "_flash_attention_forward")
        and torch.cuda.get_device_capability(device) >= OLDEST_DEVICE
        and config.model_type in MODEL_TYPES
        and next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
        and config._attn_implementation == "sdpa"
        and getattr(model, "_supports_attention_backend", False)
        and head_size <= MAX_HEAD_SIZE
        and head_size % 8 == 0
    )
    if able:
        model.set_attn_implementation(NAME)
    return able


def uses_packed_attention(config: Any) -> bool:
    """Whether a model of this configuration takes bounds for its attention mask."""
    return bool(config._attn_implementation == NAME)


def packed_mask(config: Any, batch: SFTBatch) -> Tensor:
    """What keeps a batch's samples apart: (1, 1, 1, N + 1) int32 bounds, or a (B, 1, S, S) bool mask."""
    if uses_packed_attention(config):
        return batch.segment_bounds.view(1, 1, 1, -1)
    return block_diagonal_mask(batch.segment_ids)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, *, scale: float | None, window: int
) -> Tensor:
    """(T, H, D) each -> (T, H, D): causal within each run of `bounds` (N + 1,) int32, none longer than `longest`.

    window: how many tokens before its own a token sees; -1: all of them. Not by `torch.nn.attention.varlen`, which is
    this operator behind two of Python's: 0.93 ms of the host for a forward and backward pass, in place of 0.27 ms.
    """
    dropout, is_causal, debug_mask = 0.0, True, False
    found = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, dropout, is_causal, debug_mask,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip
    output: Tensor = found[0]
    return output


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: query (B, H, S, D), key and value (B, H or fewer, S, D) -> (B, S, H, D).

    Causal within each run of `attention_mask`'s bounds; with any other mask, sdpa.

    Args:
        max_length_q: no run is longer; None: nobody knows, but a row is as long as it takes.
        sliding_window: tokens that a token sees, itself included; None: all before it.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    ends = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    q, k, v = (states.transpose(1, 2).reshape(rows * length, heads, size) for states in ends)
    # The exact length would have to be fetched from the device.
    longest = max_length_q or length
    window = sliding_window - 1 if sliding_window and sliding_window < longest else -1
    bounds = attention_mask.flatten()
    found = flash_attention(q, k, v, bounds, longest, scale=settings.get("scaling"), window=window)
    return found.view(rows, length, heads, size), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
