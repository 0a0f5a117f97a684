"""Attention over packed rows, whose sequences do not attend to each other, without a dense mask on GPUs.

A dense mask of a row of S tokens has S x S entries and rules out the flash kernel. Its variable-length form reads the
bounds of the sequences instead; the model gets these bounds as its 4-D attention mask, which transformers passes
unchanged to the attention function. B rows, S positions, H heads, D head size.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pipeline.data.batching import SFTBatch, block_diagonal_mask
from pipeline.errors import InputError
from pipeline.model_types import MODEL_TYPES, declared
from pipeline.models.forward.shared_prompts import Copies
from pipeline.models.loading import base_model
from pipeline.models.source import ModelSource

NAME = "packed_sdpa"
MAX_HEAD_SIZE = 256  # limit of the flash kernel
OLDEST_DEVICE = (8, 0)  # compute capability that the flash kernel needs
# Convolutions and recurrences would carry state from one sequence of a row into the next.
PACKED_TYPES = frozenset(name for name, kind in MODEL_TYPES.items() if kind.is_packed)

# Architectures whose attention takes no mask of rows and columns.
MASKS_OF_PADDING = ("bloom", "openai-gpt", "reformer")


def enable_packed_attention(wrapped: nn.Module, *, device: torch.device) -> bool:
    """Make a transformers model read bounds as its mask, if its attention and the device can; return True if so.

    It needs one of PACKED_TYPES in 16 bits under sdpa, and a CUDA device with torch's flash kernel. Other models get
    the dense mask from `packed_mask`, and PPO's rows pass through them with their padding.
    """
    model = base_model(wrapped)
    is_supported = (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and hasattr(torch.ops.aten, "_flash_attention_forward")
        and torch.cuda.get_device_capability(device) >= OLDEST_DEVICE
        and may_take_bounds(model.config, next(model.parameters()).dtype)
        and model.config._attn_implementation == "sdpa"
        and getattr(model, "_supports_attention_backend", False)
    )
    if is_supported:
        model.set_attn_implementation(NAME)
    return is_supported


def may_take_bounds(config: PretrainedConfig, dtype: torch.dtype) -> bool:
    """Return True if a model of this configuration can take bounds as its mask under sdpa on a recent GPU."""
    heads = getattr(config, "num_attention_heads", 0) or 1
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    is_known = config.model_type in PACKED_TYPES and dtype in (torch.bfloat16, torch.float16)
    return is_known and head_size <= MAX_HEAD_SIZE and head_size % 8 == 0


def check_packing(source: ModelSource, flag: str) -> None:
    """Raise InputError for a model that does not separate the sequences of a row: by masks, positions or states."""
    path, whole = source.path, source.config
    config, kind = whole.get_text_config(), whole.model_type
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(whole), None)
    # Recurrences, which transformers declares in a model's class; older configurations name no types of layers.
    recurrent = getattr(model_class, "_is_stateful", False)
    others = set(declared(config, "layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kind in MASKS_OF_PADDING or declared(config, "alibi"):
        raise InputError(f"{flag}: {path}: {kind} takes a mask of padding only; leave {flag} out")
    if others or recurrent:
        layers = f"{min(others)} layers" if others else f"layers of {kind}"
        raise InputError(f"{flag}: {path}: {layers} carry state between sequences; leave {flag} out")
    takes = inspect.signature(model_class.forward).parameters if model_class else {"position_ids"}
    # MPT's positions are distances.
    if not whole.is_encoder_decoder and "position_ids" not in takes and kind != "mpt":
        raise InputError(f"{flag}: {path}: {kind} counts positions from the first token of a row; leave {flag} out")


def uses_packed_attention(config: PretrainedConfig) -> bool:
    """Return True if a model of this configuration takes bounds as its attention mask."""
    return bool(config._attn_implementation == NAME)


def packed_mask(config: PretrainedConfig, batch: SFTBatch) -> Tensor:
    """Return the mask that separates a batch's sequences: (1, 1, 1, N + 1) int32 bounds, or (B, 1, S, S) bool."""
    if uses_packed_attention(config):
        return batch.segment_bounds.view(1, 1, 1, -1)
    return block_diagonal_mask(batch.segment_ids)


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    *,
    longest: int,
    scale: float | None,
    window: int,
) -> Tensor:
    """Attend causally within each segment of `bounds` (N + 1,) int32: (T, H, D) -> (T, H, D).

    key, value: (K, H, D) or of fewer heads, each of which serves a group of the query's; so do their gradients.
    key_bounds: (N + 1,) int32, the segments of the keys; those of a segment end at the same token as its queries.
    longest: upper bound of the segments' lengths. window: earlier tokens that a token attends to; -1: all.

    The function calls the operator itself, which takes 0.27 ms of host time for a forward and a backward pass.
    `torch.nn.attention.varlen` wraps it twice in Python and takes 0.93 ms.
    """
    dropout, is_causal, debug_mask = 0.0, True, False
    outputs = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, key_bounds, longest, longest, dropout, is_causal, debug_mask,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip
    output: Tensor = outputs[0]
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
    key_copies: Copies | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query (B, H, S, D), key and value (B, H or fewer, S, D) -> (B, S, H, D).

    Causal within each segment of `attention_mask`'s bounds; any other mask goes to sdpa. A second row of bounds are
    those of the keys that `key_copies` makes.

    Args:
        max_length_q: upper bound of the segments' lengths; None: the length of a row.
        sliding_window: tokens that a token attends to, itself included; None: all before it.
        key_copies: makes the keys and values of all rows from those of tokens that rows share; None: they share none.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    rows, heads, length, size = query.shape
    q, k, v = (states.transpose(1, 2).reshape(rows * length, -1, size) for states in (query, key, value))
    # The exact length would cost a synchronisation with the device.
    longest = max_length_q or length
    window = sliding_window - 1 if sliding_window and sliding_window < longest else -1
    bounds, key_bounds = attention_mask[0, 0, 0], attention_mask[0, 0, -1]
    assert (key_copies is None) == (attention_mask.shape[2] == 1), "the model does not pass `key_copies` on"
    if key_copies is not None:
        k, v = key_copies.copied(k), key_copies.copied(v)
    output = flash_attention(q, k, v, bounds, key_bounds, longest=longest, scale=settings.get("scaling"), window=window)
    return output.view(rows, length, heads, size), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
