"""`python -m benchmarks.learning gsm8k` and `gsm8k_figures`: the splits, and figures worked out by hand."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import gsm8k, run
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
    assert [cell.strip() for cell in head.split("|")][1:5] == ["file", "questions", "pass@1", "pass@2"]
    assert base.startswith("| base | 4 | 0.250 (") and base.endswith(" |  |")
    assert trained.startswith("| trained | 4 | 0.875 (") and "| +0.625 (" in trained
