"""`rlhf reward` from its command line: a table of a reward function's values on rows of a data set."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from support.in_process import error_lines, undone_afterwards
from support.messages import naming

from pipeline.generation.rollouts import Prompt
from pipeline.inference.answer_scores import SamplePrompt
from pipeline.processes import time_limit
from rlhf.rewards.reward import drawn, main
from rlhf.rewards.sample import main as sample

CODE = """
import time
def length(completions, completion_ids):
    assert [len(text.encode()) for text in completions] == [*map(len, completion_ids)]
    return [len(text) for text in completions]
def solved(prompts, completions, solution):
    print("looking at", prompts[0])
    return [None if known is None else known in text for text, known in zip(completions, solution)]
def tokens(completion_ids):
    return [[0.25] * len(ids) for ids in completion_ids]
def spoken(prompts, completions):
    return [len(prompts[0]) + (one[0]["role"] == "assistant") for one in completions]
def failing(completions):
    if "7" in completions[0]:
        raise ValueError("seven")
    return [1] * len(completions)
def slow(completions):
    time.sleep(20)
def zero(completions):
    return [0] * len(completions)
def single(completions):
    return [1.0]
def ranked(completions, completion_ids):
    return [completions.index(text) + len(completions) / 10 for text in completions]
def wrong(completions):
    return ["good"] * len(completions)
"""
ROWS = [
    {"prompt": "2+2?", "response": "It is 4, as anybody knows\nwho has ever learnt to count.", "solution": "4"},
    {"prompt": "2+3?", "chosen": "7 \u001b[31m", "rejected": "b"},
    {"prompt": "2+4?", "solution": "4"},
    {"prompt": "", "solution": "4"},
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the command, with a file of functions and one of rows."""
    monkeypatch.chdir(tmp_path)
    Path("f.py").write_text(CODE)
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with undone_afterwards():
        yield tmp_path


def table(capsys: pytest.CaptureFixture, *words: str, code: int = 0) -> tuple[list[list[str]], str]:
    """The printed lines, in cells, and what went to stderr."""
    assert main([*words]) == code
    printed = capsys.readouterr()
    return [
        [line[:6].strip(), line[7:47].strip(), *line[47:].split()] for line in printed.out.splitlines()
    ], printed.err


def test_values_of_two_functions(folder, capsys):
    lines, errors = table(capsys, "f.py:length", "f.py:solved:0.5", "--data", "d.jsonl", "--completion", "None so far")
    assert lines == [
        ["row", "completion", "length", "solved"],
        ["1", "It is 4, as anybody knows who has ever l", "55", "1"],
        ["1", "None so far", "11", "0"],
        ["2", "7 \\x1b[31m", "7", "None"],
        ["2", "None so far", "11", "None"],
        ["3", "None so far", "11", "0"],
        ["", "mean", "19", "0.3333"],
        ["", "None", "0", "2"],
        ["", "failures", "0", "0"],
    ]
    assert errors == naming("note: 1 dropped ... empty prompt (first: d.jsonl:4)")
    assert "reward worker 0: looking at 2+2?\n" in errors or "reward worker 1: looking at 2+2?\n" in errors


def test_a_call_has_all_responses_of_a_group(folder, capsys):
    """Those of a row, again and again: a function that answers for one alone is found, as training would."""
    words = ("f.py:ranked", "--data", "d.jsonl", "-n", "2", "--completion", "b")
    lines, _ = table(capsys, *words, "--num-samples-per-prompt", "5")
    assert [line[2:] for line in lines[1:5]] == [["0.5"], ["1.5"], ["0.5"], ["1.5"]]
    lines, _ = table(capsys, *words, "--num-samples-per-prompt", "1")
    assert [line[2:] for line in lines[1:5]] == [["0.2"], ["1.2"], ["0.2"], ["1.2"]], "no response is left out"
    assert main(["f.py:single", "--data", "d.jsonl", "-n", "1"]) == 2
    assert capsys.readouterr().err == naming("single, prompt d.jsonl:1 ... 1 values for 8")


def test_a_function_that_tells_no_responses_apart_is_told_of(folder, capsys):
    _, errors = table(capsys, "f.py:zero", "f.py:length", "f.py:solved", *ON, "--completion", "b")
    assert errors == naming("note: zero: 0 ... trains nothing") and "note: length" not in errors


@pytest.mark.slow
def test_settings_of_the_box_are_shown_as_a_file_that_works(folder, capsys):
    lines, errors = table(capsys, "tags:0.5", "f.py:length", "repetition", *ON)
    text = errors[errors.index("reward_function:") :].partition("\nnote:")[0]
    assert [one["args"] for one in yaml.safe_load(text)["reward_function"]] == [
        {"names": ["think", "answer"]}, {"size": 3, "unit": "tokens"},
    ]  # fmt: skip
    Path("c.yaml").write_text(text)
    assert [line[2] for line in table(capsys, *ON, "--config", "c.yaml")[0]] == [line[2] for line in lines]


def test_the_url_of_a_judge_is_given_in_a_file(folder, capsys):
    assert main(["judge", *ON]) == 2
    errors = capsys.readouterr().err
    assert "    url: http://127.0.0.1:8000/v1\n    model: NAME\n" in errors
    assert errors.splitlines()[-1] == naming("--config ... `rlhf reward judge --data FILE`")


def test_functions_of_a_yaml_file_have_their_args(folder, capsys):
    function = {"name": "overlong", "weight": 2, "args": {"max_length": 9, "margin": 4}}
    Path("c.yaml").write_text(json.dumps({"reward_function": [function], "data": "d.jsonl", "n": 2}))
    lines, _ = table(capsys, "--config", "c.yaml")
    assert [line[2:] for line in lines[:3]] == [["overlong"], ["-1"], ["-0.5"]]


@pytest.mark.slow
def test_values_of_tokens_and_failures(folder, capsys):
    words = ("f.py:tokens", "f.py:failing", "f.py:slow", "--data", "d.jsonl", "-n", "2", "--reward-timeout-s", "0.3")
    lines, errors = table(capsys, *words, code=2)
    assert [line[2:] for line in lines] == [
        ["tokens", "failing", "slow"],
        ["sum", "13.75", "1", "timed", "out"],
        ["sum", "1.75", "raised", "timed", "out"],
        ["7.75", "1", "-"],
        ["0", "0", "0"],
        ["0", "1", "2"],
    ]
    assert naming("note: failing ... ValueError: seven (f.py:15) ... 1 of 2") in errors.splitlines()
    assert naming("note: slow ... 0.3 s ... 2 of 2") in errors.splitlines()
    assert "Traceback" not in errors
    wholly = naming("error: --reward-function ... slow ... 2 of the last 2 ... (2 timed out) ... 0.3 s")
    assert errors.splitlines()[-1] == wholly, "the table is printed, and nothing worked"


def test_each_distinct_error_is_told_once_with_its_count(folder, capsys):
    code = "def varied(completions):\n    if len(completions[0]) % 3:\n        int(completions[0][:2])\n    {}[1]\n"
    Path("g.py").write_text(code)
    Path("e.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}?", "response": "x" * n}) + "\n" for n in (3, 4, 5, 6))
    )
    _, errors = table(capsys, "g.py:varied", "--data", "e.jsonl", code=2)
    notes = [line for line in errors.splitlines() if line.startswith("note: varied: raised")]
    assert notes == [
        naming("varied ... KeyError: 1 (g.py:4) ... 2 of 4"),
        naming("varied ... ValueError ... 'xx' (g.py:3) ... 2 of 4"),
    ]
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_built_in_length_needs_no_settings(folder, capsys):
    lines, errors = table(capsys, "length", *ON, "--completion", "b")
    assert lines[1][-1] == "1" and "high: 256" in errors


@pytest.mark.parametrize("key", ["messages", "chat"])
def test_prompts_of_messages_are_conversations(folder, capsys, key):
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}]
    Path("c.jsonl").write_text(json.dumps({key: [*turns, {"role": "assistant", "content": "Hello."}]}))
    mapped = [] if key == "messages" else ["--column-map", "messages=chat"]
    lines, _ = table(capsys, "f.py:spoken", "--data", "c.jsonl", *mapped)
    assert lines[1] == ["1", "Hello.", "3"], "two turns, and an answer of the assistant"


def test_a_text_beside_conversations_is_one_as_in_training(folder, capsys):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    Path("c.jsonl").write_text(json.dumps({"messages": turns}) + "\n" + json.dumps(ROWS[0]))
    lines, _ = table(capsys, "f.py:spoken", "--data", "c.jsonl")
    assert [line[2] for line in lines[1:3]] == ["2", "2"], "a turn, and an answer of the assistant"


ON = ["--data", "d.jsonl", "--n", "2"]
WRONG = [
    ([], "--reward-function ... rlhf reward rewards.py:length --data FILE"),
    (["f.py:length"], "--data: missing ... a file ... a folder ... a hub id"),
    (["f.py:lenght", *ON], "--reward-function {}/f.py:lenght ... 'lenght' ... length"),
    (["g.py:length", *ON], "--reward-function g.py:length ... (No such file or directory)"),
    (
        ["--data", "d.jsonl", "f.py:length"],
        "--data ... 2 values (d.jsonl f.py:length) ... one ... --reward-function",
    ),
    (["f.py:length", "--data", "e.jsonl"], "data path 'e.jsonl' ... no such file ... did you mean"),
    (["f.py:length", "--data", "d.jsonl"], "d.jsonl:3 ... prompt, solution ... response"),
    (["f.py:solved", "--data", "t.txt"], "t.txt:1 ... text ... prompt"),
    (
        ["f.py:wrong", *ON],
        "--reward-function {}/f.py:wrong ... prompt d.jsonl:1 ... response 0 ... 'good' (str)",
    ),
    (["f.py:solved", "--data", "p.jsonl"], "--reward-function {}/f.py:solved ... 'solution'"),
    (
        ["exact_match", "--data", "d.jsonl", "-n", "1"],
        "--reward-function exact_match ... 'answer' ... response, solution",
    ),
]


@pytest.mark.parametrize(("words", "line"), WRONG)
def test_what_is_wrong_is_one_line(folder, capsys, words, line):
    Path("t.txt").write_text("a text\n")
    Path("p.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    assert main(words) == 2
    lines = [one for one in error_lines(capsys.readouterr().err) if one.startswith("error: ")]
    assert len(lines) == 1 and lines[0] == naming("error: " + line.format(folder))


DEEP = "[" * 100_000
HOSTILE = {
    "functions": (["fifo.py:length", *ON], "--reward-function ... fifo.py"),
    "data": (["f.py:length", "--data", "fifo.jsonl"], "fifo.jsonl"),
    "nested": (["f.py:length", "--data", "nested.jsonl"], "nested.jsonl:1"),
    "nested prompt": (["f.py:length", "--data", "prompt.jsonl"], "prompt.jsonl:1"),
    "nested column": (["f.py:solved", "--data", "column.jsonl"], "column.jsonl:1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_fifo_and_rows_that_are_nested_too_deep_are_one_line(folder, capsys, name):
    for fifo in ("fifo.py", "fifo.jsonl"):
        os.mkfifo(fifo)
    closed = DEEP + "]" * len(DEEP)
    Path("nested.jsonl").write_text(f"{DEEP}\n")
    Path("prompt.jsonl").write_text(f'{{"prompt": {closed}, "response": "b"}}\n')
    Path("column.jsonl").write_text(f'{{"prompt": "a", "response": "b", "solution": {closed}}}\n')
    words, line = HOSTILE[name]
    with time_limit(20):
        assert main(words) == 2
    (error,) = error_lines(capsys.readouterr().err)
    assert error == naming(f"error: ... {line}")


# --- with a model: the task ---


def write_rows(name: str, rows: list[dict]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_task_is_judged_by_the_answers_that_sample_would_write(folder, rambling, capsys):
    """The figures are those of `rlhf sample` on the same prompts, by a loop over its rows.

    A prompt counts once, and held-out rows do not count.
    """
    rows = [{"prompt": f"What is {n} + {n}?", "known": "abcdefgh"[n % 8], "split": "train"} for n in range(12)]
    held_out = [{"prompt": f"And {n}?", "known": "e", "split": "test"} for n in range(6)]
    write_rows("q.jsonl", [*rows, *held_out, *rows[:3]])
    write_rows("train.jsonl", rows)
    code = "def has(completions, known):\n    return [float(k in text) for text, k in zip(completions, known)]"
    Path("r.py").write_text(code)
    words = ["--data", "q.jsonl", "--model", rambling, "--max-answer-seq-len", "6", "--num-samples-per-prompt", "3"]
    assert main(["r.py:has", *words, "--output", "out/new"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith(f"12 prompts x 3 answers of {rambling} at temperature 1 in ")
    printed = {line[:20].strip(): line[20:] for line in lines}
    also = ["-n", "3", "--max-new-tokens", "6", "--temperature", "1", "--output", "a.jsonl"]
    assert sample([rambling, "--data", "train.jsonl", "--reward-function", "r.py:has", *also]) == 0
    groups = [json.loads(line)["answers"] for line in Path("a.jsonl").read_text().splitlines()]
    rewards = [[answer["reward"] for answer in group] for group in groups]
    figures = {
        "pass@1": sum(map(sum, rewards)) / 36,
        "pass@3": sum(any(group) for group in rewards) / 12,
        "best of 3": sum(max(group) for group in rewards) / 12,
        "groups that differ": sum(len(set(group)) > 1 for group in rewards) / 12,
        "truncated answers": sum(one["finish_reason"] == "limit" for group in groups for one in group) / 36,
    }
    assert 0 < figures["groups that differ"] < 1
    assert {name: float(printed[name].split()[0]) for name in figures} == pytest.approx(figures, abs=6e-4)
    assert dict(json.loads(Path("out/new/task_trial.json").read_text())["rows"]) == printed


def test_answers_of_a_task_depend_on_the_seed(folder, rambling, capsys):
    write_rows("q.jsonl", [{"prompt": f"What is {n}?"} for n in range(6)])
    words = ["length", "--data", "q.jsonl", "--model", rambling, "--max-answer-seq-len", "8"]
    printed = []
    for seed in (1, 2, 1):
        assert main([*words, "--seed", str(seed)]) == 0
        printed.append(capsys.readouterr().out.splitlines()[1:])
    assert printed[0] == printed[2] != printed[1]


def test_prompts_that_training_drops_are_not_tried(folder, rambling, capsys):
    long = [{"prompt": f"What is {' + '.join(['1'] * 12)} + {n}?"} for n in range(3)]
    write_rows("q.jsonl", [{"prompt": f"What is {n}?"} for n in range(4)] + long)
    words = ["length", "--data", "q.jsonl", "--model", rambling, "--max-answer-seq-len", "8"]
    for limit, count in (((), 7), (("--max-prompt-seq-len", "40"), 4)):
        assert main([*words, *limit]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith(f"{count} prompts x ")
        assert ("3 dropped: prompt longer" in printed.err) == (count == 4)


def test_prompts_of_a_task_are_drawn_at_random():
    prompts = [SamplePrompt(n, "", (), Prompt.of([n]), 0, "", "train") for n in range(100)]
    first, again, other = (drawn(prompts, 20, seed) for seed in (1, 1, 2))
    assert first == again != other and [one.number for one in first] == [*range(1, 21)]
    places = [one.tokens.ids[0] for one in first]
    assert places == sorted(set(places)) and len({b - a for a, b in pairwise(places)}) > 3, "no fixed stride"
    held_out = [replace(one, split="test") for one in prompts]
    assert len(drawn(prompts[:5] + held_out, 20, 1)) == 5 and len(drawn(held_out, 200, 1)) == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--completion", "x"], "error: --completion ... --model"),
     (["--num-samples-per-prompt", "1"], "error: --num-samples-per-prompt: got 1 ... expected 2 or more"),
     (["--output", "theirs"], "error: --output: theirs/task_trial.json ... no trial wrote"),
     (["--output", "folder"], "error: --output: folder ... model"),
     (["--max-answer-seq-len", "9999999"], "error: --max-answer-seq-len: 9999999 ... positions"),
     (["--model", ""], "error: --model")],
)  # fmt: skip
def test_what_a_task_does_not_take(folder, rambling, capsys, words, message):
    for name in ("theirs/task_trial.json", "folder/config.json"):
        Path(name).parent.mkdir()
        Path(name).write_text('{"title": "Mine"}')
    assert main(["f.py:length", "--data", "d.jsonl", "--model", rambling, *words]) == 2
    assert error_lines(capsys.readouterr().err) == [naming(message)]


def test_a_folder_that_cannot_be_made_is_refused_before_sampling(folder, rambling, capsys):
    Path("file").touch()
    assert main(["f.py:length", "--data", "d.jsonl", "--model", rambling, "--output", "file/out"]) == 3
    printed = capsys.readouterr()
    assert printed.out == "" and error_lines(printed.err) == [naming("error: ... file/out")]


@pytest.mark.parametrize(
    "words", [("--output", "out"), ("--seed", "3"), ("--max-answer-seq-len", "8"), ("--max-prompt-seq-len", "8")]
)
def test_flags_of_a_task_need_its_model(folder, capsys, words):
    assert main(["f.py:length", "--data", "d.jsonl", "--completion", "x", *words]) == 2
    assert error_lines(capsys.readouterr().err) == [naming(f"error: {words[0]} ... --model")]


@pytest.mark.parametrize(
    ("function", "message"),
    [("bad", "error: ... bad gave no value ... no"), ("some", "error: ... some gave no value ... no"),
     ("none", "error: ... no answer ... None"), ("each", "error: ... each: got a value for each token")],
)  # fmt: skip
def test_a_task_whose_functions_fail_ends_with_their_error(folder, rambling, capsys, function, message):
    """Too many failures end it as they end a run: `some` fails for half of the answers."""
    Path("r.py").write_text(
        "def bad(completions):\n    raise ValueError('no')\n"
        "def some(completions, known):\n    if known[0] in 'aceg':\n        raise ValueError('no')\n"
        "    return [1.0] * len(completions)\n"
        "def none(completions):\n    return [None] * len(completions)\n"
        "def each(completion_ids):\n    return [[0.1] * len(ids) for ids in completion_ids]"
    )
    write_rows("q.jsonl", [{"prompt": f"Is {n} even?", "known": "abcdefgh"[n % 8]} for n in range(16)])
    words = ["--data", "q.jsonl", "--model", rambling, "--max-answer-seq-len", "4"]
    assert main([f"r.py:{function}", *words]) == 2
    assert error_lines(capsys.readouterr().err)[-1] == naming(message)
