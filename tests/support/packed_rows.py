"""Packed rows without a GPU: a plain function in the place of the flash kernel, and models that are given bounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models.forward import packed_attention
from pipeline.models.loading import base_model


def plain_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, *, scale: float | None, window: int
) -> Tensor:
    """`packed_attention.flash_attention` by the book: run by run, under a dense mask, with keys for each query head."""
    ends = bounds.tolist()
    assert bounds.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(query)
    assert key.shape == value.shape and (len(query), query.shape[-1]) == (len(key), key.shape[-1])
    key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], 1) for states in (key, value))
    found = []
    for start, stop in pairwise(ends):
        assert 0 <= stop - start <= longest
        places = torch.arange(stop - start)
        back = places[:, None] - places[None, :]
        seen = (back >= 0) & ((back <= window) | torch.tensor(window < 0))
        part = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        found.append(scaled_dot_product_attention(*part, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(found)


def give_bounds(model: Any, **_: Any) -> bool:
    """`packed_attention.enable_packed_attention` as on a GPU that has the kernel."""
    base_model(model).set_attn_implementation(packed_attention.NAME)
    return True


@contextmanager
def plain_kernel() -> Iterator[mock.Mock]:
    """The kernel's place is taken; gives what counts its calls."""
    with mock.patch.object(packed_attention, "flash_attention", side_effect=plain_flash) as seen:
        yield seen
