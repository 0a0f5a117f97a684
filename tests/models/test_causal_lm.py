"""CausalLM against transformers' own logits, row by row and without padding."""

import math
from functools import partial

import pytest
import torch
from support.messages import naming
from support.tiny_models import COMMON, EOS, IDS, NUM_TOKENS, padded, random_rows, randomise
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from pipeline.configuration.flags import parse
from pipeline.data.batching import packed_sft_batch
from pipeline.errors import InputError
from pipeline.models.forward import causal_lm
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.forward.hidden_states import hidden_states
from pipeline.models.loading import backbone, load_causal_lm
from pipeline.models.partitions import mark_partitioned
from pipeline.tensor_ops import position_ids_from_mask
from step1_sft.config import SFTConfig
from step1_sft.eval import evaluate, forward_log_probs
from step1_sft.loss import token_sum_loss

TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def loaded(folder: str, attention: str = "auto") -> CausalLM:
    return CausalLM(load_causal_lm(folder, dtype=torch.float32, attn_implementation=attention))


def reference_log_probs(folder: str, row: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """(S - 1,) log-probabilities of the row's tokens but the first, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=row.unsqueeze(0)).logits[0, :-1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(row) - 1), row[1:]]


def every_next_token(mask: torch.Tensor) -> torch.Tensor:
    """(N, S - 1) bool, True where both a position and the next hold real tokens."""
    return mask[:, :-1] & mask[:, 1:]


@pytest.mark.parametrize("extra", [0, 6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_transformers_for_any_padding(causal_folder, extra, temperature):
    rows = random_rows(0)
    ids, mask = padded(rows, side="right", extra=extra)
    selected = every_next_token(mask)
    found = loaded(causal_folder)(ids, attention_mask=mask, selected=selected, temperature=temperature).log_probs
    assert found.dtype == torch.float32 and (found[~selected] == 0).all()
    for index, row in enumerate(rows):
        expected = reference_log_probs(causal_folder, row, temperature)
        torch.testing.assert_close(found[index][selected[index]], expected, **TOLERANCE)


def test_hidden_states_without_a_mask_equal_those_with_one(causal_folder, monkeypatch):
    """Real tokens never see what stands on their right: nothing is left for a mask to hide."""
    model, rows = loaded(causal_folder).model, random_rows(9, (11, 4, 8, 1, 2))
    ids, mask = padded(rows, side="right", extra=3)
    inner = backbone(model)
    positions = position_ids_from_mask(mask)
    masked = inner(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    seen, forward = [], type(inner).forward
    monkeypatch.setattr(
        type(inner), "forward", lambda self, **given: seen.append(given["attention_mask"]) or forward(self, **given)
    )
    found = hidden_states(model, ids, mask, None)
    assert seen == [None], "a mask would take attention off its flash kernel"
    torch.testing.assert_close(found[mask], masked[mask], rtol=1e-5, atol=1e-5)


def test_rows_padded_on_the_left_are_refused(causal_folder):
    """Their tokens would attend to the padding, because no mask is passed."""
    ids, mask = padded(random_rows(0), side="left", extra=0)
    with pytest.raises(ValueError, match="padded on the right"):
        loaded(causal_folder)(ids, attention_mask=mask, selected=every_next_token(mask))


def test_the_number_of_selected_tokens_changes_nothing(causal_folder):
    ids, mask = padded(random_rows(1), side="right", extra=2)
    selected, model = every_next_token(mask), loaded(causal_folder)
    counted = model(ids, attention_mask=mask, selected=selected).log_probs
    given = model(ids, attention_mask=mask, selected=selected, num_selected=int(selected.sum())).log_probs
    assert given.equal(counted)


def test_only_selected_tokens_are_given(causal_folder):
    ids, mask = padded(random_rows(1), side="right", extra=0)
    everywhere, model = every_next_token(mask), loaded(causal_folder)
    some = everywhere & (torch.arange(ids.shape[1] - 1) % 2 == 1)
    whole = model(ids, attention_mask=mask, selected=everywhere).log_probs
    found = model(ids, attention_mask=mask, selected=some).log_probs
    torch.testing.assert_close(found, torch.where(some, whole, 0), **TOLERANCE)


def test_entropy_is_that_of_the_whole_distribution_and_has_its_gradient(causal_folder):
    row = random_rows(2, (6,))[0]
    model = loaded(causal_folder)
    ids, mask = padded([row], side="right", extra=2)
    found = model(ids, attention_mask=mask, selected=every_next_token(mask), temperature=0.7, with_entropy=True)
    logits = model.model(input_ids=row.unsqueeze(0)).logits[0, :-1] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(found.entropy[0, :5], expected, **TOLERANCE)
    assert (found.entropy[0, 5:] == 0).all()
    weight = model.model.get_output_embeddings().weight
    mine, exact = (torch.autograd.grad(one.sum(), weight)[0] for one in (found.entropy, expected))
    torch.testing.assert_close(mine, exact, **TOLERANCE)
    assert exact.abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_equal_separate_rows(causal_folder, attention):
    samples = [{"ids": row.tolist(), "trained": [False] + [True] * (len(row) - 1)} for row in random_rows(3, (5, 7, 3))]
    model = loaded(causal_folder, attention)
    packed, _ = forward_log_probs(model, packed_sft_batch([samples[:2], samples[2:]], pad_id=EOS), packed=True)
    separate, _ = forward_log_probs(model, packed_sft_batch([[row] for row in samples], pad_id=EOS), packed=False)
    torch.testing.assert_close(packed[0, :4], separate[0, :4], **TOLERANCE)
    torch.testing.assert_close(packed[0, 5:11], separate[1, :6], **TOLERANCE)
    torch.testing.assert_close(packed[1, :2], separate[2, :2], **TOLERANCE)
    assert packed[0, 4] == 0  # a sample's first token is nobody's target


def test_packing_is_refused_where_attention_takes_no_mask():
    words = ["--model", "base", "--data-path", "rows.jsonl", "--packing", "true"]
    with pytest.raises(InputError, match=naming("--packing ... --attn-implementation flash_attention_2")):
        parse(SFTConfig, [*words, "--attn-implementation", "flash_attention_2"], section="sft")
    assert parse(SFTConfig, words, section="sft").config.data.packing


@pytest.mark.parametrize("partitioned", [False, True])
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("num_rows", [4, 2])
def test_chunked_head_equals_the_whole_one_with_gradients(causal_folder, monkeypatch, num_rows, stores, partitioned):
    """Logits of several pieces are computed again, or stored. With partitioned weights rows alone give their number."""
    ids, mask = padded(random_rows(4)[:num_rows], side="right", extra=1)
    selected, results = every_next_token(mask), []
    calls = []
    original = causal_lm.token_statistics
    monkeypatch.setattr(
        causal_lm, "token_statistics", lambda *parts, **given: calls.append(parts) or original(*parts, **given)
    )
    # Rows of NUM_TOKENS x ROW_TOKENS fp32 numbers: all of them in a piece, two, less than one. Or the tokens there are.
    row_bytes, count = NUM_TOKENS * causal_lm.ROW_TOKENS * 4, int(selected.sum())
    of_rows = ((10 * row_bytes, 1), (2 * row_bytes, num_rows // 2), (row_bytes // 2, num_rows))
    of_tokens = ((count * NUM_TOKENS * 4, 1), (5 * NUM_TOKENS * 4, -(-count // 5)), (1, count))
    for limit, pieces in of_rows if partitioned else of_tokens:
        monkeypatch.setattr(causal_lm, "PIECE_BYTES", limit)
        model = loaded(causal_folder)
        if partitioned:
            mark_partitioned(model.model.get_output_embeddings().weight)
        model.stores_logits = stores
        calls.clear()
        found = model(ids, attention_mask=mask, selected=selected, temperature=0.9, with_entropy=True)
        assert len(calls) == pieces
        (found.log_probs * torch.arange(1, found.log_probs.numel() + 1).view_as(found.log_probs)).sum().backward()
        results.append([found.log_probs, found.entropy, *[p.grad for p in model.parameters() if p.grad is not None]])
        assert len(calls) == pieces * (1 if stores or pieces == 1 else 2)
    for whole, *chunked in zip(*results, strict=True):
        for one in chunked:
            torch.testing.assert_close(one, whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_gradients_no_logits_are_made_twice(causal_folder, monkeypatch):
    monkeypatch.setattr(causal_lm, "PIECE_BYTES", 1)
    monkeypatch.setattr(causal_lm, "checkpoint", None)
    ids, mask = padded(random_rows(4), side="right", extra=1)
    model = loaded(causal_folder)
    assert model(ids, attention_mask=mask, selected=every_next_token(mask)).entropy is None


def test_more_chunks_than_tokens(causal_folder, monkeypatch):
    monkeypatch.setattr(causal_lm, "PIECE_BYTES", 1)
    ids, mask = padded(random_rows(5, (3, 1, 1, 1)), side="right", extra=0)
    found = loaded(causal_folder)(ids, attention_mask=mask, selected=every_next_token(mask)).log_probs
    expected = reference_log_probs(causal_folder, ids[0])
    torch.testing.assert_close(found[0], expected, **TOLERANCE)


def test_sft_loss_equals_transformers_own(causal_folder):
    rows = random_rows(6, (9, 5, 7))
    samples = [{"ids": row.tolist(), "trained": [i >= 3 for i in range(len(row))]} for row in rows]
    batch, model = packed_sft_batch([[row] for row in samples], pad_id=EOS), loaded(causal_folder)
    log_probs, trained = forward_log_probs(model, batch, packed=False)
    loss = token_sum_loss(log_probs, trained) / trained.sum()
    own = AutoModelForCausalLM.from_pretrained(causal_folder).eval()
    labels = torch.where(batch.trained_mask, batch.input_ids, -100)
    expected = own(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), labels=labels).loss
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    loss.backward()
    expected.backward()
    wanted = dict(own.named_parameters())
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-5)


def test_evaluation_is_the_mean_over_all_tokens_and_rows_that_fill_add_nothing(causal_folder):
    rows = random_rows(7, (9, 5, 7))
    samples = [{"ids": row.tolist(), "trained": [i >= 3 for i in range(len(row))]} for row in rows]
    packs = [[samples[0]], [samples[1]]], [[samples[2]], None]
    batches = [partial(packed_sft_batch, part, pad_id=EOS) for part in packs]
    found, kept = evaluate(loaded(causal_folder), batches, torch.device("cpu"))
    tokens = torch.cat([reference_log_probs(causal_folder, row)[2:] for row in rows])  # token 3 is number 2 predicted
    assert found["eval_loss"] == pytest.approx(-tokens.mean().item(), rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(math.exp(-tokens.mean().item()), rel=1e-5)
    assert kept["weight"] == [6, 2, 4] and found["eval_rows"] == 3
    by_row = [-part.mean().item() for part in tokens.split([6, 2, 4])]
    assert kept["eval_loss"] == pytest.approx(by_row, rel=1e-5)


def test_evaluation_without_rows_gives_no_number(causal_folder):
    assert evaluate(loaded(causal_folder), [], torch.device("cpu")) == ({}, {})


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**(COMMON | IDS), intermediate_size=48, head_dim=8, num_key_value_heads=2,
                     final_logit_softcapping=2.0),
        CohereConfig(**(COMMON | IDS), intermediate_size=48, logit_scale=0.25),
        GraniteConfig(**(COMMON | IDS), intermediate_size=48, logits_scaling=4.0),
    ],
    ids=["softcap", "scale", "divisor"],
)  # fmt: skip
def test_what_a_configuration_does_to_logits_is_done(config):
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    row = random_rows(8, (6,))[0].unsqueeze(0)
    everything = torch.ones(1, 5, dtype=torch.bool)
    found = CausalLM(model)(row, attention_mask=torch.ones_like(row, dtype=torch.bool), selected=everything).log_probs
    expected = model(input_ids=row).logits[:, :-1].float().log_softmax(-1).gather(-1, row[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found, expected, **TOLERANCE)
