"""Whatever the files of a run hold, a report is written: a chapter or a value is left out, and nothing hangs."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming
from support.recorded_runs import ROWS, record

from pipeline.processes import time_limit
from pipeline.reporting import page as page_module
from rlhf.main import main

DIGITS = 10**400
VALUES: tuple[Any, ...] = (None, "x", -1, DIGITS, [], [1], {}, {"a": 1}, True, "\x1b[2J<b>")
FILES = (
    "metrics.jsonl", "samples.jsonl", "meaning.json", "env.json", "rows.json", "plan.json", "config.json", "done.json",
    "log.txt", "outcome/rank-0.json", "prompt_eval.json", "heartbeat/rank-0.json", "task_trial.json",
    "eval.json",
)  # fmt: skip
PLAN = {"target": "1 x H100", "memory_gib": {"train": {"allocated": 3.5, "reserved": [4.0, 5.0]}}}
EVALUATION = {
    "a": {
        "length": {"mean": 3.0, "standard_error": 0.5, "count": 9},
        "accuracy": {"mean": 0.5, "standard_error": None},
    },
    "b": {"length: change": {"mean": 1.0, "standard_error": 0.1, "count": 9}},
}
TASK = {"title": "t", "rows": [["pass@1", "0.5"]]}
ANSWERS = {
    "models": [{"label": "A", "path": "b", "mean_tokens": 1.0, "against": {"win_rate": {"value": 0.5, "low": 0.1}}}],
    "prompts": [{"prompt": "p", "answers": {"A": [{"text": "t", "num_tokens": 7, "finished": False, "score": 1.5}]}}],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with every file that a report reads."""
    monkeypatch.setattr(page_module, "svg", lambda panel, salt: "<svg></svg>")
    monkeypatch.setattr(page_module, "write_png", lambda file, panels: file.touch())
    run = record(tmp_path / "output", "ppo", steps=2, interval=1, seed=3)
    for name, content in (
        ("rows.json", ROWS),
        ("plan.json", PLAN),
        ("prompt_eval.json", ANSWERS),
        ("task_trial.json", TASK),
        ("eval.json", EVALUATION),
    ):
        (run / name).write_text(json.dumps(content))
    (run / "heartbeat").mkdir()
    (run / "heartbeat/rank-0.json").write_text(json.dumps({"phase": "train", "step": 1, "time": 5.0}))
    return run


def reported(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """What a report says of what it leaves out; each in a line."""
    with time_limit(20):
        assert main(["report", str(folder)]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    assert (folder / "report.html").is_file() and "Traceback" not in shown.err and "\x1b" not in shown.err
    assert all(line.startswith("warning: ") for line in shown.err.splitlines()), shown.err
    return shown.err


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a JSON value, one of the like entries of a list or a table of metrics."""
    yield path
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))[:1]
        if isinstance(value, list)
        else []
    )
    for key, one in items[:3] if path[-1:] == ("metrics",) else items:
        yield from paths_in(one, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_fifo_or_nested_or_no_json(folder, capsys, name):
    reported(capsys, folder)
    for content in ("[" * 100_000, '{"step": ' * 50_000, "\x00\xff", '{"step": ' + "9" * 400 + "}\n", "{}\n", "5\n"):
        (folder / name).write_text(content)
        reported(capsys, folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    reported(capsys, folder)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_a_value_of_a_wrong_type(folder, capsys, name):
    content = json.loads((folder / name).read_text())
    places = list(paths_in(content))
    drawn = random.Random(name).sample([(place, value) for place in places for value in VALUES], k=12)
    for place, value in drawn:
        (folder / name).write_text(json.dumps(changed(content, place, value)))
        reported(capsys, folder)


@pytest.mark.parametrize("place", ["titles", "a title", "title of a metric"])
@pytest.mark.parametrize("value", [None, 7, [1], DIGITS], ids=["null", "number", "list", "400 digits"])
def test_titles_of_a_wrong_type(folder, capsys, place, value):
    """They name the numbers of the verdict, and the curves and rows of the stage's chapter."""
    meaning = json.loads((folder / "meaning.json").read_text())
    metrics = {name: metric | {"title": value} for name, metric in meaning["metrics"].items()}
    broken = {
        "titles": {"titles": value},
        "a title": {"titles": dict.fromkeys(meaning["titles"], value)},
        "title of a metric": {"metrics": metrics},
    }
    assert meaning["titles"] and metrics
    (folder / "meaning.json").write_text(json.dumps(meaning | broken[place]))
    said = reported(capsys, folder)
    is_shown = "Stage 3: PPO" in (folder / "report.md").read_text()
    assert is_shown or said == naming("Stage 3: PPO ... left out"), said


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_line_of_wrong_types(folder, capsys, name):
    lines = (folder / name).read_text()
    first = json.loads(lines.splitlines()[0])
    for key in random.Random(name).sample(list(first), k=4):
        for value in (None, "x", DIGITS, [1], {"a": 1}):
            (folder / name).write_text(lines + json.dumps(first | {key: value}) + "\n")
            reported(capsys, folder)


def test_a_chapter_that_cannot_be_shown_is_left_out_in_a_line(folder, capsys):
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines + json.dumps({"step": DIGITS, "time": 1.0, "step_s": 1.0}) + "\n")
    (folder / "plan.json").write_text(json.dumps({"memory_gib": {"train": {"allocated": "much"}}}))
    assert reported(capsys, folder) == naming("Stage 3: PPO ... left out")
    (folder / "plan.json").unlink()
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "prompt_eval.json").write_text(json.dumps({"models": [5], "prompts": []}))
    assert reported(capsys, folder) == naming("prompt_eval.json ... left out")
    assert "Stage 3: PPO" in (folder / "report.md").read_text()
