"""The loss and the reference point of KTO by hand and against TRL's trainer, and which responses are mismatched."""

import importlib.util
import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.messages import naming
from support.row_options import read

from pipeline.configuration.groups import ModelConfig
from pipeline.data.row_kinds import SAME_TOKENS, TokenizationOptions
from pipeline.data.templates import set_template
from step3_dpo.batches import Mismatched, Mismatches, partners_of
from step3_dpo.config import DPOConfig
from step3_dpo.loss import kto_loss, kto_point
from step3_dpo.rows import RESPONSES
from step3_dpo.stage import needs


def test_by_hand():
    """Beta (r - z0) is ln 3 for the good response and -ln 3 for the bad one: both lose 1/4 of their weights."""
    ratios, labels = (
        torch.tensor([2 * math.log(3) + 1, 1 - 2 * math.log(3), math.nan]),
        torch.tensor([True, False, True]),
    )
    ratios.requires_grad_(True)
    weights = torch.tensor([1.0, 2.0, 0.0])
    loss = kto_loss(ratios, labels, weights, z0=1.0, beta=0.5, desirable_weight=3.0, undesirable_weight=0.5)
    assert loss.item() == pytest.approx(3 / 4 + 2 * 0.5 / 4)
    (gradient,) = torch.autograd.grad(loss, ratios)
    assert gradient[0] < 0 < gradient[1] and gradient[2] == 0


def test_the_reference_point_is_a_mean_that_is_never_below_0():
    assert kto_point(6.0, 4) == 1.5 and kto_point(-6.0, 4) == 0 and kto_point(0.0, 0) == 0
    assert math.isnan(kto_point(math.nan, 4)), "the step is skipped"


@pytest.mark.parametrize("shift", [0.4, -0.4])
def test_loss_gradient_and_reference_point_are_those_of_trl(shift):
    """TRL's method on a stand-in of its trainer, for one micro-batch; z0 is above 0, or held at it."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("TRL is not installed, whose trainer these numbers are compared with")
    from trl import KTOTrainer

    generator = torch.Generator().manual_seed(1)
    policy = (-torch.rand(6, 9, generator=generator)).requires_grad_(True)
    behind_others = -torch.rand(6, 9, generator=generator)
    mask = torch.zeros(6, 10, dtype=torch.bool)
    for row, (start, end) in enumerate([(2, 10), (3, 7), (4, 5), (2, 6), (3, 10), (4, 9)]):
        mask[row, start:end] = True
    counted, mask_of_others = mask[:, 1:], mask.roll(1, 0)
    reference = (policy.detach() * counted).sum(1) + torch.randn(6, generator=generator)
    reference_of_others = (
        (behind_others * mask_of_others[:, 1:]).sum(1) - shift + torch.randn(6, generator=generator) / 9
    )
    labels = torch.tensor([True, False, False, True, True, False])
    zeros = torch.zeros(6, 9)

    def outputs(input_ids, **_):
        log_probs, own = (policy, counted) if input_ids[0, 0] else (behind_others, mask_of_others[:, 1:])
        # TRL's head gives 0 where a label is masked.
        return SimpleNamespace(log_probs=log_probs * own, entropy=zeros, mean_logits=zeros)

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, beta=0.3, aux_loss_enabled=False,
        precompute_ref_logps=True, calculate_KL=True, loss_type="kto", desirable_weight=1.3, undesirable_weight=0.6,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
    )  # fmt: skip
    trainer._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch)
    ids = torch.ones(6, 10, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": mask.long(), "label": labels}
    inputs |= {"KL_input_ids": 0 * ids, "KL_attention_mask": ids, "KL_completion_mask": mask_of_others.long()}
    inputs |= {"ref_logps": reference, "ref_KL_logps": reference_of_others}
    theirs = KTOTrainer._compute_loss(trainer, outputs, inputs, False)
    (expected,) = torch.autograd.grad(theirs, policy)

    mismatched = (behind_others * mask_of_others[:, 1:]).sum(1) - reference_of_others
    z0 = kto_point(mismatched.double().sum().item(), 6)
    assert (z0 > 0.1) == (shift > 0) and z0 == pytest.approx(trainer._metrics["eval"]["kl"][0], abs=1e-6)
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    ratios = (policy * counted).sum(1) - reference
    ours = kto_loss(ratios, labels, torch.ones(6), z0=z0, beta=0.3, **weights) / 6
    (found,) = torch.autograd.grad(ours, policy)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def labelled_rows(hashes: list[int]) -> Dataset:
    """Rows of a prompt of n + 1 tokens n, and a response of two tokens 10 n."""
    rows = [
        {"ids": [n] * (n + 1) + [10 * n] * 2, "prompt_length": n + 1, "label": n % 2 == 0, "row_hash": number}
        for n, number in enumerate(hashes)
    ]
    return Dataset.from_list([{**row, "num_tokens": len(row["ids"])} for row in rows])


def test_a_row_has_the_response_of_the_one_before_it_in_its_step():
    rows = labelled_rows([50, 20, 90, 70, 10])
    assert partners_of(rows, [np.array([3, 0, 1]), np.array([4, 2])]).tolist() == [1, 3, 4, 0, 2]
    part = Mismatched(rows, partners_of(rows, [np.arange(5)]), limit=5)
    assert part[0] == {**rows[0], "ids": [0, 10, 10]} and part[3] == {**rows[3], "ids": [3, 3, 3, 3, 0]}, (
        "the last is cut"
    )
    assert part.lengths.tolist() == [[len(part[number]["ids"])] for number in range(5)]


def test_copies_of_a_row_have_the_response_of_another_row():
    """As in data that compare many models with the same one, whose response to a prompt is there many times."""
    rows = labelled_rows([50, 20, 50, 50, 10, 20])
    assert partners_of(rows, [np.arange(6)]).tolist() == [1, 4, 1, 1, 0, 4]
    assert partners_of(rows, [np.array([3, 0]), np.array([5, 2, 1, 4])]).tolist() == [3, 4, 5, 3, 2, 4]


@pytest.mark.parametrize("order", [[4, 2, 0, 1, 3], [1, 3, 4, 0, 2]])
def test_the_order_of_the_rows_of_a_step_changes_no_mismatch(order):
    settings = {"seed": 3, "rows_per_step": 5, "num_epochs": 2, "limit": 90}
    rows = labelled_rows([50, 20, 90, 70, 10])
    moved = rows.select(order)
    texts = [
        {tuple(part[number]["ids"]) for number in range(5)}
        for data in (rows, moved)
        for part in Mismatches.of(data, data, **settings).parts().values()
    ]
    assert len(texts) == 6 and all(text == texts[0] and len(text) == 5 for text in texts)
    steps = Mismatches.of(rows, rows, **settings | {"rows_per_step": 2}).epochs
    assert sorted(steps[0].partners.tolist()) == [0, 1, 2, 3, 4] and steps[0].partners.tolist() != texts


def test_rows_are_labelled_responses_and_both_sides_of_pairs(bpe_tokenizer):
    set_template(bpe_tokenizer, "auto")
    answer = [{"role": "assistant", "content": "Boil."}]
    records, counts = read(
        {"prompt": "tea?", "completion": "Boil.", "label": True},
        {"prompt": [{"role": "user", "content": "tea?"}], "completion": answer, "label": False},
        {"prompt": "tea?", "chosen": "Boil.", "rejected": "No."},
        {"prompt": "tea?", "chosen": "Boil.", "rejected": "Boil. "},
        {"prompt": "tea?", "completion": "Boil."},
        {"prompt": "tea?", "completion": "Boil.", "label": 1},
        {"prompt": "tea?"},
        {"prompt": "tea?", "completion": "long " * 99, "label": "True"},
    )
    options = TokenizationOptions(max_seq_len=60)
    rows = list(RESPONSES.rows(records, bpe_tokenizer, options, counts))
    texts = [(bpe_tokenizer.decode(row.ids[row.prompt_length :]), row.label) for row in rows]
    assert texts == [(" Boil.</s>", True), (" Boil.</s>", False), (" Boil.</s>", True), (" No.</s>", False)]
    assert len({row.row_hash for row in rows}) == 3 and rows[0] == rows[2], "the label is part of the hash"
    assert {kind: counts[kind] for kind in counts} == {
        "chosen equals rejected": 1, "response longer than max_seq_len": 1,
        "no labelled response: columns chosen and rejected are needed, or a response and label (true or false)": 2,
        "label is not a boolean: use true or false": 1,
    }  # fmt: skip
    assert naming("1 dropped: label ... true or false (first: f:6, got 1)") in counts.lines()


def test_the_planner_counts_the_forward_pass_over_mismatches():
    config = DPOConfig(method="kto", model=ModelConfig(model_name_or_path="base"))
    train, evaluation = (needs(config, {}, "fp32", 1).phases[name] for name in ("train", "evaluate"))
    assert [(one.trains, one.rows) for one in train] == [(True, train[0].rows), (False, train[0].rows)]
    pairs = needs(config.model_copy(update={"method": "dpo"}), {}, "fp32", 1).phases
    assert len(pairs["train"]) == 1 and pairs["evaluate"][0].rows == 2 * evaluation[0].rows


def test_long_responses_are_cut_as_pairs_are(bpe_tokenizer):
    set_template(bpe_tokenizer, "auto")
    records, counts = read({"prompt": "tea " * 40, "completion": "Boil.", "label": False})
    options = TokenizationOptions(max_seq_len=30, long_pairs="truncate_left")
    (row,) = RESPONSES.rows(records, bpe_tokenizer, options, counts)
    assert len(row.ids) == 30 and bpe_tokenizer.decode(row.ids).endswith("Assistant: Boil.</s>")
    assert counts["start of the prompt"] == 1 and SAME_TOKENS not in list(counts)
