"""`python -m benchmarks.learning gsm8k` and `gsm8k_figures`: the splits, and figures worked out by hand."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.source_tree import ROOT
from support.tiny_models import save_tiny

from benchmarks.learning import quality, run
from benchmarks.learning.gsm8k import answers as gsm8k
from benchmarks.learning.rows import read_lines, write
from pipeline.rewards.box.answers import right_number


def test_rows_of_gsm8k_are_split_by_a_hash_of_the_question(real_data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", "gsm8k", "--data", str(real_data), "--work", str(tmp_path)])
    assert run.main() == 0
    parts = {name: read_lines(tmp_path / f"data/gsm8k_{name}.jsonl") for name in
             (f"{form}_{split}" for form in ("bare", "form") for split in ("test", "choice", "train"))}  # fmt: skip
    for form in ("bare", "form"):
        test, choice, train = (parts[f"{form}_{split}"] for split in ("test", "choice", "train"))
        assert (len(test), len(choice), len(train)) == (1000, 256, 7473 - 1256)
        assert len({row["prompt"] for part in (test, choice, train) for row in part}) == 7473, "no question twice"
    for split in ("test", "choice", "train"):
        pairs = zip(parts[f"bare_{split}"], parts[f"form_{split}"], strict=True)
        assert all(b["prompt"].endswith(f"Question: {a['prompt']}") and a["answer"] == b["answer"] for a, b in pairs)
    answers = [row["answer"] for row in parts["form_train"]]
    assert not any("<<" in answer for answer in answers) and right_number(answers, answer=answers) == [1.0] * len(
        answers
    )


def row(prompt: str, *answers: tuple[str, float | None, int, str]) -> dict[str, Any]:
    return {"prompt": prompt, "answers": [
        {"text": text, "reward": reward, "num_tokens": tokens, "finish_reason": reason}
        for text, reward, tokens, reason in answers
    ]}  # fmt: skip


FIRST = [
    row("a", ("It is 4.", 1.0, 10, "end"), ("It is 5.", 0.0, 10, "end")),
    row("b", ("No.", 0.0, 20, "end"), ("Well", None, 40, "limit")),
    row("c", ("6", 0.0, 10, "end"), ("7", 1.0, 10, "end")),
    row("d", ("8", 0.0, 10, "end"), ("9", 0.0, 10, "end")),
]
AFTER = [
    row("d", ("8", 1.0, 10, "end"), ("9", 0.0, 10, "end")),
    *(row(prompt, ("1", 1.0, 10, "end"), ("1", 1.0, 10, "end")) for prompt in "abc"),
]


@pytest.fixture
def files(tmp_path) -> list[Path]:
    write(tmp_path / "base.jsonl", FIRST)
    write(tmp_path / "trained.jsonl", AFTER)
    return [tmp_path / "base.jsonl", tmp_path / "trained.jsonl"]


def test_figures_by_hand(files):
    found = {name: one.value for name, one in gsm8k.figures(gsm8k.answers_of(files[0])).items()}
    assert found == {
        "pass@1": 2 / 8, "pass@2": 2 / 4, "with a number": 6 / 8, "right among these": (0.5 + 0.5 + 0) / 3,
        "truncated": 1 / 8, "tokens": 15.0,
    }  # fmt: skip


def test_differences_are_of_the_same_questions(files):
    """Of 0.5, 0, 0.5 and 0 beside 1, 1, 1 and 0.5, in another order."""
    found = gsm8k.difference(*map(gsm8k.answers_of, files))
    assert found.value == (0.5 + 1 + 0.5 + 0.5) / 4
    half = 1.959963984540054 * (sum((x - 0.625) ** 2 for x in (0.5, 1, 0.5, 0.5)) / 3) ** 0.5 / 2
    assert (found.low, found.high) == pytest.approx((0.625 - half, 0.625 + half))
    write(files[1], AFTER[:3])
    with pytest.raises(ValueError, match="1 questions"):
        gsm8k.difference(*map(gsm8k.answers_of, files))


def test_the_table(files, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", "gsm8k_figures", *map(str, files)])
    assert run.main() == 0
    head, _, base, trained = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in head.split("|")][1:5] == ["run", "questions", "pass@1", "pass@2"]
    assert base.startswith("| base | 4 | 0.250 (") and base.endswith(" |  |")
    assert trained.startswith("| trained | 4 | 0.875 (") and "| +0.625 (" in trained


def test_both_forms_of_a_prompt_are_one_question(files):
    """The base that is the better one may have been asked by the other prompt."""
    forms = [{**one, "prompt": gsm8k.FORM.format(question=one["prompt"])} for one in FIRST]
    write(files[1], forms)
    assert gsm8k.answers_of(files[1]) == gsm8k.answers_of(files[0])
    assert gsm8k.difference(*map(gsm8k.answers_of, files)).value == 0


def metrics(step: int, time: float, **values: float) -> dict[str, Any]:
    return {"stage": "ppo", "step": step, "time": time, **values}


def test_kept_numbers_give_the_same_table(files, tmp_path, monkeypatch, capsys):
    """A run that was resumed at step 1 wrote step 2 twice: the later one counts."""
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "metrics.jsonl", [
        metrics(0, 100, **{"eval_pass_at_1/right_number": 0.25, "eval_rows": 4}),
        metrics(1, 110, **{"objective/scores": 0.5, "loss/policy": 1}), metrics(2, 120, **{"objective/scores": 0.1}),
        metrics(2, 160, **{"objective/scores": 0.2}), metrics(2, 161, **{"eval_pass_at_1/right_number": 0.3}),
    ])  # fmt: skip
    one_each = [{**one, "answers": one["answers"][:1]} for one in FIRST]
    write(tmp_path / "one.jsonl", one_each)
    paths, kept = [*files, tmp_path / "one.jsonl", tmp_path / "run"], tmp_path / "kept.jsonl.bz2"
    monkeypatch.setattr(sys, "argv", ["run", "gsm8k_keep", *map(str, paths), "--kept", str(kept)])
    assert run.main() == 0
    tables = []
    for given in (paths[:3], [kept]):
        monkeypatch.setattr(sys, "argv", ["run", "gsm8k_figures", *map(str, given)])
        assert run.main() == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and tables[0].count("| one | 4 | 0.250 (") == 1 == tables[0].count("\n\n")
    lines = {line["run"]: line for line in quality.read_kept(kept)}
    assert lines["one"]["texts"] == [{"prompt": one["prompt"], "text": one["answers"][0]["text"]} for one in FIRST]
    assert "texts" not in lines["base"]
    assert lines["run"]["metrics"] == [
        {"step": 0, "seconds": 0.0, "held out": True, "pass@1": 0.25},
        {"step": 1, "seconds": 10.0, "held out": False, "score": 0.5},
        {"step": 2, "seconds": 60.0, "held out": False, "score": 0.2},
        {"step": 2, "seconds": 61.0, "held out": True, "pass@1": 0.3},
    ]


def test_files_of_one_name_keep_apart(files, tmp_path):
    for name in ("base", "trained"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.jsonl").rename(tmp_path / name / "answers.jsonl")
    runs = gsm8k.runs_of([tmp_path / name / "answers.jsonl" for name in ("base", "trained")])
    assert list(runs) == ["base/answers", "trained/answers"] and "| +0.625 (" in gsm8k.report(runs)


def test_the_plot_has_the_evaluations_of_runs_whose_answers_are_kept():
    lines = [
        {"run": "grpo_s1.greedy", "answers": {}},
        {"run": "grpo_s1", "metrics": [
            {"step": 0, "seconds": 0.0, "held out": True, "pass@1": 0.1},
            {"step": 1, "seconds": 9.0, "held out": False, "score": 0.5},
            {"step": 2, "seconds": 90.0, "held out": True, "pass@1": 0.2},
        ]},
        {"run": "lora_s1", "metrics": [{"step": 0, "seconds": 0.0, "held out": True, "pass@1": 0.1}]},
    ]  # fmt: skip
    assert gsm8k.curves(lines) == {"grpo, seed 1": ([0.0, 1.5], [0.1, 0.2])}


def test_the_report_is_that_of_the_kept_numbers():
    name = "gsm8k_qwen_h200_202611"
    runs = gsm8k.runs_of([ROOT / f"benchmarks/raw/{name}.jsonl.bz2"])
    tables = [gsm8k.table_of(part) for part in gsm8k.by_number_of_answers(runs)]
    page = (ROOT / f"benchmarks/reports/{name}.md").read_text("utf-8")
    assert len(tables) == 2 and [table for table in tables if table not in page] == []


@pytest.mark.slow
def test_the_runs_on_a_tiny_model(tmp_path, bpe_folder):
    """Without a finished pair DPO cannot run: a model of random weights has no right answer."""
    save_tiny("llama", bpe_folder, tmp_path / "base", max_position_embeddings=1024, num_hidden_layers=1)
    rows = [{"prompt": gsm8k.FORM.format(question=f"What is {n} + {n}?"), "answer": f"#### {2 * n}"} for n in range(24)]
    (tmp_path / "work" / "data").mkdir(parents=True)
    for split, part in (("train", rows[:16]), ("choice", rows[16:20]), ("test", rows[20:])):
        write(tmp_path / "work" / "data" / f"gsm8k_form_{split}.jsonl", part)
        bare = [{**row, "prompt": gsm8k.question_of(row["prompt"])} for row in part]
        write(tmp_path / "work" / "data" / f"gsm8k_bare_{split}.jsonl", bare)
    words = "--seeds 1 --recipes base sft grpo ppo distill imitate"
    words += " -- --sft.max-steps 1 --ppo.max-steps 1 --ppo.max-answer-seq-len 4"
    call = [sys.executable, "-m", "benchmarks.learning", "gsm8k_runs", "--work", str(tmp_path / "work")]
    call += ["--base", str(tmp_path / "base"), *words.split(), "--dtype", "fp32"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = gsm8k.runs_of(sorted((tmp_path / "work" / "answers").glob("*.jsonl")))
    keys = ("base_bare", "base_form", "distill_s1", "grpo_s1", "imitate_s1", "ppo_s1", "sft_s1")
    assert list(runs) == [f"{key}.{kind}" for key in keys for kind in ("greedy", "t1")]
    assert {(len(one), *{len(group) for group in one.values()}) for one in runs.values()} == {(4, 1), (4, 8)}
    assert len({frozenset(one) for one in runs.values()}) == 1, "all answer the same questions"
