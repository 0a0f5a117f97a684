"""`rlhf eval` from its command line: each number beside one that is computed in another way, and what is refused."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support import forks
from support.in_process import refusal_of
from support.messages import naming
from support.scripted_model import random_model
from support.tiny_run import save_scorer, write_lines
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from pipeline.data.cache import load_or_build
from pipeline.data.selection import DataOptions
from pipeline.data.templates import encode_conversation, set_template
from pipeline.data.turns import Message
from pipeline.inference.answer_rows import Answer
from rlhf.rewards import sample
from rlhf.rewards.eval import answer_rows, main

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 40
PERPLEXITY = "held-out perplexity"
WORDS = "grey otter marten harbour mill river calm brave nasty rude honest warm".split()
FUNCTIONS = """
def short(completions): return [float(len(text) < 20) for text in completions]
def size(completions): return [None if len(text) < 5 else len(text) / 10 for text in completions]
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep tokenised rows in a folder of the test."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def base(bpe_folder, tmp_path_factory) -> str:
    return random_model(bpe_folder, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tuned(bpe_folder, tmp_path_factory) -> str:
    return random_model(bpe_folder, tmp_path_factory.mktemp("tuned"), seed=1)


@pytest.fixture(scope="module")
def scorer(bpe_folder, tmp_path_factory) -> str:
    """A reward model as stage 2 saves it, with its template."""
    folder, tokenizer = tmp_path_factory.mktemp("scorer"), AutoTokenizer.from_pretrained(bpe_folder)
    set_template(tokenizer, "human_assistant")
    save_scorer(folder, tokenizer)
    return str(folder)


def rows_of_pairs() -> list[dict[str, str]]:
    """Rows whose answers have from 1 to 6 words."""
    draw = np.random.default_rng(0)

    def words(number: int) -> str:
        return " ".join(draw.choice(WORDS, number))

    sizes = draw.integers(1, 7, (NUM_ROWS, 2))
    return [
        {"prompt": f"Describe {number}: {words(2)}.", "chosen": words(a), "rejected": f"No {words(b)}"}
        for number, (a, b) in enumerate(sizes)
    ]


@pytest.fixture
def pairs(tmp_path) -> str:
    write_lines(tmp_path / "pairs.jsonl", rows_of_pairs())
    return str(tmp_path / "pairs.jsonl")


def evaluated(capsys, *argv: str) -> dict[str, dict[str, dict]]:
    """The JSON that the command prints: model -> figure -> its mean, standard error and count."""
    assert main([*argv, "--json-output", "--max-new-tokens", "8"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def is_estimate(figure: dict, values: list[float]) -> bool:
    """Compare a figure with the mean of values and s / sqrt(n)."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    expected = (statistics.fmean(values), error, len(values))
    return (figure["mean"], figure["standard_error"], figure["count"]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def encoded(folder: str, row: dict[str, str], side: str) -> tuple[torch.Tensor, list[bool]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversation = encode_conversation(tokenizer, [Message("user", row["prompt"]), Message("assistant", row[side])])
    return torch.tensor([conversation.ids]), conversation.trained


# ---- language models ----


def losses_of(folder: str) -> np.ndarray:
    """(rows, 2): the loss of each chosen answer by transformers, summed over its tokens, and their number."""
    model, rows = AutoModelForCausalLM.from_pretrained(folder), list[tuple[float, int]]()
    for row in rows_of_pairs():
        ids, trained = encoded(folder, row, "chosen")
        labels = torch.where(torch.tensor([trained]), ids, -100)
        with torch.no_grad():
            loss = model(input_ids=ids, labels=labels).loss.item()
        rows.append((loss * sum(trained), sum(trained)))
    return np.array(rows)


def test_perplexity_is_that_of_transformers_own_loss(base, tuned, pairs, capsys):
    """Standard errors are those of 4,000 resamples of the rows, for the difference of the same rows of both models."""
    figures = evaluated(capsys, base, tuned, "--data-path", pairs)
    assert list(figures) == [base, tuned]
    first, second = losses_of(base), losses_of(tuned)
    draws = np.random.default_rng(1).integers(0, NUM_ROWS, (4000, NUM_ROWS))

    def perplexities(losses: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        sums = losses[chosen].sum(-2)
        return np.exp(sums[..., 0] / sums[..., 1])

    every = np.arange(NUM_ROWS)
    for folder, losses in ((base, first), (tuned, second)):
        figure = figures[folder][PERPLEXITY]
        assert figure["mean"] == pytest.approx(perplexities(losses, every), rel=1e-4) and figure["count"] == NUM_ROWS
        assert figure["standard_error"] == pytest.approx(perplexities(losses, draws).std(), rel=0.1)
    change = figures[tuned][f"{PERPLEXITY}: change"]
    assert change["mean"] == pytest.approx(perplexities(second, every) - perplexities(first, every), rel=1e-3)
    paired = (perplexities(second, draws) - perplexities(first, draws)).std()
    assert change["standard_error"] == pytest.approx(paired, rel=0.1)
    assert not [name for name in figures[base] if name.endswith(": change")]


def test_sampled_answers_have_the_figures_of_a_slow_loop(base, tuned, scorer, pairs, tmp_path, capsys):
    """The answers are those of `rlhf sample` by the same seed; a standard error is s / sqrt(n) over prompts."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    functions = ["--reward-function", *(f"{tmp_path / 'rewards.py'}:{name}" for name in ("short", "size"))]
    flags = ("-n", "3", "--seed", "5", *functions, "--reward-model", scorer)
    figures = evaluated(capsys, base, tuned, "--data-path", pairs, *flags)
    values = {}
    for folder in (base, tuned):
        file = tmp_path / "answers.jsonl"
        argv = [folder, "--data", pairs, "--output", str(file), "--overwrite", "--max-new-tokens", "8", *flags]
        assert sample.main(argv) == 0
        groups = [json.loads(line)["answers"] for line in file.read_text().splitlines()]
        assert len(groups) == NUM_ROWS
        by_name = values[folder] = {
            "answer length": [statistics.fmean(one["num_tokens"] for one in group) for group in groups],
            "truncated answers": [
                statistics.fmean(one["finish_reason"] == "limit" for one in group) for group in groups
            ],
            "distinct-2": [share for group in groups if (share := slow_distinct([one["text"] for one in group]))],
        }
        for name in ("short", "size", Path(scorer).name):
            scores = [[x for one in group if (x := one["scores"][name]) is not None] for group in groups]
            by_name[name] = [sum(each) / len(each) for each in scores if each]
            by_name[f"{name}, best of 3"] = [sorted(each)[-1] for each in scores if each]
        for name, expected in by_name.items():
            assert is_estimate(figures[folder][name], expected), name
    assert figures[base].keys() == by_name.keys() | {PERPLEXITY}
    assert len(set(values[base]["truncated answers"])) > 1 and len(set(values[base]["short"])) > 1
    for name in ("answer length", "truncated answers", "short", "short, best of 3", Path(scorer).name):
        differences = [b - a for a, b in zip(values[base][name], values[tuned][name], strict=True)]
        assert is_estimate(figures[tuned][f"{name}: change"], differences), name


def slow_distinct(texts: list[str]) -> float | None:
    seen = list[tuple[str, str]]()
    total = 0
    for text in texts:
        for pair in pairwise(re.findall(r"\w+", text.lower())):
            total += 1
            if pair not in seen:
                seen.append(pair)
    return len(seen) / total if total else None


def answer(text: str, *, tokens: int = 3, ends: bool = True, **scores: float | None) -> Answer:
    return Answer(text, (5,) * tokens, "end" if ends else "limit", -1.0, scores)


def test_figures_of_answers_by_hand():
    """The first prompt has the pairs (a b), (b a), (a b) and (a b); the second has none."""
    groups = [
        [answer("A b a, b", right=1.0), answer("a B", tokens=5, ends=False, right=0.0)],
        [answer("a", right=None), answer("", tokens=1, right=None)],
    ]
    first, second = ("x.jsonl:1", 0), ("x.jsonl:2", 0)
    assert answer_rows(["x.jsonl:1", "x.jsonl:2"], groups) == {
        "right": {first: (0.5, 1.0)},
        "right, best of 2": {first: (1.0, 1.0)},
        "distinct-2": {first: (0.5, 1.0)},
        "answer length": {first: (4.0, 1.0), second: (2.0, 1.0)},
        "truncated answers": {first: (0.5, 1.0), second: (0.0, 1.0)},
    }


def test_figures_of_one_answer_to_each_prompt_are_written_for_the_report(base, pairs, capsys):
    output = str(Path(pairs).parent)
    figures = evaluated(capsys, base, "--data-path", pairs, "--reward-function", "repetition", "--output", output)
    assert json.loads(Path(output, "eval.json").read_text()) == figures
    assert [*figures[base]] == [PERPLEXITY, "repetition", "distinct-2", "answer length", "truncated answers"]


def test_a_card_shows_the_last_evaluation_and_keeps_its_other_text(base, tuned, pairs, tmp_path, capsys):
    """Of models that training saved, in the folder of --output."""
    output, card = tmp_path / "output", "# A model\n\n## Notes\n\nMine.\n"
    first, ours, other = tmp_path / "first", output / "ours", output / "other"
    for folder, start in ((first, base), (ours, tuned), (other, tuned)):
        shutil.copytree(start, folder)
        (folder / "README.md").write_text(card)
    for folder in (first, ours):
        (folder / "training_config.json").write_text("{}")
    write_lines(tmp_path / "few.jsonl", rows_of_pairs()[:9])
    argv = [*map(str, (first, ours, other)), "--output", str(output), "--data-path"]
    evaluated(capsys, *argv, str(tmp_path / "few.jsonl"))
    assert "`few.jsonl`" in (ours / "README.md").read_text()
    with (ours / "README.md").open("a") as file:
        file.write("\nMore of mine.\n")
    figures = evaluated(capsys, *argv, pairs)[str(ours)]
    text = (ours / "README.md").read_text()
    assert text.startswith(card) and "\nMore of mine.\n" in text and text.count("## Later evaluation") == 1
    (row,) = [line for line in text.splitlines() if line.startswith("| `distinct-2` |")]
    shown = [
        "{mean:.3g} +- {standard_error:.2g}".format(**figures[name]) for name in ("distinct-2", "distinct-2: change")
    ]
    assert row == f"| `distinct-2` | {shown[0]} | {shown[1]} |"
    assert "pairs.jsonl`" in text and "few.jsonl" not in text and str(tmp_path) not in text
    assert [(folder / "README.md").read_text() for folder in (first, other)] == [card, card]


def test_rows_without_answers_have_no_perplexity(base, tmp_path, capsys):
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Say {n}."} for n in range(3)] + [{"prompt": "Say 0."}])
    figures = evaluated(capsys, base, "--data-path", str(tmp_path / "prompts.jsonl"))[base]
    assert PERPLEXITY not in figures
    assert figures["answer length"]["count"] == 3, "a repeated prompt counts once"


def test_perplexities_of_other_tokens_are_not_compared(base, bpe_folder, pairs, tmp_path, capsys):
    other = random_model(bpe_folder, tmp_path / "other", seed=2)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}" + (
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    tokenizer.save_pretrained(other)
    figures = evaluated(capsys, base, other, "--data-path", pairs)[other]
    assert PERPLEXITY in figures and f"{PERPLEXITY}: change" not in figures
    assert "answer length: change" in figures


@pytest.mark.parametrize("flags", [("--eval-split", "held_out"), ()], ids=["by name", "by the fraction"])
def test_held_out_rows_are_those_of_a_training_run(base, pairs, capsys, flags):
    """Rows and prompts are counted; a run with these flags would not train on them."""
    figures = evaluated(capsys, base, "--data-path", pairs, "--eval-fraction", "0.4", *flags)[base]
    options = DataOptions(data_path=(pairs,), data_split="none", eval_fraction=0.4, seed=1234)
    held_out = load_or_build(options, AutoTokenizer.from_pretrained(base)).eval
    assert figures[PERPLEXITY]["count"] == figures["answer length"]["count"] == len(held_out) < NUM_ROWS


# ---- reward models ----


def test_a_reward_model_has_the_accuracy_of_transformers_own_scores(base, scorer, pairs, capsys):
    figures = evaluated(capsys, scorer, base, "--data-path", pairs)
    assert list(figures) == [scorer, base] and PERPLEXITY in figures[base]
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    model.config.pad_token_id = None
    margins, shorter, longer = [], [], []
    for row in rows_of_pairs():
        sides = [encoded(scorer, row, side) for side in ("chosen", "rejected")]
        with torch.no_grad():
            a, b = (model(input_ids=ids).logits.item() for ids, _ in sides)
        margins.append(a - b)
        lengths = [sum(trained) for _, trained in sides]
        if abs(lengths[0] - lengths[1]) > 0.1 * max(lengths):
            (longer if lengths[0] > lengths[1] else shorter).append(float(a > b))
    assert is_estimate(figures[scorer]["accuracy"], [float(margin > 0) for margin in margins])
    assert is_estimate(figures[scorer]["accuracy, shorter preferred"], shorter) and len(shorter) > 5
    assert is_estimate(figures[scorer]["accuracy, longer preferred"], longer) and len(longer) > 5
    outcomes = [(1 / (1 + math.exp(-sign * margin)), sign > 0) for margin in margins for sign in (1, -1)]
    bins = [[one for one in outcomes if low <= one[0] * 10 < low + 1] for low in range(10)]
    gaps = [abs(sum(p for p, _ in each) - sum(won for _, won in each)) for each in bins]
    expected = {"mean": pytest.approx(sum(gaps) / len(outcomes)), "standard_error": None, "count": NUM_ROWS}
    assert figures[scorer]["calibration error"] == expected


# ---- the table, and what is refused ----


def test_the_table_has_a_column_for_each_model(base, tuned, scorer, pairs, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    assert main([base, tuned, scorer, "--data-path", pairs, "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr().out
    *models, table = out.split("\n", 3)
    assert models == [f"A = {base}", f"B = {tuned}", f"C = {scorer}"]
    lines = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    assert lines[1] == ["A", "B", "C"]
    names = [name for name, *cells in lines[3:] if len(cells) == 3]
    accuracies = ["accuracy", "accuracy, shorter preferred", "accuracy, longer preferred", "calibration error"]
    figures = [PERPLEXITY, "distinct-2", "answer length", "truncated answers"]
    assert names == [name for one in figures for name in (one, "change")] + accuracies
    cells = {name: cells for name, *cells in reversed(lines[3:])}
    number = r"\d\S* \+- \d\S*"
    assert re.fullmatch(rf"{number} \| {number} \| -", " | ".join(cells[PERPLEXITY]))
    assert re.fullmatch(rf"- \| -?{number} \| -", " | ".join(cells["change"]))
    assert re.fullmatch(rf"- \| - \| {number}", " | ".join(cells["accuracy"]))
    assert "+-" not in cells["calibration error"][2] and "+-: standard error" in out


@pytest.mark.slow
def test_a_terminal_of_ascii_and_few_columns_gets_all_figures(base, tuned, pairs):
    """In a process of its own, whose encoding counts."""
    argv = [sys.executable, "-m", "rlhf", "eval", base, tuned, "--data-path", pairs, "--max-new-tokens", "4"]
    variables = {"PYTHONIOENCODING": "ascii", "COLUMNS": "60", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=forks.environment() | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("change") == 5 and len(re.findall(r"\d +\+-", done.stdout)) == 12


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data-path", "PAIRS"], "--model: "),
        (["BASE"], "--data-path: "),
        (["BASE", "--data-path", "no.jsonl"], "no.jsonl"),
        (["output/none", "--data-path", "PAIRS"], "--model: output/none: no such folder"),
        (["BASE", "--data-path", "PAIRS", "--output", "none"], "--output: none: no such folder"),
        (["BASE", "--data-path", "EMPTY"], "found no prompt in EMPTY"),
        (
            ["BASE", "--data-path", "PAIRS", "--reward-function", "no.py:f"],
            "--reward-function no.py:f: no.py cannot be read",
        ),
        (["BASE", "--data-path", "PAIRS", "--reward-model", "BASE"], "--reward-model: BASE ... no reward head"),
        (["BASE", "--data-path", "PAIRS", "--max-new-tokens", "512"], "--max-new-tokens: 512 leave none"),
        (["BASE", "--data-path", "PAIRS", "-n", "2", "--temperature", "0"], "--n: 2 greedy answers"),
        (["BASE", "--data-path", "PAIRS", "--eval-fraction", "1e-9"], "PAIRS: no prompt is held out; --eval-split all"),
        (["SCORER", "--data-path", "PROMPTS"], "PROMPTS: no pair to score: 1"),
    ],
)
def test_a_refusal_is_one_line(argv, message, base, scorer, pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"text": "nothing to answer"}\n')
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Say 1."}])
    paths = {"BASE": base, "SCORER": scorer, "PAIRS": pairs, "EMPTY": "empty.jsonl", "PROMPTS": "prompts.jsonl"}
    for name, path in paths.items():
        message = message.replace(name, path)
    assert refusal_of(main, [paths.get(word, word) for word in argv], capsys) == naming(f"error: ... {message}")
