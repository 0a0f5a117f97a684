"""Rows that share their first tokens give what rows of their own give: values, gradients, and fewer tokens.

The kernel runs on CUDA only (tests/gpu/test_cuda_packing.py); here a plain one takes its place.
"""

import pytest
import torch
from support.packed_rows import give_bounds, packed_model, plain_kernel
from support.tiny_models import EOS, NUM_TOKENS
from test_packed_attention import assert_same, gradients_of, tiny
from transformers import AutoModelForSequenceClassification

from pipeline.data.batching import pair_batch
from pipeline.models.forward import packed_attention
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.forward.shared_prompts import PACKED_UNIT, Copies, SharedPrompts, settings_of_pairs
from pipeline.models.reward_model import TokenValueModel
from pipeline.tensor_ops import lengths_to_mask
from step2_reward.pair_scores import batch_loss
from step3_dpo.batches import pair_responses, response_log_probs

PROMPTS = torch.tensor([7, 30, 7, 3, 30, 30])
LENGTHS = torch.tensor([9, 41, 20, 12, 31, 33])
GROUPS = torch.tensor([5, 2, 5, 9, 2, 2])  # three rows of a prompt of 30 tokens, two of one of 7, and one of its own
SHARED = 7 + 30 + 30


@pytest.fixture
def kernel():
    with plain_kernel() as seen:
        yield seen


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """(6, 41) ids and mask; rows of one group begin with the same prompt, and padding holds tokens like others."""
    ids = torch.randint(3, NUM_TOKENS, (6, 41), generator=torch.Generator().manual_seed(4))
    for row, group in enumerate(GROUPS.tolist()):
        owner = GROUPS.tolist().index(group)
        ids[row, : PROMPTS[row]] = ids[owner, : PROMPTS[row]]
    return ids, lengths_to_mask(LENGTHS, 41)


def shared() -> SharedPrompts:
    return SharedPrompts.of_groups(GROUPS, PROMPTS, num_tokens=SHARED)


def test_who_computes_what():
    found = shared()
    assert found.owners.tolist() == [0, 1, 0, 3, 1, 1] and found.lengths.tolist() == [0, 0, 7, 0, 30, 30]
    assert int(found.passing(rows()[1]).sum()) == LENGTHS.sum() - SHARED


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama", "mistral"])
def test_shared_prompts_give_what_padded_rows_give(kernel, name, recomputed):
    """All tokens count, the prompts' too: log-probabilities, entropies and gradients of six rows of three groups."""
    inner = tiny(name)
    model = CausalLM(inner).train()
    ids, mask = rows()

    def run(**packed):
        found = model(ids, attention_mask=mask, selected=mask[:, 1:], with_entropy=True, **packed)
        weights = torch.linspace(0.5, 2.0, found.log_probs.numel()).view_as(found.log_probs)  # rows pull apart
        return found, gradients_of(model, -(found.log_probs * weights).sum())

    wanted, wanted_gradients = run()
    give_bounds(inner)
    if recomputed:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, gradients = run(num_tokens=int(LENGTHS.sum()), shared=shared())
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.entropy, wanted.entropy, rtol=1e-4, atol=1e-5)
    assert_same(gradients, wanted_gradients)
    query, key, *_ = kernel.call_args.args
    assert len(query) == 2 * PACKED_UNIT < len(key) == 4 * PACKED_UNIT, "79 of 146 tokens pass"
    assert kernel.call_args.kwargs["window"] == (4 if name == "mistral" else -1)


@pytest.mark.parametrize("name", sorted(packed_attention.PACKED_TYPES))
def test_every_known_architecture_reads_the_keys_of_shared_prompts(kernel, name):
    inner = packed_model(name)
    model = CausalLM(inner).train()
    ids, mask = rows()
    wanted = model(ids, attention_mask=mask, selected=mask[:, 1:]).log_probs
    give_bounds(inner)
    packed = {"num_tokens": int(LENGTHS.sum()), "shared": shared()}
    found = model(ids, attention_mask=mask, selected=mask[:, 1:], **packed).log_probs
    assert kernel.call_count == 4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_values_of_rows_that_share_prompts(kernel):
    inner = tiny("opt", auto_class=AutoModelForSequenceClassification)
    model = TokenValueModel(inner, score_mean=0.3, score_std=2.0)
    ids, mask = rows()
    wanted = model(ids, mask)
    give_bounds(inner)
    found = model(ids, mask, num_tokens=int(LENGTHS.sum()), shared=shared())
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-4, atol=1e-5)


PAIRS = [  # of 12 and 3 tokens of prompt; the responses of the second begin alike
    {"chosen_ids": [3, *range(4, 15), 5, 6, 1], "rejected_ids": [3, *range(4, 15), 7, 1], "prompt_length": 12},
    {"chosen_ids": [3, 8, 9, 5, 6, 7, 1], "rejected_ids": [3, 8, 9, 5, 6, 9, 9, 9, 1], "prompt_length": 3},
]


@pytest.mark.parametrize("margin", [None, 0.5])
def test_pairs_pass_their_prompts_once(kernel, margin):
    """Log-probabilities of DPO's responses, and losses of a reward model, with their gradients."""
    pairs = [row | {"margin": margin or 0.0} for row in PAIRS]
    if margin is None:
        inner, batch = tiny("llama"), pair_responses([[pairs[0]], None, [pairs[1]]], pad_id=EOS)
        model = CausalLM(inner).train()
    else:
        inner, batch = tiny("llama", auto_class=AutoModelForSequenceClassification), pair_batch(pairs, pad_id=EOS)
        model = TokenValueModel(inner).train()

    def run():
        if margin is None:
            found = response_log_probs(model, batch)
            return found, gradients_of(model, (found * torch.arange(1.0, 7.0)).sum())
        values = model(batch.input_ids, batch.attention_mask, **settings_of_pairs(batch.shared))
        found = batch_loss(values, batch, per_token=False, centering_coef=0.1)
        return found, gradients_of(model, found)

    assert batch.shared is not None and batch.shared.num_shared == 12 + 5
    wanted, wanted_gradients = run()
    assert not kernel.called
    give_bounds(inner)
    found, gradients = run()
    assert kernel.called and len(kernel.call_args.args[1]) > len(kernel.call_args.args[0])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert_same(gradients, wanted_gradients)


def test_the_sums_of_copies_are_exact_in_16_bits():
    """In bf16 1 + 2**-8 is 1: a sum of 1 and 256 of these is 2 in fp32, and stays 1 if it is rounded each time."""
    index = torch.tensor([2] + [0] * 257 + [1])
    copies = Copies.of(index, 4, index[:0], torch.zeros(2, dtype=torch.int32))
    assert copies.starts.tolist() == [0, 257, 258, 259, 259] and copies.index[copies.order].tolist() == sorted(index)
    values = torch.zeros(4, 3, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((259, 3), 2.0**-8, dtype=torch.bfloat16)
    weights[1] = 1.0
    (copies.copied(values) * weights).sum().backward()
    assert values.grad[:, 0].tolist() == [2.0, 2.0**-8, 2.0**-8, 0.0]


def test_a_model_that_takes_no_bounds_pads(kernel):
    model = CausalLM(tiny("llama"))
    ids, mask = rows()
    plain = model(ids, attention_mask=mask, selected=mask[:, 1:])
    found = model(ids, attention_mask=mask, selected=mask[:, 1:], num_tokens=int(LENGTHS.sum()), shared=shared())
    assert torch.equal(plain.log_probs, found.log_probs) and not kernel.called


def test_a_model_that_drops_the_copies_is_no_silent_error(kernel, monkeypatch):
    """Without the keys of its prompt a row would attend to its answer alone."""
    inner = tiny("llama")
    give_bounds(inner)
    plain = packed_attention.packed_attention

    def drops(*args, key_copies=None, **settings):
        return plain(*args, **settings)

    monkeypatch.setitem(packed_attention.AttentionInterface._global_mapping, packed_attention.NAME, drops)
    ids, mask = rows()
    with pytest.raises(AssertionError, match="key_copies"):
        CausalLM(inner)(ids, attention_mask=mask, selected=mask[:, 1:], num_tokens=int(LENGTHS.sum()), shared=shared())
