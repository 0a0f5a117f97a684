"""Packed rows without a GPU: a plain function in the place of the flash kernel, and models that are given bounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from support.tiny_models import NUM_TOKENS, randomise
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.models.forward import packed_attention
from pipeline.models.loading import base_model, without_dropout


def plain_flash(
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
    """`packed_attention.flash_attention` by the book: run by run, under a dense mask, with keys for each query head.

    The last query of a run stands at its last key, and each before it at the key before.
    """
    ends, key_ends = bounds.tolist(), key_bounds.tolist()
    for states, last in ((query, ends), (key, key_ends)):
        assert bounds.dtype == key_bounds.dtype == torch.int32 and last[0] == 0 and last[-1] == len(states)
    assert key.shape == value.shape and query.shape[-1] == key.shape[-1]
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    found = []
    for (start, stop), (first, end) in zip(pairwise(ends), pairwise(key_ends), strict=True):
        assert 0 <= stop - start <= end - first <= longest
        back = torch.arange(end - first - (stop - start), end - first)[:, None] - torch.arange(end - first)
        seen = (back >= 0) & ((back <= window) | torch.tensor(window < 0))
        part = (query[start:stop].transpose(0, 1), *(states[first:end].transpose(0, 1) for states in (key, value)))
        found.append(scaled_dot_product_attention(*part, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(found)


def packed_model(name: str) -> Any:
    """A tiny causal model of one of PACKED_TYPES with random weights, built by transformers alone."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": NUM_TOKENS}
    more = {"ffn_dim": 48, "word_embed_proj_dim": 32} if name == "opt" else {"intermediate_size": 48}
    more |= {"num_key_value_heads": 2} if name not in ("opt", "gpt_neox") else {}
    more |= {"head_dim": 8} if name in ("gemma", "qwen3") else {}
    config = without_dropout(AutoConfig.for_model(name, **sizes, **more, pad_token_id=0))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    randomise(model, 1)
    return model


def give_bounds(model: Any, **_: Any) -> bool:
    """`packed_attention.enable_packed_attention` as on a GPU that has the kernel."""
    base_model(model).set_attn_implementation(packed_attention.NAME)
    return True


@contextmanager
def plain_kernel() -> Iterator[mock.Mock]:
    """The kernel's place is taken; gives what counts its calls."""
    with mock.patch.object(packed_attention, "flash_attention", side_effect=plain_flash) as seen:
        yield seen
