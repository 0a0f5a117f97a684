"""The page of a stage: what it is called, its samples, and the lines of a command."""

import json
import logging
import shlex
import subprocess
from types import SimpleNamespace
from typing import Any

from pipeline.checkpoints.card_results import evaluated
from pipeline.configuration.flags import parse
from pipeline.console import shell_lines, wrapped
from pipeline.files import write_json
from pipeline.run.evaluations import row_values_line, verdict
from pipeline.run.layout import meaning_file, row_values_file
from pipeline.training.page import show_samples
from rlhf.stages import stage_of


def test_a_long_prompt_shows_what_was_asked_last_and_an_answer_how_it_begins(caplog):
    row = {
        "prompt": f"system\n{'rule ' * 60}\nuser\nWhat is 2 + 2?",
        "response": f"4, {'surely ' * 60}",
        "score": 1.0,
        "kl": 0.5,
    }
    with caplog.at_level(logging.INFO):
        show_samples("ppo", 3, [row])
    _, prompt, answer, numbers = caplog.messages[0].splitlines()
    assert prompt.startswith("  prompt: ... ") and prompt.endswith(" user What is 2 + 2?") and len(prompt) == 190
    assert answer.startswith("  answer: 4, surely ") and answer.endswith(" ...") and numbers == "  score 1  KL 0.5"


def test_samples_of_a_run_without_a_reference_have_no_divergence(caplog):
    with caplog.at_level(logging.INFO):
        show_samples("ppo", 3, [{"prompt": "P", "response": "A", "score": 1.0}])
    assert caplog.messages[0].splitlines()[-1] == "  score 1"


def test_of_several_samples_of_a_prompt_the_first_is_shown(caplog):
    rows = [
        {"prompt": f"P{prompt}", "response": f"A{n}", "score": 1.0, "kl": 0.5} for prompt in range(4) for n in range(2)
    ]
    with caplog.at_level(logging.INFO):
        show_samples("ppo", 3, rows)
    words = [line.split() for line in caplog.messages[0].splitlines()[1:]]
    assert [line[1] for line in words if line[0] != "score"] == ["P0", "A0", "P1", "A0", "P2", "A0"]


def test_a_run_is_called_by_its_method():
    for section, words, title in [
        ("ppo", [], "PPO"),
        ("ppo", ["--method", "reinforce_pp", "--reward-function", "length"], "REINFORCE++"),
        ("dpo", ["--method", "ipo"], "identity preference optimisation"),
        ("sft", [], "supervised fine-tuning"),
    ]:
        stage = stage_of(section)
        assert stage.title_of(parse(stage.config, words, section=section).config) == title


def test_what_was_reached_is_said_in_words(tmp_path):
    lines = [
        '{"step": 0, "eval_objective/scores": 0.5, "eval_objective/kl": 0.0}',
        '{"step": 4, "eval_objective/scores": null, "eval_objective/kl": 2.0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    titles = {"eval_objective/scores": "held-out score", "eval_objective/kl": "held-out KL"}
    write_json(meaning_file(tmp_path), {"titles": titles, "metrics": {"objective/scores": {"better": 1}}})
    found = verdict(tmp_path)
    assert (found.figures, found.worse) == ("held-out score 0.5 -> nan, held-out KL 0 -> 2", "held-out score")


def test_evaluations_of_other_rows_are_not_compared(tmp_path):
    """A run that goes on may evaluate fewer rows: their score is no fall, in its last line and its card."""
    accuracies = [(0.5, 60), (0.75, 60), (0.875, 40), (0.125, 40)]
    evaluations = [{"step": n, "eval_accuracy": value, "eval_rows": rows} for n, (value, rows) in enumerate(accuracies)]
    lines = [json.dumps(line) + "\n" for line in evaluations]
    won = [[float(n < value * rows) for n in range(rows)] for value, rows in accuracies]
    rows = [row_values_line(n, {"eval_accuracy": values}, f"{len(values)}") for n, values in enumerate(won)]
    meaning = {"titles": {"eval_accuracy": "accuracy"}, "metrics": {"accuracy": {"better": 1}}, "rows": "pairs"}
    write_json(meaning_file(tmp_path), meaning)
    for number, kind, figures in [
        (2, "better", "accuracy 0.5 -> 0.75 (60 pairs)"),
        (3, "", "accuracy 0.875 (40 pairs)"),
        (4, "worse", "accuracy 0.875 -> 0.125 (40 pairs)"),
    ]:
        (tmp_path / "metrics.jsonl").write_text("".join(lines[:number]))
        row_values_file(tmp_path).write_text("".join(rows[:number]))
        assert (verdict(tmp_path).kind, verdict(tmp_path).figures) == (kind, figures)
        run: Any = SimpleNamespace(folder=tmp_path)
        ends = evaluated(run, step=number)
        assert [line["step"] for line in ends] == {2: [0, 1], 3: [2, 2], 4: [2, 3]}[number]


def test_a_command_of_several_lines_is_one_command_to_a_shell():
    words = ["printf", "%s\n", *(f"--flag-{n}" for n in range(12)), "two words", "it's", "x" * 100, "--last"]
    text = shell_lines(words)
    assert all(len(line) <= 80 - len("$ ") for line in text.splitlines() if "x" * 100 not in line) and "\\\n" in text
    assert (
        subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
        == words[2:]
    )
    assert shell_lines(["a", "b c"]) == shlex.join(["a", "b c"])
    assert shell_lines(["x" * 70, "--name", "value", "--on"]).splitlines()[1] == "    --name value --on"
    assert wrapped("== stage 1: done in 0:01, held-out score 0.5 -> 0.25").count("\n") == 0
