"""Rows and the tool of the report on GSM8K with a calculator."""

import pytest

from benchmarks.learning.gsm8k.calculator import calculate
from benchmarks.learning.gsm8k.tools import conversation, numbers, solution, text

MARKED = "Ada has 48/2 = $<<48/2=24>>24.\nShe and Bo have 24 + 48 = <<24+48=72>>72 together.\n#### 72"


@pytest.mark.parametrize(
    ("expression", "result"),
    [("3 * (12 - 4)", "24"), ("1/3", "0.333333"), ("-2 + 1,000", "998"), (".20*50", "10"), ("0.1 + 0.2", "0.3")],
)
def test_calculate(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", ["2 ** 9", "len('a')", "x", "1 if 2 else 3", "True + 1"])
def test_only_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match="not arithmetic"):
        calculate(expression)


def test_a_solution_with_calls_and_without() -> None:
    turns = solution(MARKED)
    assert turns is not None
    assert text(turns) == "Ada has 48/2 = 24.\nShe and Bo have 24 + 48 = 72 together.\nThe answer is 72."
    talk = conversation("How many?", turns)
    assert [turn["role"] for turn in talk] == ["user", "assistant"] * 3
    assert talk[1]["content"].startswith("Ada has 48/2\n<tool_call>\n") and '"48/2"' in talk[1]["content"]
    assert talk[2]["content"] == "<tool_response>\n24\n</tool_response>"
    assert talk[5]["content"] == "72 together.\nThe answer is 72."


@pytest.mark.parametrize("marked", ["No mark.\n#### 1", "2 = <<1+2=4>>4\n#### 4", "2 = <<x=4>>4\n#### 4"])
def test_solutions_that_the_calculator_does_not_confirm_are_left_out(marked: str) -> None:
    assert solution(marked) is None


def test_questions_of_numbers_are_distinct_and_the_same_each_time() -> None:
    rows = list(numbers(50))
    assert len({row["prompt"] for row in rows}) == 50 and rows == list(numbers(50))
    assert all(int(row["answer"]) > 0 for row in rows)
