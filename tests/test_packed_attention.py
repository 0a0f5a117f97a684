"""Packed rows by the bounds of their samples: a kernel that is given them finds what dense masks find.

The kernel runs on CUDA only (tests/gpu/test_cuda_packing.py); here a plain one takes its place.
"""

import pytest
import torch
from tiny_models import EOS, random_rows, randomise, tiny_config
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from pipeline import packed_attention
from pipeline.causal_lm import CausalLM
from pipeline.data.batching import packed_sft_batch, sft_batch
from pipeline.modeling import without_dropout
from step1_sft.eval import forward_log_probs

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SAMPLES = [{"ids": row.tolist(), "trained": [False] + [True] * (len(row) - 1)} for row in random_rows(3, (9, 4, 7, 5))]
PACKS = [SAMPLES[:2], SAMPLES[2:], None]


def plain_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """varlen_attn by the book: (T, H, D) each, causal within [bounds[i], bounds[i + 1])."""
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32 and window_size == (-1, 0)
    bounds = cu_seq_q.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(query) and query.shape == key.shape == value.shape
    runs = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert max(run.stop - run.start for run in runs) <= min(max_q, max_k)
    parts = [[states[run].transpose(0, 1) for states in (query, key, value)] for run in runs]
    found = [scaled_dot_product_attention(*part, is_causal=True, scale=scale) for part in parts]
    return torch.cat([part.transpose(0, 1) for part in found])


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(packed_attention, "varlen_attn", plain_kernel)


def tiny(name: str, dtype: torch.dtype = torch.float32):
    config = without_dropout(tiny_config(name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    randomise(model, 1)
    return model.to(dtype)


def loss_and_gradients(model: CausalLM, batch, *, packed: bool):
    model.zero_grad()
    log_probs, trained = forward_log_probs(model, batch, packed=packed)
    loss = -log_probs[trained].sum()
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama"])
def test_bounds_give_what_dense_masks_give(kernel, name, recomputed):
    inner = tiny(name)
    model = CausalLM(inner).train()
    batch = packed_sft_batch(PACKS, pad_id=EOS, length=18)
    dense, dense_gradients = loss_and_gradients(model, batch, packed=True)
    alone, _ = loss_and_gradients(model, sft_batch(SAMPLES, pad_id=EOS), packed=False)
    inner.set_attn_implementation(packed_attention.NAME)
    if recomputed:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, gradients = loss_and_gradients(model, batch, packed=True)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == dense_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, dense_gradients[key], rtol=1e-4, atol=1e-4)


def test_other_masks_go_to_sdpa(kernel):
    """Evaluation pads its rows: the same model takes a plain mask, or none."""
    inner = tiny("llama")
    model, batch = CausalLM(inner), sft_batch(SAMPLES, pad_id=EOS)
    wanted = forward_log_probs(model, batch, packed=False)[0]
    bare = inner(batch.input_ids[:1]).logits
    inner.set_attn_implementation(packed_attention.NAME)
    assert torch.equal(forward_log_probs(model, batch, packed=False)[0], wanted)
    assert torch.equal(inner(batch.input_ids[:1]).logits, bare)


def test_where_bounds_are_used(monkeypatch):
    def used(model, device=CUDA) -> bool:
        able = packed_attention.keep_apart(model, device=device)
        assert (model.config._attn_implementation == packed_attention.NAME) is able
        return able

    def windows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)): ...
    def no_windows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False): ...

    monkeypatch.setattr(packed_attention, "varlen_attn", windows)
    assert used(tiny("opt", torch.bfloat16)) and used(tiny("llama", torch.float16))
    assert not used(tiny("opt", torch.bfloat16), CPU)
    assert not used(tiny("opt", torch.float32)), "the flash kernel has 16 bits only"
    eager = tiny("opt", torch.bfloat16)
    eager.set_attn_implementation("eager")
    assert not packed_attention.keep_apart(eager, device=CUDA) and eager.config._attn_implementation == "eager"
    for absent in (no_windows, None):
        monkeypatch.setattr(packed_attention, "varlen_attn", absent)
        assert not used(tiny("opt", torch.bfloat16))
