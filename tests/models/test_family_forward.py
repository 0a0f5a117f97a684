"""Log-probabilities, values and scores of every family against transformers' own forward pass, in fp32.

Rows are longer than the windows. The reference computes one row at a time without padding, cache or adapter layers.
"""

from typing import Any

import pytest
import torch
from support.decode_models import random_weights
from support.families import FAMILIES, family_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from pipeline.data.batching import block_diagonal_mask
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.lora import add_lora, linear_names
from pipeline.models.reward_model import TokenValueModel, last_token_scores
from pipeline.tensor_ops import lengths_to_mask, pad_rows

NUM_TOKENS = 61
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
LENGTHS = (11, 4, 14, 2)
SCORED = [
    name for name in FAMILIES if type(family_config(name, NUM_TOKENS)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
]


def make_model(name: str, auto_class: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    return random_weights(auto_class.from_config(family_config(name, NUM_TOKENS, **changes))).cpu()


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, NUM_TOKENS, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def plain_log_probs(model: Any, row: torch.Tensor) -> torch.Tensor:
    """(S - 1,) of the row's tokens after the first, by transformers alone."""
    every = model(input_ids=row.unsqueeze(0)).logits[0].float().log_softmax(-1)
    return every[:-1].gather(1, row[1:].unsqueeze(1)).squeeze(1)


@torch.no_grad()
def padded_log_probs(model: Any) -> list[torch.Tensor]:
    ids = pad_rows(rows(), 1, length=max(LENGTHS) + 3)
    mask = lengths_to_mask(torch.tensor(LENGTHS), ids.shape[1])
    found = CausalLM(model)(ids, attention_mask=mask, selected=mask[:, 1:]).log_probs
    return [row[: length - 1] for row, length in zip(found, LENGTHS, strict=True)]


def assert_rows(actual: list[torch.Tensor], model: Any) -> None:
    for row, log_probs in zip(rows(), actual, strict=True):
        torch.testing.assert_close(log_probs, plain_log_probs(model, row), **TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_of_padded_rows(name: str) -> None:
    model = make_model(name)
    assert_rows(padded_log_probs(model), model)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"bloom"}))  # refused (test_families.py)
def test_log_probabilities_of_packed_rows(name: str) -> None:
    """Sequences of one row do not see each other, and see their own tokens as far as the window reaches."""
    model = make_model(name)
    ids = torch.cat(rows()).unsqueeze(0)
    segments = torch.repeat_interleave(torch.arange(1, 1 + len(LENGTHS)), torch.tensor(LENGTHS)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    with torch.no_grad():
        found = CausalLM(model)(
            ids, attention_mask=block_diagonal_mask(segments), position_ids=positions,
            selected=segments[:, 1:] == segments[:, :-1],
        ).log_probs[0]  # fmt: skip
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    actual = [found[start : start + length - 1] for start, length in zip(starts, LENGTHS, strict=False)]
    assert_rows(actual, model)


@pytest.mark.parametrize("name", SCORED)
def test_values_and_scores(name: str) -> None:
    """The value after a token is transformers' score of the row that ends there."""
    model = make_model(name, AutoModelForSequenceClassification, num_labels=1)
    ids = pad_rows(rows(), 1)
    lengths = torch.tensor(LENGTHS)
    with torch.no_grad():
        values = TokenValueModel(model)(ids, lengths_to_mask(lengths, ids.shape[1]))
        for row, found, score in zip(rows(), values, last_token_scores(values, lengths), strict=True):
            expected = torch.cat([model(input_ids=row[None, : end + 1]).logits[0] for end in range(len(row))])
            torch.testing.assert_close(found[: len(row)], expected, **TOLERANCE)
            assert score == found[len(row) - 1]


LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
FUSED_QKV = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
ADAPTED = dict.fromkeys(FAMILIES, LLAMA) | {
    "phi-3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "phi-4-mini": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "pythia": FUSED_QKV,
    "bloom": FUSED_QKV,
    "opt": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
    # Experts are tensors of three dimensions, not layers.
    "qwen3-moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "olmoe": {"q_proj", "k_proj", "v_proj", "o_proj"},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_lora_adapts_every_linear_layer_and_merges_to_the_same_function(name: str) -> None:
    model = make_model(name)
    assert {layer.split(".")[-1] for layer in linear_names(model, "all-linear")} == ADAPTED[name]
    before = padded_log_probs(model)
    options: dict[str, Any] = {"dim": 2, "alpha": 4, "dropout": 0.0, "only_lora": True, "seed": 0}
    wrapped = add_lora(model, module_name="all-linear", task="CAUSAL_LM", **options)
    for parameter, start in zip(padded_log_probs(wrapped), before, strict=True):
        assert parameter.equal(start)  # B is zero
    with torch.no_grad():
        for key, parameter in wrapped.named_parameters():
            if "lora_B" in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(key))))
    unmerged = padded_log_probs(wrapped)
    assert (unmerged[0] - before[0]).abs().max() > 1e-2
    assert_rows(unmerged, wrapped.merge_and_unload())
