"""`rlhf compare --judge-pairs` with a judge on the loopback interface that sees both answers in both orders."""

import json
import re

import pytest
from support.judge_server import Server, judge_servers, rates, says
from support.messages import naming
from support.scripted_model import random_model, scripted_model

from pipeline.errors import EXIT_ENVIRONMENT
from pipeline.inference.comparison import JUDGED
from pipeline.inference.intervals import wilson
from pipeline.rewards.box import judge as module
from rlhf.compare import main

pytest.importorskip("httpx", reason="needs the extra judge")


def shown(question: str) -> tuple[str, str]:
    """The two answers of a question, the one that is shown first first."""
    fence = re.search(r"<prompt (\w{16})>", question)[1]
    parts = (re.findall(f"<{name} response {fence}>\n(.*?)\n</{name} response {fence}>", question, re.DOTALL)
             for name in ("first", "second"))  # fmt: skip
    (first,), (second,) = parts
    return first, second


def prefers_first(question: str, number: int) -> tuple[int, str]:
    return 200, rates(0)


def prefers_longer(question: str, number: int) -> tuple[int, str]:
    first, second = shown(question)
    return 200, rates(5 if len(first) == len(second) else 0 if len(first) > len(second) else 10)


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(module, "_cached_scores", {})
    with judge_servers() as start:
        yield start


@pytest.fixture
def models(bpe_folder, tmp_path) -> list[str]:
    """Two models that say "yes" and "no way" to 24 prompts."""
    (tmp_path / "q.txt").write_text("".join(f"question {number}\n" for number in range(24)))
    answers = {"short": " yes", "long": " no way"}
    folders = [scripted_model(bpe_folder, tmp_path / name, text) for name, text in answers.items()]
    return ["--models", *folders, "--prompts", str(tmp_path / "q.txt"), "--max-new-tokens", "8"]


def judged_by(server: Server, **settings) -> list[str]:
    args = {name: value for name, value in server.settings.items() if name != "template"} | {"retries": 1} | settings
    return ["--judge-pairs", "--reward-function", json.dumps({"name": "judge", "args": args})]


def compared(tmp_path, argv: list[str]) -> dict:
    assert main([*argv, "--output", str(tmp_path / "out")]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_a_judge_that_prefers_the_first_answer_ties_everywhere(serve, models, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    server = serve(prefers_first)
    first, second = compared(tmp_path, [*models, *judged_by(server)])["models"]
    against = second["against"]
    assert first["against"] is None and first["mean_score"] is second["mean_score"] is None
    assert (against["wins"], against["ties"], against["losses"], against["num_prompts"]) == (0, 24, 0, 24)
    assert (against["disagreement"], against["num_unjudged"], against["difference"]) == (1.0, 0, None)
    tie = wilson(0.5, 24)
    assert against["win_rate"] == {"value": 0.5, "low": tie.low, "high": tie.high, "method": "Wilson's formula"}
    assert sorted(map(shown, server.questions)) == [("no way", "yes")] * 24 + [("yes", "no way")] * 24
    page = capsys.readouterr().out
    headings = next(line for line in page.splitlines() if "win rate" in line)
    assert re.split(r"  +", headings.strip()) == ["tokens", "ended", "win rate", "LC win rate", "orders differ"]
    assert re.search(r"^ B .* 0\.50 \[0\.31, 0\.69\] .* 100%", page, re.MULTILINE)
    assert "left out: B 0." in page and "score difference" not in page


def test_a_judge_that_prefers_the_longer_answer_agrees_in_both_orders(serve, models, capsys, tmp_path):
    result = compared(tmp_path, [*models, *judged_by(serve(prefers_longer))])
    against = result["models"][1]["against"]
    assert (against["wins"], against["ties"], against["losses"], against["disagreement"]) == (24, 0, 0, 0.0)
    assert against["win_rate"]["low"] == wilson(1.0, 24).low and against["length_controlled"] is None
    assert [one["preferences"] for one in result["prompts"]] == [{"B": [[1, 1]]}] * 24


def test_equal_answers_tie_and_are_not_shown_to_the_judge(serve, models, capsys, tmp_path):
    """The judge rates a question 10 and the same question 0; the third model is the first one."""
    server = serve(lambda question, number: (200, rates(10 if number % 2 else 0)))
    result = compared(tmp_path, [*models[:3], models[1], *models[3:], *judged_by(server)])
    against = result["models"][2]["against"]
    assert (against["wins"], against["ties"], against["losses"], against["disagreement"]) == (0, 24, 0, 0.0)
    assert [one["preferences"] for one in result["prompts"]] == [{"B": [[1, -1]], "C": [[0, 0]]}] * 24
    assert len(server.questions) == 48 and all(len(set(shown(one))) == 2 for one in server.questions)


def test_the_judge_has_a_row_beside_a_function_that_decides(serve, models, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "140")
    words = judged_by(serve(prefers_longer))
    length = json.dumps({"name": "length:-1", "args": {"high": 1, "margin": 9}})
    result = compared(tmp_path, [*models, *words, length])
    assert list(result["by_scorer"]) == ["length", JUDGED] and result["models"] == result["by_scorer"]["length"]
    assert result["by_scorer"][JUDGED][1]["against"]["wins"] == 24
    assert f"B by {JUDGED} 24/0/0" in capsys.readouterr().out
    rows = [line for line in (tmp_path / "out.md").read_text().splitlines() if line.startswith("| B |")]
    assert [row.count("|") for row in rows] == [10, 10] and rows[1].endswith("| - | 0% |")


def test_every_answer_meets_every_answer_of_the_baseline_in_its_prompts_row(serve, bpe_folder, tmp_path, capsys):
    """Three models with two answers each: four pairs a prompt, by the lengths of their texts."""
    (tmp_path / "q.txt").write_text("one\ntwo\nthree\n")
    folders = [random_model(bpe_folder, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    server = serve(prefers_longer)
    words = ["--models", *folders, folders[0], "--prompts", str(tmp_path / "q.txt"), "--max-new-tokens", "6"]
    result = compared(
        tmp_path, [*words, "--temperature", "2", "--num-return-sequences", "2", *judged_by(server), "--batch-size", "3"]
    )
    for prompt in result["prompts"]:
        texts = {label: [len(row["text"]) for row in rows] for label, rows in prompt["answers"].items()}
        for label in "BC":
            signs = [(theirs > ours) - (theirs < ours) for ours in texts["A"] for theirs in texts[label]]
            assert prompt["preferences"][label] == [[sign, sign] for sign in signs]
    assert sum(result["models"][1]["against"][name] for name in ("wins", "ties", "losses")) == 12
    assert server.most <= 3


@pytest.mark.parametrize(("index", "batch_size"), [(5, "8"), (0, "1")], ids=str)
def test_an_answer_without_a_rating_is_counted_and_said(index, batch_size, serve, models, capsys, tmp_path):
    """It is asked for once more; the pair is left out although its other order has a rating."""

    def script(question: str, number: int) -> tuple[int, str]:
        is_odd = f"\nquestion {index}\n" in question and shown(question)[0] == "yes"
        return (200, says("Both are fine.")) if is_odd else prefers_longer(question, number)

    server = serve(script)
    result = compared(tmp_path, [*models, *judged_by(server), "--batch-size", batch_size])
    against = result["models"][1]["against"]
    assert (against["num_prompts"], against["wins"], against["num_unjudged"]) == (23, 23, 1)
    assert result["prompts"][index]["preferences"] == {"B": [None]}
    printed = capsys.readouterr()
    assert "left out: B 1." in printed.out
    assert printed.err == naming("note: judge: raised ... 'Both are fine.'; 1 of 48 responses")
    assert len(server.questions) == 49


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        ((200, says("Both are fine.")), 2, "judge gave no value for 8 of the last 8 responses ... 'Both are fine.'"),
        ((500, "broken"), EXIT_ENVIRONMENT, "judge gave no value for 8 ... 2 requests: status 500: broken"),
        ((400, "too long"), 2, "8 raised ... status 400: too long"),
    ],
)
def test_a_judge_that_gives_no_rating_ends_the_comparison(answer, code, message, serve, models, capsys, tmp_path):
    server = serve(lambda question, number: answer)
    assert main([*models, *judged_by(server), "--output", str(tmp_path / "out")]) == code
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == naming(message) and "win rate" not in printed.out
    assert len(server.questions) <= 8 * 2 * 2, "the first batch, each question with its retries"
    check_answers_alone(tmp_path)


def check_answers_alone(tmp_path) -> None:
    """The files have all answers, and nothing by the judge."""
    result = json.loads((tmp_path / "out.json").read_text())
    assert "by_scorer" not in result and {one["against"] for one in result["models"]} == {None}
    assert [one["answers"]["B"][0]["text"] for one in result["prompts"]] == ["no way"] * 24
    assert not any("preferences" in one for one in result["prompts"])
    pages = [(tmp_path / f"out.{suffix}").read_text() for suffix in ("md", "html")]
    assert all("no way" in page and "win rate" not in page for page in pages)


def test_an_endpoint_that_dies_midway_leaves_the_answers(serve, models, bpe_folder, capsys, tmp_path):
    """It has rated all answers of the second model, and ends within those of the third."""

    def script(question: str, number: int) -> tuple[int, str]:
        return prefers_longer(question, number) if len(server.questions) <= 50 else (500, "broken")

    server, (name, short, long, *words) = serve(script), models
    argv = [name, short, long, str(tmp_path / "other"), *words, *judged_by(server)]
    scripted_model(bpe_folder, tmp_path / "other", " or so")
    assert main([*argv, "--output", str(tmp_path / "out")]) == EXIT_ENVIRONMENT
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == naming("judge gave no value for ... no connection ... 2 requests: status 500: broken")
    check_answers_alone(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--judge-pairs"], "--judge-pairs ... no judge"),
        (["--judge-pairs", "--reward-function", "length"], "--judge-pairs ... no judge"),
        (["--judge-pairs", "--reward-function", "judge"], "url is no http://HOST:PORT/v1"),
        (["--judge-pairs", "--reward-function", "judge:0"], "--judge-pairs ... no weight"),
        (["--judge-pairs", "--reward-function", "judge:-1"], "--judge-pairs ... no weight"),
    ],
)
def test_pairs_without_an_endpoint_are_refused_before_an_answer(words, message, models, capsys):
    assert main([*models, *words]) == 2
    printed = capsys.readouterr()
    assert printed.err == naming(message) and " answers in " not in printed.err


def test_a_column_that_the_pairs_fill_is_refused_before_an_answer(serve, models, capsys, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"prompt": "one", "other_response": "two"}\n')
    server = serve(prefers_longer)
    assert main([*models[:3], "--prompts", str(tmp_path / "q.jsonl"), *judged_by(server)]) == 2
    printed = capsys.readouterr()
    assert printed.err == naming("--judge-pairs ... 'other_response' ... rename") and " answers in " not in printed.err
    assert not server.questions
