"""Packed rows by the bounds of their sequences: a kernel that is given them finds what dense masks and padding find.

The kernel runs on CUDA only (tests/gpu/test_cuda_packing.py); here a plain one takes its place.
"""

import pytest
import torch
from support.packed_rows import give_bounds, packed_model, plain_kernel
from support.tiny_models import EOS, NUM_TOKENS, random_rows, randomise, tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, MistralConfig

from pipeline.data.batching import packed_sft_batch
from pipeline.models.forward import packed_attention
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.forward.shared_prompts import PACKED_UNIT
from pipeline.models.loading import without_dropout
from pipeline.models.reward_model import TokenValueModel
from pipeline.tensor_ops import lengths_to_mask
from step1_sft.eval import forward_log_probs

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SAMPLES = [{"ids": row.tolist(), "trained": [False] + [True] * (len(row) - 1)} for row in random_rows(3, (9, 4, 7, 5))]
PACKS = [SAMPLES[:2], SAMPLES[2:], None]
LENGTHS = torch.tensor([9, 4, 17, 1, 12])


@pytest.fixture
def kernel():
    with plain_kernel() as seen:
        yield seen


def config_of(name: str):
    if name == "mistral":  # each token sees five: itself and four before it
        common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        return MistralConfig(vocab_size=NUM_TOKENS, intermediate_size=48, sliding_window=5, **common)
    return tiny_config(name)


def tiny(name: str, dtype: torch.dtype = torch.float32, auto_class=AutoModelForCausalLM):
    config = without_dropout(config_of(name))
    config.num_labels = 1
    model = auto_class.from_config(config, attn_implementation="sdpa")
    randomise(model, 1)
    return model.to(dtype)


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_and_gradients(model: CausalLM, batch, *, packed: bool):
    log_probs, trained = forward_log_probs(model, batch, packed=packed)
    loss = -log_probs[trained].sum()
    return loss, gradients_of(model, loss)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama"])
def test_bounds_give_what_dense_masks_give(kernel, name, recomputed):
    inner = tiny(name)
    model = CausalLM(inner).train()
    batch = packed_sft_batch(PACKS, pad_id=EOS)
    dense, dense_gradients = loss_and_gradients(model, batch, packed=True)
    alone, _ = loss_and_gradients(model, packed_sft_batch([[row] for row in SAMPLES], pad_id=EOS), packed=False)
    give_bounds(inner)
    if recomputed:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, gradients = loss_and_gradients(model, batch, packed=True)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    assert_same(gradients, dense_gradients)
    assert kernel.call_count == 2 * (1 + recomputed)


def padded_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """(5, 20) ids and mask; what stands at padding is a token like others."""
    ids = torch.randint(3, NUM_TOKENS, (5, 20), generator=torch.Generator().manual_seed(4))
    return ids, lengths_to_mask(LENGTHS, 20)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama", "mistral"])
def test_rows_without_their_padding_give_what_padded_rows_give(kernel, name, recomputed):
    """Log-probabilities, entropies and gradients of rows of 9, 4, 17, 1 and 12 tokens."""
    inner = tiny(name)
    model = CausalLM(inner).train()
    ids, mask = padded_rows()

    def run(**packed):
        found = model(ids, attention_mask=mask, selected=mask[:, 1:], with_entropy=True, **packed)
        return found, gradients_of(model, -found.log_probs.sum())

    wanted, wanted_gradients = run()
    give_bounds(inner)
    if recomputed:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, gradients = run(num_tokens=int(LENGTHS.sum()))
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.entropy, wanted.entropy, rtol=1e-4, atol=1e-5)
    assert_same(gradients, wanted_gradients)
    query, key, value, bounds, _ = kernel.call_args.args
    longest = kernel.call_args.kwargs["longest"]
    assert key.shape[1] == value.shape[1] == getattr(inner.config, "num_key_value_heads", query.shape[1]), "repeated"
    assert query.shape[0] == PACKED_UNIT and bounds.tolist() == [0, 9, 13, 30, 31, 43, 64] and longest == PACKED_UNIT
    assert kernel.call_args.kwargs["window"] == (4 if name == "mistral" else -1)


@pytest.mark.parametrize("name", sorted(packed_attention.PACKED_TYPES))
def test_every_known_architecture_keeps_its_rows_apart(kernel, name):
    """Built by transformers alone: what padded rows give, for each model type that is packed."""
    inner = packed_model(name)
    model = CausalLM(inner).train()
    ids, mask = padded_rows()
    wanted = model(ids, attention_mask=mask, selected=mask[:, 1:]).log_probs
    give_bounds(inner)
    found = model(ids, attention_mask=mask, selected=mask[:, 1:], num_tokens=int(LENGTHS.sum())).log_probs
    assert kernel.call_count == 4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_values_of_rows_without_their_padding(kernel):
    inner = tiny("opt", auto_class=AutoModelForSequenceClassification)
    model = TokenValueModel(inner, score_mean=0.3, score_std=2.0)
    ids, mask = padded_rows()
    wanted = model(ids, mask)
    give_bounds(inner)
    found = model(ids, mask, num_tokens=int(LENGTHS.sum()))
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-4, atol=1e-5)
    assert found.shape == (5, 20) and kernel.call_count == 2


def test_a_model_that_takes_no_bounds_pads(kernel):
    model = CausalLM(tiny("llama"))
    ids, mask = padded_rows()
    plain, packed = (model(ids, attention_mask=mask, selected=mask[:, 1:], num_tokens=n) for n in (None, 43))
    assert torch.equal(plain.log_probs, packed.log_probs) and not kernel.called


def test_other_masks_go_to_sdpa(kernel):
    """Evaluation pads its rows: the same model takes a plain mask, or none."""
    inner = tiny("llama")
    model, batch = CausalLM(inner), packed_sft_batch([[row] for row in SAMPLES], pad_id=EOS)
    wanted = forward_log_probs(model, batch, packed=False)[0]
    bare = inner(batch.input_ids[:1]).logits
    give_bounds(inner)
    assert torch.equal(forward_log_probs(model, batch, packed=False)[0], wanted)
    assert torch.equal(inner(batch.input_ids[:1]).logits, bare) and not kernel.called


def test_where_bounds_are_used(monkeypatch):
    def used(model, device=CUDA) -> bool:
        able = packed_attention.enable_packed_attention(model, device=device)
        assert packed_attention.uses_packed_attention(model.config) is able
        return able

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert used(tiny("opt", torch.bfloat16)) and used(tiny("llama", torch.float16))
    assert not used(tiny("opt", torch.bfloat16), CPU)
    assert not used(tiny("opt", torch.float32)), "the flash kernel has 16 bits only"
    eager = tiny("opt", torch.bfloat16)
    eager.set_attn_implementation("eager")
    assert (
        not packed_attention.enable_packed_attention(eager, device=CUDA)
        and eager.config._attn_implementation == "eager"
    )
    unknown = tiny("llama", torch.bfloat16)
    unknown.config.model_type = "deepseek_v3"
    assert not used(unknown)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not used(tiny("opt", torch.bfloat16)), "the kernel needs an Ampere device"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert not used(tiny("opt", torch.bfloat16))
