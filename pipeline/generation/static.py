"""Generation by the model's own forward pass on a static cache: the rung for decoders of other shapes.

N prompts of P tokens; M rows of the cache; S positions of room. The step sees shapes and addresses that never change,
so that it fits in a CUDA graph; its attention runs over all S positions under a mask.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from pipeline.models.architecture import UnsupportedModel
from pipeline.models.loading import backbone, base_model
from pipeline.models.packed_attention import NAME as PACKED


class StaticRows(Cache):
    """A cache whose rows have lengths of their own: keys and values (layers, M, Hkv, S, D), written at `places`."""

    is_compileable = False

    def __init__(self, rows: int, positions: int, num_layers: int) -> None:
        super().__init__(layers=[])
        self.rows, self.positions = rows, positions
        self._stored: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._places: Tensor | None = None
        self._slots: Tensor | None = None
        self._source: Tensor | None = None

    def for_prompts(self, slots: Tensor, source: Tensor) -> "StaticRows":
        """Next come whole prompts: slot slots[i] gets those of prompt source[i]."""
        self._places, self._slots, self._source = None, slots, source
        return self

    def for_step(self, places: Tensor) -> "StaticRows":
        """Next comes one token a row, at `places` (M,)."""
        self._places = places
        return self

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (N, Hkv, T, D) keys and values; what attention is to see."""
        keys, values = self._layer(layer_idx, key_states, value_states)
        if self._places is None:
            assert self._slots is not None and self._source is not None
            width = key_states.shape[2]
            keys[self._slots, :, :width] = key_states[self._source]
            values[self._slots, :, :width] = value_states[self._source]
            return key_states, value_states
        rows = torch.arange(self.rows, device=keys.device)
        keys[rows, :, self._places] = key_states[:, :, 0]
        values[rows, :, self._places] = value_states[:, :, 0]
        return keys, values

    def _layer(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found = self._stored[number]
        if found is None:
            found = (self._zeros(keys), self._zeros(values))
            self._stored[number] = found
        return found

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.rows, like.shape[1], self.positions, like.shape[3])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.positions


class OwnForward:
    """A decode function (`generator.DecodeFunction`) of a transformers model, adapters and all."""

    def __init__(self, model: Any) -> None:
        check_own_forward(model)
        self.model = base_model(model)
        self._parameters = list(self.model.parameters())

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def leaves_free_rows(self) -> bool:
        """Not here: a step writes a key in every row."""
        return False

    @property
    def bytes_per_token(self) -> int:
        """Of the cache."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * head_dim * self.model.dtype.itemsize

    def addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def prepare(self, positions: int) -> None:
        """Nothing: the model brings its own tables."""

    def new_cache(self, rows: int, positions: int) -> StaticRows:
        return StaticRows(rows, positions, self.model.config.get_text_config().num_hidden_layers)

    def prompt(self, ids: Tensor, lengths: Tensor, cache: StaticRows, *, slots: Tensor, source: Tensor) -> Tensor:
        """As `step.DecodeModel.prompt`."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = backbone(self.model)(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache.for_prompts(slots, source),
            use_cache=True,
            attention_mask=self._causal(ids.shape[1]).expand(len(ids), -1, -1, -1),
        ).last_hidden_state
        return self._logits(hidden[torch.arange(len(ids), device=ids.device), lengths - 1])

    def step(self, tokens: Tensor, lengths: Tensor, active: Tensor, cache: StaticRows) -> Tensor:
        """As `step.DecodeModel.step`."""
        # A finished row writes its last token again and again behind its end, which nothing reads.
        places = lengths.long().clamp(max=cache.positions - 1)
        seen = torch.arange(cache.positions, device=tokens.device) <= places.unsqueeze(1)
        hidden = backbone(self.model)(
            input_ids=tokens.unsqueeze(1),
            position_ids=places.unsqueeze(1),
            past_key_values=cache.for_step(places),
            use_cache=True,
            attention_mask=self._additive(seen[:, None, None, :]),
        ).last_hidden_state
        return self._logits(hidden[:, -1])

    def _causal(self, width: int) -> Tensor:
        seen = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        return self._additive(seen[None, None])

    def _additive(self, seen: Tensor) -> Tensor:
        dtype = self.model.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)


def check_own_forward(model: Any) -> None:
    """Raise UnsupportedModel where a static cache with masks of our own would change the model's function."""
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
