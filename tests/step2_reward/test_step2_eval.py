"""Scores of held-out pairs and the command that reports them."""

import json
import math
import re

import pytest
import torch
import transformers
from support.messages import naming
from support.tiny_models import EOS, random_rows, save_tiny
from support.tiny_run import write_lines
from transformers import AutoModelForSequenceClassification

from pipeline.data.batching import PairBatch, pair_batch
from pipeline.data.counts import Counts
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource
from step2_reward.config import RewardConfig
from step2_reward.eval import main
from step2_reward.loss import bradley_terry_loss, per_token_loss
from step2_reward.pair_scores import (
    PairScores,
    batch_loss,
    lines,
    pair_collator,
    report,
    score_pairs,
    score_statistics,
    summary,
)

CPU = torch.device("cpu")


def pair_rows() -> list[dict]:
    prompts, chosen, rejected = random_rows(0, (3, 2, 4)), random_rows(1, (4, 1, 2)), random_rows(2, (2, 3, 2))
    return [
        {"chosen_ids": [*p.tolist(), *c.tolist(), EOS], "rejected_ids": [*p.tolist(), *r.tolist(), EOS],
         "prompt_length": len(p), "margin": 0.5 * n}
        for n, (p, c, r) in enumerate(zip(prompts, chosen, rejected, strict=True))
    ]  # fmt: skip


def raw_score(folder: str, ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits.item()


def test_pairs_are_scored_at_their_last_token(reward_folder):
    rows = pair_rows()
    collate = pair_collator(EOS)
    batches = [lambda: collate([[rows[0]], [rows[1]]]), lambda: collate([[rows[2]], None])]
    found = score_pairs(load_reward_model(ModelSource(reward_folder), dtype=torch.float32), batches, CPU)
    for side, scores in (("chosen_ids", found.chosen), ("rejected_ids", found.rejected)):
        expected = [raw_score(reward_folder, row[side]) for row in rows]
        assert scores.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert found.chosen_lengths.tolist() == [5, 2, 3] and found.rejected_lengths.tolist() == [3, 4, 3]
    margins = [c - r - row["margin"] for c, r, row in zip(found.chosen, found.rejected, rows, strict=True)]
    assert found.loss == pytest.approx(sum(math.log1p(math.exp(-m)) for m in margins) / 3, rel=1e-5)


def test_no_pairs_give_no_numbers(reward_folder):
    found = score_pairs(load_reward_model(ModelSource(reward_folder), dtype=torch.float32), [], CPU)
    assert summary(found) == {} and score_statistics(found) == (0.0, 1.0)


def test_the_loss_is_the_one_of_the_flag():
    batch = pair_batch(pair_rows(), pad_id=EOS)
    values = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(0))
    last = [values[n, batch.lengths[n] - 1] for n in range(6)]
    chosen, rejected = torch.stack(last[:3]), torch.stack(last[3:])
    expected = bradley_terry_loss(chosen, rejected, batch.weights, margins=batch.margins, centering_coef=0.1)
    torch.testing.assert_close(batch_loss(values, batch, per_token=False, centering_coef=0.1), expected)
    lengths = batch.lengths
    expected = per_token_loss(
        values[:3], values[3:], batch.input_ids[:3], batch.input_ids[3:], lengths[:3], lengths[3:], batch.weights
    )
    torch.testing.assert_close(batch_loss(values, batch, per_token=True, centering_coef=0.0), expected)


def scores_of(chosen: list[float], rejected: list[float]) -> PairScores:
    sides = torch.tensor(chosen), torch.tensor(rejected)
    return PairScores(*sides, torch.ones(len(chosen)), torch.ones(len(chosen)), loss=0.25)


def test_summary_by_hand():
    # Right, wrong, tie: (1 + 0 + 0.5) / 3; margins 2, -1, 0.
    found = summary(scores_of([3.0, 0.0, 1.0], [1.0, 1.0, 1.0]))
    assert found == pytest.approx(
        {"eval_loss": 0.25, "eval_accuracy": 0.5, "eval_margin": 1 / 3, "eval_mean_chosen_score": 4 / 3,
         "eval_mean_rejected_score": 1.0, "eval_rows": 3}
    )  # fmt: skip


def test_score_statistics_by_hand():
    # 1, 3, 5, 7: mean 4, population variance 5. Scores without spread normalise nothing.
    assert score_statistics(scores_of([1.0, 7.0], [3.0, 5.0])) == pytest.approx((4.0, math.sqrt(5)))
    assert score_statistics(scores_of([2.0], [2.0])) == (0.0, 1.0)


def test_the_margin_of_a_filling_row_is_harmless():
    batch: PairBatch = pair_collator(EOS)([[pair_rows()[0]], None])
    assert batch.weights.tolist() == [1.0, 0.0]
    values = torch.zeros(batch.input_ids.shape)
    values[1] = values[3] = math.nan
    assert batch_loss(values, batch, per_token=False, centering_coef=0.0).item() == pytest.approx(math.log(2))
    assert RewardConfig().reward_loss == "last_token"


NUM_PAIRS = 40


@pytest.fixture
def judge(bpe_folder, tmp_path, monkeypatch) -> str:
    """A tiny reward model; the folder beside it holds pairs of which the longer one is always chosen."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_tiny("llama", bpe_folder, tmp_path / "reward", reward=True, max_position_embeddings=256)
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}"
                "{{ eos_token }}{% endif %}{% endfor %}"}  # fmt: skip
    config = tmp_path / "reward" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | template))
    rows = [{"prompt": f"What is {n}?", "chosen": f"It is {n} and more.", "rejected": "No."} for n in range(NUM_PAIRS)]
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "test_x.jsonl", rows)
    return folder


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_reports_on_held_out_pairs(judge, tmp_path, capsys, as_json):
    pairs = str(tmp_path / "data" / "test_x.jsonl")
    argv = [judge, "--data-path", pairs, "--eval-fraction", "0.5", "--max-seq-len", "128"]
    transformers.logging.enable_progress_bar()
    assert main([*argv, "--json-output"] if as_json else argv) == 0
    shown, err = capsys.readouterr()
    assert "Loading weights" not in err
    if not as_json:
        assert "accuracy" in shown and "shorter response" not in shown
        verdict, last = shown.splitlines()[-2:]
        assert verdict == naming("NOT shown ... 'longer wins'")
        assert re.fullmatch(rf"scored \d+ of {NUM_PAIRS} pairs; \d+ .* not held out \(first: .*\)", last)
        return
    found = json.loads(shown)
    assert (
        10 <= found["pairs"] <= 30
        and found["pairs_given"] == NUM_PAIRS
        and found["trivial_rules"]["longer wins"]["mean"] == 1.0
    )
    assert lines(found)[0].split()[0] == "accuracy"
    weighted = [v["mean"] * v["count"] for v in found["accuracy_by_length"].values()]
    assert sum(weighted) / found["pairs"] == pytest.approx(found["accuracy"]["mean"])
    gain = found["verdict"]["gain"]["mean"]
    assert gain == pytest.approx(found["accuracy"]["mean"] - 1.0) and not found["verdict"]["is_better"]


@pytest.mark.parametrize(("num_right", "is_told"), [(0, True), (5, True), (16, False), (40, False)])
def test_a_model_of_length_is_told_what_helps(num_right, is_told):
    """Of 40 pairs whose shorter answer is the chosen one: 16 are 1.3 standard errors below the half, 5 are 4.7."""
    chosen = torch.tensor([1.0] * num_right + [-1.0] * (40 - num_right))
    lengths = torch.tensor([5.0] * 40), torch.tensor([9.0] * 40)
    scores = PairScores(chosen, -chosen, *lengths, 0.0)
    shown = "\n".join(lines(report(scores, (["short"] * 40, ["much longer"] * 40), Counts())))
    assert (shown == naming("longer responses ... --balance-lengths true")) == is_told


@pytest.mark.parametrize(
    "words",
    [
        "--data-path data/test_x.jsonl --eval-data-path data/test_x.jsonl",
        "--data-path data/test_x.jsonl --eval-fraction 1.0",
        "--data-path data",
        "--data-path rows.jsonl",
        "--data-path none.jsonl --eval-data-path rows.jsonl",
    ],
)
def test_all_rows_of_a_file_are_scored(judge, tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text((tmp_path / "data" / "test_x.jsonl").read_text())
    assert main(["--path", judge, *words.split(), "--max-seq-len", "128", "--json-output"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == NUM_PAIRS


def test_the_last_line_counts_all_rows_that_were_given(judge, tmp_path, capsys):
    """Of a source with test rows of its own all are scored too, unless the held-out ones are asked for by name."""
    rows = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(6)]
    (tmp_path / "both").mkdir()
    write_lines(tmp_path / "both" / "train.jsonl", rows[:4])
    write_lines(tmp_path / "both" / "test.jsonl", [*rows[4:], {"prompt": "Why?", "chosen": "", "rejected": "No."}])
    argv = [judge, "--data-path", str(tmp_path / "both"), "--max-seq-len", "128"]
    last = []
    for words in ((), ("--eval-split", "held_out"), ("--eval-split", "all", "--eval-fraction", "0.1")):
        assert main([*argv, *words]) == 0
        last.append(capsys.readouterr().out.splitlines()[-1])
    assert last[0] == last[2] and last[0] == naming("6 of 7 pairs; 1 dropped:"), last
    assert last[1] == naming("2 of 7 pairs; 4 left out ... not held out (first: ... 1 dropped:")


def test_pairs_are_as_long_as_the_models_positions_at_most(judge, tmp_path, capsys):
    rows = [{"prompt": "Why?", "chosen": "Because. " * length, "rejected": "No."} for length in (1, 300)]
    write_lines(tmp_path / "pairs.jsonl", rows)
    argv = [judge, "--data-path", str(tmp_path / "pairs.jsonl"), "--eval-fraction", "1"]
    assert main(argv) == 0
    shown, err = capsys.readouterr()
    note, cut = err.splitlines()
    assert note == naming(f"--max-seq-len 256 ... {judge} ... positions") and cut.startswith("  rows: 1 cut: ")
    assert "each pair in both orders)" in shown
    assert main([*argv, "--max-seq-len", "200"]) == 0
    assert "note: " not in capsys.readouterr().err


def test_a_file_without_pairs_names_the_columns_of_a_pair(judge, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write_lines(tmp_path / "chats.jsonl", [{"messages": turns}])
    assert main(["--path", judge, "--data-path", "chats.jsonl", "--eval-fraction", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == naming("error: chats.jsonl ... 1 dropped ... chosen and rejected")


def test_a_model_without_a_chat_template_is_refused_by_what_the_command_has(reward_folder, tmp_path, capsys):
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": "Who?", "chosen": "I.", "rejected": "You."}])
    assert main([reward_folder, "--data-path", str(tmp_path / "pairs.jsonl"), "--eval-fraction", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == naming(f"error: --model ... {reward_folder} ... no chat template")
    assert "--template" not in line
