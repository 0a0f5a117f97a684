"""A backbone with a scalar head, one value per token, which serves as reward model and as critic.

B rows, S positions. It is saved as transformers' sequence classification class (`num_labels=1`, head `score`, no bias).
Losses are in `step2_reward` and `step3_ppo`.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.utils import logging

from pipeline.errors import InputError
from pipeline.models.forward.hidden_states import hidden_states
from pipeline.models.forward.shared_prompts import RowSettings
from pipeline.models.loading import LoadSettings, WrappedModel, base_model, load_pretrained, with_adapter
from pipeline.models.lora import start_model
from pipeline.models.partitions import gathered
from pipeline.models.paths import check_reward_config, check_reward_model
from pipeline.models.source import ModelSource
from pipeline.models.tokenizers import choose_padding_token


class FloatLinear(nn.Linear):
    """A linear layer that computes in fp32 whatever its weight's dtype, because 16-bit scores tie."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias)


class TokenValueModel(WrappedModel):
    """A model that maps input ids to one fp32 value per token, normalised by `score_mean` and `score_std`."""

    def __init__(self, model: nn.Module, *, score_mean: float = 0.0, score_std: float = 1.0) -> None:
        super().__init__(model)
        self.score_mean = score_mean
        self.score_std = score_std

    @contextmanager
    def start_model(self) -> Iterator[None]:
        """Give the raw scores of the model that LoRA training began with while the context lasts."""
        constants = self.score_mean, self.score_std
        self.score_mean, self.score_std = 0.0, 1.0
        try:
            with start_model(self.model):
                yield
        finally:
            self.score_mean, self.score_std = constants

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        **rows: Unpack[RowSettings],
    ) -> torch.Tensor:
        """Return (B, S) fp32 values, one per prefix; values at padding are undefined.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) bool, True = real token, and every row padded on the right; or packed rows' 4-D mask.
            position_ids: (B, S) int64 of packed rows; other rows count from 0.
            rows: how they pass (see `RowSettings`).
        """
        hidden = hidden_states(self.model, input_ids, attention_mask, position_ids, **rows)  # (B, S, H)
        raw = base_model(self.model).score(hidden).squeeze(-1)  # (B, S)
        return (raw - self.score_mean) / self.score_std


def last_token_scores(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the (B,) values at each row's last real token: (B, S) values of right-padded rows, (B,) int64 lengths."""
    return values.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)


def score_constants(config: PretrainedConfig) -> tuple[float, float] | None:
    """Return (mean, std) of the scores that the reward stage stored in the configuration; None if it stored none."""
    stored = hasattr(config, "score_mean") or hasattr(config, "score_std")
    return (float(getattr(config, "score_mean", 0.0)), float(getattr(config, "score_std", 1.0))) if stored else None


def measured_constants(scores: torch.Tensor) -> tuple[float, float]:
    """Return (mean, population standard deviation) of the finite ones of (n,) scores; (0, 1) where they are all alike.

    They normalise scores in stage 3.
    """
    scores = scores[scores.isfinite()].double()
    std = scores.std(correction=0).item() if len(scores) else 0.0
    return (scores.mean().item(), std) if std > 0 else (0.0, 1.0)


def load_reward_model(
    source: ModelSource, *, new_head: bool = False, merged: bool = True, **settings: Unpack[LoadSettings]
) -> TokenValueModel:
    """Load a reward model or critic, with raw scores.

    Args:
        merged: as for `load_language_model`.
        new_head: start from a causal language model and add a head drawn from N(0, 1 / (hidden + 1)), the
            initialisation of Ziegler et al. 2019 (lm-human-preferences); otherwise `source` must hold a trained head.

    Raises:
        InputError: no model at `source`, or one without a head if `new_head` is False.
    """
    if not new_head:
        check_reward_model(source.path)
    check_head(source, new_head=new_head, quantization=settings.get("quantization", "auto"))
    is_adapter = source.base is not None
    lacks_head = new_head or is_adapter  # an adapter brings its head
    with without_load_report() if is_adapter and not new_head else nullcontext():
        model = load_pretrained(
            AutoModelForSequenceClassification,
            source.whole,
            **settings,
            may_lack=frozenset({"score.weight"}) if lacks_head else frozenset(),
            pickles=lacks_head,
            num_labels=1,
        )
    if not hasattr(model, "score") or not isinstance(model.score, nn.Linear):
        raise InputError(
            f"{source.path}: {type(model).__name__} has no linear head `score`; this architecture is not supported"
        )
    head = model.score
    model.score = FloatLinear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    model.score.weight, model.score.bias = head.weight, head.bias
    if is_adapter:
        model.source_config = copy.deepcopy(source.config)
        model = with_adapter(model, source.path, merged=merged)
    return TokenValueModel(model)


@contextmanager
def without_load_report() -> Iterator[None]:
    """Keep transformers from reporting in the body that a head is random, which an adapter brings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def check_head(source: ModelSource, *, new_head: bool = False, quantization: str = "none") -> None:
    """Raise InputError if the model has no score head, or can get none; reads only configurations.

    Args:
        new_head, quantization: as for `load_reward_model`.
    """
    path = source.path
    check_score_class(source.config, path)
    config = source.config.to_dict()
    if not new_head or has_score_head(source):
        check_reward_config(config, path)
    if new_head and source.base is not None and quantization != "none":
        raise InputError(
            f"{path}: a new head needs a whole model under {quantization}; rlhf merge {path} FOLDER makes it"
        )


def has_score_head(source: ModelSource) -> bool:
    """Return True if a model's configuration names a reward head."""
    return any("SequenceClassification" in name for name in source.config.architectures or [])


def check_score_class(config: PretrainedConfig, path: str) -> None:
    """Raise InputError for the configuration of a model at `path` to which transformers cannot give a score head."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise InputError(
            f"{path}: transformers has no sequence classification class for {config.model_type}, which a reward model "
            "needs; take another"
        )


def initialise_head(head: Any, *, seed: int, std: float | None = None) -> None:
    """Draw the head's weight from N(0, std^2) with a generator of its own, the same on every rank.

    Args:
        std: by default (H + 1)^-0.5, so that the scores of different rows differ from the start.
    """
    generator = torch.Generator().manual_seed(seed)
    with gathered([head.weight], writer=True):
        std = (head.in_features + 1) ** -0.5 if std is None else std
        drawn = torch.randn(head.out_features, head.in_features, generator=generator) * std
        head.weight.data.copy_(drawn) if head.weight.numel() else None


def score_head_fields(tokenizer: PreTrainedTokenizerBase, *, label: str, **measured: Any) -> dict[str, Any]:
    """Return the fields of config.json of a saved model whose score head has one output, named `label`.

    Args:
        measured: score_mean and score_std, and of which pairs; none where no score was measured.
    """
    return {
        "num_labels": 1,
        "id2label": {0: label},
        "label2id": {label: 0},
        "problem_type": "regression",  # else vLLM answers the sigmoid of the score
        "pad_token_id": pad_id_for_pooling(tokenizer),
        **measured,
    }


def pad_id_for_pooling(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the pad id of a saved reward model, never an EOS: transformers scores the rightmost non-padding id."""
    padding = choose_padding_token(tokenizer)
    return None if padding.source == "eos" else padding.pad_id
