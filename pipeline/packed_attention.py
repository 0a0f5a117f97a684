"""Attention over rows that hold several samples, which do not see each other: without a mask where the device can.

A dense mask of a row of S tokens has S x S entries and takes attention off its flash kernel. torch's variable-length
kernel reads where the samples begin instead. The model sees these bounds as its 4-D attention mask, which transformers
hands to the attention function as it is. B rows, S positions, H heads, D head size.
"""

import inspect
import logging
from contextlib import suppress
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pipeline.data.batching import SFTBatch, block_diagonal_mask

varlen_attn: Any = None  # torch before 2.10
with suppress(ImportError):
    from torch.nn.attention.varlen import varlen_attn

log = logging.getLogger(__name__)

NAME = "packed_sdpa"
MAX_HEAD_SIZE = 256  # of the flash kernel


def keep_apart(model: Any, *, device: torch.device) -> bool:
    """Let a transformers model take bounds for a mask, where its attention and the device allow it; whether they do.

    Needs a CUDA device, 16-bit weights, sdpa as the model's attention, and torch's varlen_attn with windows (2.11).
    Where they are not there, `packed_mask` gives the dense mask.
    """
    config = model.config
    heads = getattr(config, "num_attention_heads", 0) or 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    able = (
        device.type == "cuda"
        and next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
        and config._attn_implementation == "sdpa"
        and getattr(model, "_supports_attention_backend", False)
        and head_size <= MAX_HEAD_SIZE
        and head_size % 8 == 0
        and kernel_has_windows()
    )
    if able:
        model.set_attn_implementation(NAME)
    log.info("packed rows: attention %s", "by the variable-length flash kernel" if able else "under dense masks")
    return able


def kernel_has_windows() -> bool:
    """Whether varlen_attn can be causal by a window: torch 2.10 spelt that otherwise."""
    return varlen_attn is not None and "window_size" in inspect.signature(varlen_attn).parameters


def packed_mask(config: Any, batch: SFTBatch) -> torch.Tensor:
    """What keeps a batch's samples apart: (1, 1, 1, N + 1) int32 bounds, or a (B, 1, S, S) bool mask."""
    if config._attn_implementation == NAME:
        return batch.segment_bounds.view(1, 1, 1, -1)
    return block_diagonal_mask(batch.segment_ids)


def packed_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers: query (B, H, S, D), key and value (B, H or fewer, S, D) -> (B, S, H, D).

    Causal within each run of `attention_mask`'s bounds; with any other mask, sdpa.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    ends = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    flat = [states.transpose(1, 2).reshape(rows * length, heads, size) for states in ends]
    bounds = attention_mask.flatten()
    # No sample is longer than a row: its exact length would have to be fetched from the device.
    found = varlen_attn(*flat, bounds, bounds, length, length, scale=settings.get("scaling"), window_size=(-1, 0))
    return found.view(rows, length, heads, size), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
