"""Rows of `rlhf sample`: which answers they have, and that the readers of steps 1 and 2 read back what was sampled."""

import json

import pytest

from pipeline.data.counts import Counts
from pipeline.data.formats import Record, read_records
from pipeline.data.sources import read_rows
from pipeline.data.turns import Message
from pipeline.inference.answer_rows import Answer, prompt_columns, row_of
from pipeline.rewards.pool import Failure

PROMPT = {"prompt": "Why?"}
FAILED = Failure("raised", "no")


def answer(text: str, reward: float | None, reason: str = "end") -> Answer:
    return Answer(text, (5, 6, 2), reason, -1.5, {"f": reward}, reward)


def read_back(path, *rows) -> list[Record]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return list(read_records(read_rows(str(path)), Counts()))


@pytest.mark.parametrize(
    ("values", "scores", "reward"),
    [
        ({"a": 2.0, "b": 3.0}, {"a": 2.0, "b": 3.0}, 0.5),
        ({"a": 2.0, "b": [1.0, 0.5]}, {"a": 2.0, "b": 1.5}, 1.25),  # tokens: 2 - 0.5 x 1.5
        ({"a": None, "b": 3.0}, {"a": None, "b": 3.0}, -1.5),  # the first does not apply
        ({"a": FAILED, "b": 3.0}, {"a": None, "b": 3.0}, None),
        ({"a": None, "b": None}, {"a": None, "b": None}, None),
        ({"a": 0.0, "b": []}, {"a": 0.0, "b": 0.0}, 0.0),
        ({}, {}, None),
    ],
)
def test_scores_and_weights(values, scores, reward):
    scored = Answer("x", (2,), "end").scored(values, {"a": 1.0, "b": -0.5})
    assert (scored.scores, scored.reward) == (scores, reward)


CASES = {
    "best and worst": ([answer("x", 1.0), answer("y", 3.0), answer("z", -2.0)], "y", "z"),
    "first of equals": ([answer("x", 0.0), answer("y", 3.0), answer("z", 3.0), answer("w", 0.0)], "y", "x"),
    "below zero": ([answer("x", -1.0), answer("y", -3.0)], "x", "y"),
    "a cut answer is not chosen": ([answer("x", 9.0, "limit"), answer("y", 2.0), answer("z", 1.0)], "y", "z"),
    "a cut answer is rejected": ([answer("x", -9.0, "limit"), answer("y", 2.0)], "y", "x"),
    "no score": ([answer("x", None), answer("y", 2.0), answer("z", 1.0)], "y", "z"),
    "no text": ([answer("", 9.0), answer("y", 2.0), answer("z", 1.0), answer("", -9.0)], "y", "z"),
    "NUL": ([answer("a\0", 9.0), answer("y", 2.0), answer("z", 1.0)], "y", "z"),
    "equal": ([answer("x", 1.0), answer("y", 1.0)], "x", "all scores are equal"),
    "same text": ([answer("x", 1.0), answer("x", 0.0)], "x", "no answer scores less than the best that ended"),
    "cut ones are better": ([answer("x", 9.0, "limit"), answer("y", 1.0)], "y", "no answer scores less than the best"),
    "all cut": ([answer("x", 1.0, "limit"), answer("y", 2.0, "limit")], "no answer that ended has", "no answer that"),
    "all failed": ([answer("x", None), answer("y", None)], "no answer has a text and a score", "no answer has a text"),
}


@pytest.mark.parametrize("case", CASES)
def test_best_and_worst(case):
    answers, best, worst = CASES[case]
    sft, pair = row_of("sft", PROMPT, answers), row_of("pairs", PROMPT, answers)
    if isinstance(sft, str):
        assert sft.startswith(best)
    else:
        assert sft == {"prompt": "Why?", "response": best}
    if isinstance(pair, str):
        assert pair.startswith(worst)
    else:
        assert pair == {"prompt": "Why?", "chosen": best, "rejected": worst}


def test_a_single_answer_without_scores_is_the_best():
    assert row_of("sft", PROMPT, [Answer("x", (2,), "end")]) == {"prompt": "Why?", "response": "x"}


TOOLS = [{"type": "function", "function": {"name": "add"}}]
SPOKEN = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
LOOKS_LIKE = "Human: a\n\nAssistant: b"  # the text of a single question
PROMPTS = {
    "text": ((Message("user", "Why\n\nnot?"),), "Why\n\nnot?"),
    "transcript": (SPOKEN, "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"),
    "like a transcript": ((Message("user", LOOKS_LIKE),), None),
    "with a system turn": ((Message("system", "s"), *SPOKEN), None),
    "with tools": (
        (Message("tools", json.dumps(TOOLS)), *SPOKEN),
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
    ),
}


@pytest.mark.parametrize("is_conversation", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_rows_are_read_back(name, is_conversation, tmp_path):
    """Also answers that look like transcripts; prompts are texts where the data has texts, if they can be."""
    turns, text = PROMPTS[name]
    columns = prompt_columns(turns, is_conversation=is_conversation)
    spoken = [{"role": turn.role, "content": turn.content} for turn in turns if turn.role != "tools"]
    assert columns["prompt"] == (spoken if is_conversation or text is None else text)
    assert columns.get("tools") == (TOOLS if name == "with tools" else None)
    answers = [answer(LOOKS_LIKE, 1.0), answer("Human: z\n\nAssistant:", 0.0)]
    (sft,) = read_back(tmp_path / "sft.jsonl", row_of("sft", columns, answers))
    assert (sft.messages, sft.chosen, sft.rejected) == (turns, LOOKS_LIKE, None)
    (pair,) = read_back(tmp_path / "pairs.jsonl", row_of("pairs", columns, answers))
    assert (pair.messages, pair.chosen, pair.rejected) == (turns, LOOKS_LIKE, "Human: z\n\nAssistant:")
    assert pair.margin is None
