"""The static backend: the forward pass of transformers on a static KV cache, for decoders that the fused one lacks.

A decode step sees shapes and addresses that never change, as a CUDA graph needs it; its attention reads all S positions
under a mask. Adapters stay unmerged. N prompts of P tokens; M slots (rows of the cache) of S positions.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from pipeline.models.architecture import UnsupportedModel
from pipeline.models.loading import backbone, base_model
from pipeline.models.packed_attention import NAME as PACKED


class StaticRows(Cache):
    """A KV cache whose rows have their own lengths: one (M, Hkv, S, D) tensor of keys and one of values per layer."""

    is_compileable = False

    def __init__(self, num_slots: int, cache_length: int) -> None:
        super().__init__(layers=[])
        self.num_slots, self.cache_length = num_slots, cache_length
        self._stored: dict[int, list[Tensor]] = {}
        # A prefill writes whole prompts: slot slots[i] gets that of prompt source[i], (R,) int64 each.
        self.prefilled: tuple[Tensor, Tensor] | None = None
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
    num_copied_bytes = 0  # the trained weights themselves are read

    def __init__(self, model: nn.Module) -> None:
        check_static_cache_forward(model)
        self.model: Any = base_model(model)
        self._parameters = list(self.model.parameters())
        self.device = self._parameters[0].device
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.bytes_per_token = 2 * config.num_hidden_layers * heads * head_dim * self.model.dtype.itemsize

    def refresh(self) -> None:
        """Do nothing: the trained weights themselves are read."""

    def addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def prepare(self, cache_length: int) -> None:
        """Do nothing: the model makes its own tables."""

    def new_cache(self, num_slots: int, cache_length: int) -> StaticRows:
        return StaticRows(num_slots, cache_length)

    def prefill(self, ids: Tensor, lengths: Tensor, cache: StaticRows, *, slots: Tensor, source: Tensor) -> Tensor:
        """Compute prompts into the cache; shapes as in `fused.FusedForward.prefill`."""
        rows, width = ids.shape
        visible = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        cache.prefilled = (slots, source)
        hidden = self._run(ids, torch.arange(width, device=ids.device).expand_as(ids), visible[None, None], cache)
        return self._logits(hidden[torch.arange(rows, device=ids.device), lengths - 1])

    def decode_step(self, tokens: Tensor, lengths: Tensor, active: Tensor, cache: StaticRows) -> Tensor:
        """Compute the next logits of every slot; shapes as in `fused.FusedForward.decode_step`."""
        # A finished row writes its last token again and again behind its end, which nothing reads.
        positions = lengths.long().clamp(max=cache.cache_length - 1)
        visible = torch.arange(cache.cache_length, device=tokens.device) <= positions.unsqueeze(1)
        cache.prefilled, cache.positions = None, positions
        hidden = self._run(tokens.unsqueeze(1), positions.unsqueeze(1), visible[:, None, None, :], cache)
        return self._logits(hidden[:, -1])

    def _run(self, ids: Tensor, positions: Tensor, visible: Tensor, cache: StaticRows) -> Tensor:
        """Return the last hidden states (N, T, H); positions (N, T) attend to the cache where `visible` is True."""
        mask = torch.zeros(visible.shape, dtype=self.model.dtype, device=visible.device)
        return backbone(self.model)(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            attention_mask=mask.masked_fill(~visible, torch.finfo(mask.dtype).min).expand(len(ids), -1, -1, -1),
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)


def check_static_cache_forward(model: nn.Module) -> None:
    """Raise UnsupportedModel where a static cache under our own masks would change the model's function."""
    inner = base_model(model)
    config = inner.config.get_text_config()
    if "position_ids" not in inspect.signature(type(backbone(inner)).forward).parameters:
        raise UnsupportedModel(f"{config.model_type} takes no position_ids")
    layers = DynamicCache(config=config).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        raise UnsupportedModel(f"{config.model_type} has layers with another cache than keys and values of all tokens")
    if inner.config._attn_implementation not in ("sdpa", "eager", PACKED):
        raise UnsupportedModel(f"{inner.config._attn_implementation} attention takes no mask of every row's own length")
    if getattr(config, "alibi", False):
        raise UnsupportedModel("attention biases by distance (alibi) come with the model's own mask")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise UnsupportedModel("some layers see a window of tokens only")
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type", "default") in ("dynamic", "longrope"):
        raise UnsupportedModel(f"rotary positions of type {rotary['rope_type']} depend on how long the sequence is")
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None):
            raise UnsupportedModel(f"{config.model_type} changes its logits ({name})")
