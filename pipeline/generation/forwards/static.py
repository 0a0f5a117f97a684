"""The static backend: the forward pass of transformers on a static KV cache, for decoders that the fused one lacks.

A decode step sees constant shapes and addresses, as a CUDA graph needs. Its attention reads all S positions under a
mask. Adapters stay unmerged. N prompts of P tokens; M slots (rows of the cache) of S positions.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pipeline.dist import RankGroup
from pipeline.generation.device_work import Lockstep
from pipeline.generation.forwards.kv_cache import CacheLayout, Rest
from pipeline.kernels.token_statistics import LogitScaling
from pipeline.model_types import declared
from pipeline.models.decoders.architecture import UnsupportedModel, rotary_types
from pipeline.models.decoders.families import fields_not_understood
from pipeline.models.forward.hidden_states import masks_of_layers
from pipeline.models.forward.packed_attention import NAME as PACKED
from pipeline.models.loading import backbone, base_model
from pipeline.models.source import num_experts


class StaticRows(Cache):
    """A KV cache whose rows have their own lengths: one (M, Hkv, S, D) tensor of keys and one of values per layer."""

    is_compileable = False

    def __init__(self, num_slots: int, cache_length: int) -> None:
        super().__init__(layers=[])
        self.num_slots, self.cache_length = num_slots, cache_length
        self._stored: dict[int, list[Tensor]] = {}
        # A prefill writes whole prompts: slot slots[i] gets that of prompt source[i], (R,) int64 each. With a `Rest`,
        # slot slots[i] gets row i.
        self.prefilled: tuple[Tensor, Tensor | Rest] | None = None
        # A decode step writes one token per slot, at positions (M,) int64.
        self.positions: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (N, Hkv, T, D) keys and values; return those that attention is to read."""
        if layer_idx not in self._stored:
            self._stored[layer_idx] = [
                like.new_zeros(self.num_slots, like.shape[1], self.cache_length, like.shape[3])
                for like in (key_states, value_states)
            ]
        keys, values = self._stored[layer_idx]
        if self.prefilled is not None:
            (slots, source), width = self.prefilled, key_states.shape[2]
            if isinstance(source, Rest):
                return source.stored(key_states, keys, slots), source.stored(value_states, values, slots)
            keys[slots, :, :width] = key_states[source]
            values[slots, :, :width] = value_states[source]
            return key_states, value_states
        rows = torch.arange(self.num_slots, device=keys.device)
        keys[rows, :, self.positions], values[rows, :, self.positions] = key_states[:, :, 0], value_states[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache_length


class StaticCacheForward:
    """The forward passes (`backends.CachedForward`) of a transformers model on a static cache, adapters included."""

    preserves_free_slots = False  # a decode step writes a key to every slot, active or not
    can_grow = False  # attention reads all positions of the cache
    num_copied_bytes = 0  # the trained weights themselves are read
    lockstep: Lockstep | None = None

    def __init__(self, model: nn.Module) -> None:
        check_static_cache_forward(model)
        self.model: Any = base_model(model)
        self.group = RankGroup(1)
        self._parameters = list(self.model.parameters())
        self.device = self._parameters[0].device
        config = self.model.config.get_text_config()
        # Grouped products of experts copy their offsets to the host in fp32.
        self.fits_graph = not num_experts(config)
        self._scaling = LogitScaling.from_config(config, 1.0)
        self.cache_layout = CacheLayout.of(config, self.model.dtype)

    def refresh(self) -> None:
        """Do nothing: the trained weights themselves are read."""

    def addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def prepare(self, cache_length: int) -> None:
        """Do nothing: the model creates its own tables."""

    def new_cache(self, num_slots: int, cache_length: int) -> StaticRows:
        return StaticRows(num_slots, cache_length)

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: StaticRows, *, slots: Tensor, source: Tensor | Rest
    ) -> Tensor:
        """Compute prompts into the cache; shapes as in `fused.FusedForward.prefill`."""
        rows, columns = len(ids), torch.arange(ids.shape[1], device=ids.device)
        cache.prefilled = (slots, source)
        positions, keys = columns.expand_as(ids), columns
        if isinstance(source, Rest):
            positions, keys = source.positions, torch.arange(source.length, device=ids.device)
        hidden = self._run(ids, positions, positions[:, None, :, None], keys, cache)
        return self._logits(hidden[torch.arange(rows, device=ids.device), lengths - 1])

    def decode_step(self, tokens: Tensor, lengths: Tensor, active: Tensor, cache: StaticRows) -> Tensor:
        """Compute the next logits of every slot; shapes as in `fused.FusedForward.decode_step`."""
        # A finished row keeps writing its last token behind its end; nothing reads it.
        positions = lengths.long().clamp(max=cache.cache_length - 1)
        keys = torch.arange(cache.cache_length, device=tokens.device)
        cache.prefilled, cache.positions = None, positions
        hidden = self._run(tokens.unsqueeze(1), positions.unsqueeze(1), positions[:, None, None, None], keys, cache)
        return self._logits(hidden[:, -1])

    def _run(self, ids: Tensor, positions: Tensor, queries: Tensor, keys: Tensor, cache: StaticRows) -> Tensor:
        """Return the last hidden states (N, T, H); queries (N, 1, T, 1) and keys (S,): their positions."""
        return backbone(self.model)(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            attention_mask=masks_of_layers(self.model, queries >= keys, queries, keys),
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._scaling.apply_(self.model.get_output_embeddings()(hidden))


def check_static_cache_forward(model: nn.Module) -> None:
    """Raise UnsupportedModel if a static cache under our own masks would change the model's function."""
    inner = base_model(model)
    config = inner.config.get_text_config()
    if "position_ids" not in inspect.signature(type(backbone(inner)).forward).parameters:
        raise UnsupportedModel(f"{config.model_type} takes no position_ids")
    layers = DynamicCache(config=config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise UnsupportedModel(f"{config.model_type} has layers with another cache than keys and values of all tokens")
    if inner.config._attn_implementation not in ("sdpa", "eager", PACKED):
        raise UnsupportedModel(f"{inner.config._attn_implementation} attention takes no mask of every row's own length")
    if declared(config, "alibi"):
        raise UnsupportedModel("attention biases by distance (alibi) come with the model's own mask")
    if "local" in (declared(config, "attention_layers") or ()):
        raise UnsupportedModel("some layers see a window of tokens only")
    for kind in rotary_types(config) & {"dynamic", "longrope"}:
        raise UnsupportedModel(f"rotary positions of type {kind} depend on how long the sequence is")
    for problem in fields_not_understood(config):
        raise UnsupportedModel(f"config.json: {problem}")
