"""BLEU and ROUGE-L of generated answers: by hand, against transformers' own generate, over ranks, and rising."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from support.command_run import run_command
from support.ds_arguments import PARTITIONED_FILE
from support.in_process import refusal_of
from support.marks import slow_but
from support.messages import naming
from support.run_words import run_stage, run_words
from support.scripted_model import scripted_model
from support.tiny_run import make_folder, read_metrics
from support.tiny_t5 import make_t5_folder
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from step1_sft import checks
from step1_sft import eval as evaluation
from step1_sft.eval import compare_texts
from step1_sft.main import main


def test_bleu_is_of_the_corpus() -> None:
    """Matched and all n-grams of both answers, n = 1 to 4, worked by hand; answers are as long as their references."""
    answers = ["a b c d e", "m n o p q r s t"]
    references = ["a b c d x", "m n o p q r s t"]
    expected = prod([(4 + 8) / (5 + 8), (3 + 7) / (4 + 7), (2 + 6) / (3 + 6), (1 + 5) / (2 + 5)]) ** 0.25
    assert compare_texts("bleu", answers, references) == {"eval_bleu": pytest.approx(100 * expected)}


def test_rouge_is_the_mean_of_the_rows(caplog: pytest.LogCaptureFixture) -> None:
    """The longest common subsequence has 4 words of 6 and of 5; the second answer shares none."""
    answers, references = ["the old house sees a river", "no"], ["the house sees the river", "yes"]
    precision, recall = 4 / 6, 4 / 5
    expected = (2 * precision * recall / (precision + recall) + 0) / 2
    with caplog.at_level("INFO", logger="absl"):
        assert compare_texts("rouge", answers, references) == {"eval_rougeL": pytest.approx(expected)}
    assert not caplog.messages


def words(folder: Path, out: str, **changes: object) -> list[str]:
    flags = {
        "max_seq_len": 64, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 3, "max_steps": 4, "output_dir": folder / out / "sft",
    }  # fmt: skip
    return run_words(folder, **flags | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`t5/` with translations, and below `causal/` a decoder with pairs of its own."""
    made = make_t5_folder(tmp_path_factory.mktemp("answers"), num_test=7)
    (made / "causal").mkdir()
    make_folder(made / "causal", num_test=7)
    return made


@torch.no_grad()
def expected_pairs(model_folder: Path, data: Path, *, causal: bool, limit: int) -> tuple[list[str], list[str]]:
    """Greedy answers by transformers' generate, a row at a time, and the responses as written in the file."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = (AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM).from_pretrained(model_folder)
    answers, references = [], []
    for row in map(json.loads, data.read_text().splitlines()):
        if causal:
            turns = [{"role": "user", "content": row["prompt"]}]
            source = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            source = tokenizer(row["prompt"], return_tensors="pt")
        ids = model.generate(**source, max_new_tokens=limit, do_sample=False)[0]
        answers.append(tokenizer.decode(ids[source["input_ids"].shape[1] * causal :], skip_special_tokens=True).strip())
        references.append(row["chosen"] if causal else row["response"])
    return answers, references


def logged(run: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(run.parent / "runs" / "sft") if name in line]


KINDS = [("t5", 1), ("causal", 1), ("t5", 2), ("causal", 2)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "ranks"), slow_but(KINDS[:2], KINDS))
def test_a_run_logs_the_metric_of_all_held_out_rows(folder: Path, kind: str, ranks: int) -> None:
    """On two ranks under ZeRO-3 with layers gathered as they are used: 7 rows, whose answers differ in length."""
    inputs, causal = (folder / "causal", True) if kind == "causal" else (folder, False)
    out, limit = f"{kind}-{ranks}", 10
    flags = words(
        inputs, out, model_name_or_path=inputs / ("base" if causal else "t5"), eval_max_new_tokens=limit,
        eval_metric="bleu", learning_rate=1e-2, max_steps=25, per_device_train_batch_size=16 // ranks,
    )  # fmt: skip
    if ranks == 1:
        assert run_stage("sft", flags) == 0
    else:
        cut = ["--zero-stage", "3", "--zero3-gather", "layers", "--deepspeed-config", str(PARTITIONED_FILE)]
        ended = run_command("step1_sft", [*flags, *cut], folder=inputs, ranks=ranks)
        assert ended.code == 0, ended.stderr
    model = inputs / out / "sft"
    answers, references = expected_pairs(model, inputs / "test.jsonl", causal=causal, limit=limit)
    assert len({len(answer.split()) for answer in answers}) > 1 and len(answers) == 7
    (_, last) = logged(model, "eval_bleu")
    assert last == pytest.approx(compare_texts("bleu", answers, references)["eval_bleu"]) and last > 0
    assert len(logged(model, "eval_loss")) == 2


def test_an_answer_ends_at_an_id_that_generation_config_alone_names(
    folder: Path, bpe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in chat: the model never writes the tokenizer's EOS."""
    base = scripted_model(bpe_folder, tmp_path / "base", " Hé!<s>", ends=False)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))  # 1: <s>
    found: list[str] = []
    monkeypatch.setattr(evaluation, "compare_texts", lambda _, answers, __: found.extend(answers) or {})
    flags = words(
        folder / "causal", "ends", model_name_or_path=base, eval_metric="bleu", eval_max_new_tokens=16, max_steps=1,
        learning_rate=1e-9,
    )  # fmt: skip
    assert run_stage("sft", flags) == 0
    expected, _ = expected_pairs(Path(base), folder / "causal" / "test.jsonl", causal=True, limit=16)
    assert found[-7:] == expected and set(expected) == {"Hé!"}


@pytest.mark.slow
def test_a_toy_translation_is_learned(tmp_path: Path) -> None:
    made = make_t5_folder(tmp_path, num_train=2000, num_test=40, d_model=64, d_kv=16, d_ff=128, num_heads=4)
    flags = words(
        made, "learned", model_name_or_path=made / "t5", eval_metric="bleu", eval_interval=150, eval_max_new_tokens=16,
        max_steps=300, per_device_train_batch_size=32, per_device_eval_batch_size=40, learning_rate=2e-3,
    )  # fmt: skip
    assert run_stage("sft", flags) == 0
    first, middle, last = logged(made / "learned" / "sft", "eval_bleu")
    assert first < 5 and first < middle < last and last > 50


def test_the_package_of_a_metric_is_looked_for_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(checks.PACKAGES, "rouge", "no_such_package")
    given = words(folder, "missing", model_name_or_path=folder / "t5", eval_metric="rouge")
    line = refusal_of(main, given, capfd, code=3)
    assert line == naming("error: --eval-metric rouge ... no_such_package ... pip install '.[metrics]'")


def test_answers_must_fit_into_the_positions(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = folder / "causal" / "base"
    line = refusal_of(main, words(folder / "causal", "long", model_name_or_path=base, eval_metric="bleu"), capfd)
    assert line == naming(f"error: --max-seq-len + --eval-max-new-tokens 192 ... {base} ... 128 positions")
