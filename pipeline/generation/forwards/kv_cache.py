"""The layout of a KV cache, which the planner, the backends and the kernels' callers read, and the cache itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pipeline.model_types import declared

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The keys and values of one token, in all layers.

    num_layers: layers, each with keys and values.
    num_heads: heads of keys and values on this rank.
    head_dim: numbers of a head.
    dtype: type of a number.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: "PretrainedConfig", dtype: torch.dtype) -> "CacheLayout":
        """Return the layout of a model with this transformers configuration, whole on a rank."""
        text = config.get_text_config()
        heads = declared(text, "num_key_value_heads") or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(text.num_hidden_layers, heads, head_dim, dtype)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize

    def new(self, num_slots: int, cache_length: int, device: torch.device) -> "KeyValueCache":
        """Return an empty cache of M slots with S positions each."""
        shape = (num_slots, self.num_heads, cache_length, self.head_dim)
        # Zeros, since uninitialised memory may contain NaN, and a masked score of NaN would stay NaN.
        keys, values = (
            [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(self.num_layers)] for _ in range(2)
        )
        return KeyValueCache(keys, values)


class Rest(NamedTuple):
    """The rows of a prefill of N slots that have the first tokens of their prompts.

    positions: (N, P) int64, those of the rows' tokens, ascending; padding may share the last one.
    length: more than the tokens of the longest whole prompt; at most the positions of a slot.
    """

    positions: Tensor
    length: int

    def stored(self, new: Tensor, cached: Tensor, slots: Tensor) -> Tensor:
        """Store (N, Hkv, P, D) keys or values of the rows in their slots (N,); return these slots' first `length`."""
        cached[slots[:, None], :, self.positions] = new.transpose(1, 2)
        # What earlier responses left behind the rows may not be finite, and a masked score of NaN would stay NaN.
        behind = torch.arange(self.length, device=new.device) > self.positions[:, -1:]
        return cached[slots, :, : self.length].masked_fill_(behind[:, None, :, None], 0)


@dataclass(frozen=True, slots=True)
class KeyValueCache:
    """Keys and values of M slots, (M, Hkv, S, D) for each layer; a slot's tokens have positions 0, 1, ... of S."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def length(self) -> int:
        """S, the positions of a slot."""
        return self.keys[0].shape[2]

    def grow(self, cache_length: int, slots: Sequence[int]) -> None:
        """Retain only these slots, with `cache_length` positions each; one layer at a time is in memory twice."""
        for tensors in (self.keys, self.values):
            for layer, shorter in enumerate(tensors):
                _, heads, length, head_dim = shorter.shape
                tensors[layer] = shorter.new_zeros(len(slots), heads, cache_length, head_dim)
                # Slot by slot: indexing all slots at once would create a third copy.
                for longer, slot in zip(tensors[layer], slots, strict=True):
                    longer[:, :length] = shorter[slot]
