"""Fields of config.json that the model's class does not know are ignored, as transformers' own forward pass does."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.decode_models import (
    KEY,
    PAD,
    eagerly,
    family,
    fused,
    generator_of,
    plain_logits,
    random_ids,
    random_prompts,
)
from support.families import WINDOW
from support.messages import naming

from pipeline.data.batching import block_diagonal_mask
from pipeline.generation.episodes import generate
from pipeline.generation.rollouts import Rollout, Sampling
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.tensor_ops import gather_log_probs, lengths_to_mask, pad_rows
from step1_sft.loss import token_sum_loss

Fields = dict[str, Any]
# Of Llama. A window is at work only where a layer is called sliding.
CASES: dict[str, Fields] = {
    "logit_scale": {"logit_scale": 0.25},
    "final_logit_softcapping": {"final_logit_softcapping": 0.1},
    "query_pre_attn_scalar": {"query_pre_attn_scalar": 0.01},
    "sliding_window": {"sliding_window": WINDOW},
    "layer_types": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW},
}
# Name: (family, fields) that only the fused backend reads, or another family has.
FUSED: dict[str, tuple[str, Fields]] = {name: ("llama-3", fields) for name, fields in CASES.items()} | {
    "layer_types of a family with a window": ("mistral", {"layer_types": ["full_attention", "full_attention"]}),
    "hidden_activation": ("llama-3", {"hidden_activation": "relu"}),
    "num_key_value_heads": ("gpt2", {"num_key_value_heads": 1}),
    "head_dim": ("opt", {"head_dim": 8}),
}
ROWS = random_ids((11, 4, 14))
PROMPTS = random_prompts((5, 9))
REQUEST: Fields = {"num_samples": 1, "sampling": Sampling(2, top_k=1), "key": KEY}


def padded_loss(model: CausalLM) -> torch.Tensor:
    lengths = torch.tensor([len(row) for row in ROWS])
    ids = pad_rows([torch.tensor(row) for row in ROWS], PAD)
    mask = lengths_to_mask(lengths, ids.shape[1])
    return token_sum_loss(model(ids, attention_mask=mask, selected=mask[:, 1:]).log_probs, mask[:, 1:])


def packed_loss(model: CausalLM) -> torch.Tensor:
    segments = torch.tensor([[n for n, row in enumerate(ROWS, 1) for _ in row]])
    positions = torch.tensor([[place for row in ROWS for place in range(len(row))]])
    trained = segments[:, 1:] == segments[:, :-1]
    mask = block_diagonal_mask(segments)
    ids = torch.tensor([sum(ROWS, [])])
    return token_sum_loss(model(ids, attention_mask=mask, position_ids=positions, selected=trained).log_probs, trained)


def plain_loss(model: Any) -> torch.Tensor:
    every = [gather_log_probs(plain_logits(model, row)[:-1], torch.tensor(row[1:])) for row in ROWS]
    return -torch.cat(every).sum()


def assert_greedy(model: Any, found: Rollout) -> None:
    """The responses are the likeliest tokens by the model's forward pass over whole rows, without a cache."""
    for prompt, response, log_probs in zip(PROMPTS, found.responses, found.log_probs, strict=True):
        logits = plain_logits(model, [*prompt.ids, *response.tolist()])[len(prompt.ids) - 1 : -1].cpu()
        assert logits.argmax(-1).tolist() == response.tolist()
        torch.testing.assert_close(log_probs, gather_log_probs(logits, response), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_transformers(name: str) -> None:
    model = family("llama-3", **CASES[name]).cpu()
    with torch.no_grad():
        for loss in (padded_loss, packed_loss):
            torch.testing.assert_close(loss(CausalLM(model)), plain_loss(model), rtol=1e-5, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FUSED)
def test_greedy_tokens_of_the_fused_backend_are_those_of_transformers(name: str) -> None:
    kind, fields = FUSED[name]
    model = family(kind, **fields)
    assert_greedy(model, generate(generator_of(fused(model), ends=()), PROMPTS, num_slots=2, **REQUEST))


@pytest.mark.parametrize("name", CASES)
def test_a_field_is_dropped_where_a_model_is_loaded_and_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' own caches read windows of a model that has none."""
    family("llama-3").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CASES[name] | {"kv_sharing_modes": None}))
    with caplog.at_level(logging.WARNING):
        model = load_causal_lm(str(tmp_path), dtype=torch.float32).eval()
    line = naming(f"{tmp_path}: config.json: {', '.join(sorted(CASES[name]))} ... LlamaConfig")
    assert [text for text in caplog.messages if "ignored" in text] == [line]
    for config in (model.config, model.source_config):
        assert not set(config.to_dict()) & {*CASES[name], "kv_sharing_modes"}
    assert_greedy(model, eagerly(model, PROMPTS, ends=(), **REQUEST))
