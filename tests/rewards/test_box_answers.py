"""Rewards for right answers: rows worked out by hand, TRL's accuracy, and reasoning_gym's own entries."""

import ast
import gzip
import inspect
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from support.messages import naming
from support.reward_functions import FORMS, as_messages

from pipeline.errors import InputError
from pipeline.rewards.box.answers import exact_match, final_number, math_answer, regex_match, right_number
from pipeline.rewards.box.reasoning import RUN_ANSWERS, prompt_lines, reasoning_gym


@pytest.fixture
def trl_accuracy():
    pytest.importorskip("math_verify", reason="needs the extra math")
    return pytest.importorskip("trl.rewards", reason="TRL is not installed").accuracy_reward


# (completion, column, reward)
MATH = [
    (r"So it is \boxed{42}.", 42, 1.0),
    (r"So it is \boxed{42}.", "41", 0.0),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\frac{2}{4}}", "$\\frac{1}{2}$", 1.0),
    (r"The answer is $(x+1)^2$.", "x^2+2x+1", 1.0),
    (r"\boxed{72}", "She sold 48 / 2 = 24 clips.\n#### 72", 1.0),
    (r"\boxed{24}", "She sold 48 / 2 = 24 clips.\n#### 72", 0.0),
    (r"\boxed{72}", "5 - 3 = 2, so it is \\boxed{24}.\n#### 72", 1.0),
    (r"\boxed{4}", "$4$ kg (not 7)", 1.0),
    (r"\boxed{0.5}", r"$\frac{1}{2}$ of the cake", 1.0),
    (r"\boxed{42}. The final answer is $\frac{$.", 42, 1.0),  # what is in a box goes before
    (r"The answer is $42$. The answer is $\frac{1}{$.", 42, 0.0),  # the last one counts, read or not
    ("It may be 42", 42, 0.0),
    ("It may be $42$", 42, 0.0),
    ("no idea", 42, 0.0),
    (r"\boxed{42}", None, None),
    (r"\boxed{42}", "", None),
]


@FORMS
def test_a_right_number_is_found_in_other_words(form):
    pytest.importorskip("math_verify", reason="needs the extra math")
    texts, golds, expected = zip(*MATH, strict=True)
    assert math_answer([form(text) for text in texts], answer=golds) == list(expected)
    assert math_answer([form("It may be 42")], column="right", plain=True, right=["42"]) == [1.0]


def test_the_right_answer_is_the_one_that_others_are_compared_with():
    """An equation is right for its value, but not the other way round."""
    pytest.importorskip("math_verify", reason="needs the extra math")
    assert math_answer([r"\boxed{x = 3}", r"\boxed{3}"], answer=["3", "x = 3"]) == [1.0, 1.0]
    assert math_answer([r"\boxed{1 < x < 2}", r"\boxed{(1, 2)}"], answer=["(1, 2)", "1 < x < 2"]) == [0.0, 1.0]


def test_mathematics_is_judged_as_in_trl(trl_accuracy):
    completions = [
        r"\boxed{42}", r"first \boxed{1}, then \boxed{42}", r"The final answer is $\frac{1}{3}$.", "42", "",
        "**Answer:** 42", r"\boxed{x^2 + 1}", r"\boxed{50\%}", r"\boxed{\text{no}}", r"\boxed{1{,}000}",
    ]  # fmt: skip
    golds = ["$42$", r"$\frac{1}{3}$", r"$\frac{3}{9}$", "$x^2+1$", r"$50\%$", "$1000$"]
    rows = [(text, gold) for text in completions for gold in golds]
    expected = trl_accuracy([as_messages(text) for text, _ in rows], [gold for _, gold in rows])
    assert math_answer([text for text, _ in rows], answer=[gold for _, gold in rows]) == expected
    assert 4 < sum(expected) < 20


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    for module, reward, extra in (
        ("math_verify", math_answer, "math"),
        ("reasoning_gym", reasoning_gym, "reasoning-gym"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(InputError) as raised:
            reward([])
        assert str(raised.value) == naming(
            f"{reward.__name__} ... import of {module} halted ... pip install '.[{extra}]'"
        )


@FORMS
def test_a_text_is_compared_with_that_of_a_column(form):
    rows = [(" Paris\n", "Paris"), ("paris", "Paris"), ("Lyon", "Paris"), ("4  2", "4 2"), ("42", 42), ("x", None)]
    texts, golds = zip(*rows, strict=True)
    texts = [form(text) for text in texts]
    assert exact_match(texts, answer=golds) == [1.0, 0.0, 0.0, 1.0, 1.0, None]
    assert exact_match(texts, answer=golds, keep_case=False) == [1.0, 1.0, 0.0, 1.0, 1.0, None]
    assert exact_match(texts, answer=golds, keep_space=True) == [0.0, 0.0, 0.0, 0.0, 1.0, None]
    assert exact_match([form("b"), form("c")], column="right", right=[["a", "b"], ["a", "b"]]) == [1.0, 0.0]
    tagged = [form("<a>1</a> no, <a>2\n</a>"), form("2")]
    assert exact_match(tagged, answer=["2", "2"], pattern="<a>(.*?)</a>") == [1.0, 0.0]
    assert exact_match([form("1 or 2")], answer=["2"], pattern=r"\d") == [1.0]


def test_a_column_that_no_row_has_is_told():
    with pytest.raises(InputError) as raised:
        exact_match(["a"], answers=["a"], source=["b"])
    assert str(raised.value) == naming("exact_match ... no prompt ... 'answer'")


@FORMS
def test_a_pattern_is_found_anywhere(form):
    texts = [form("see [1]"), form("see 1"), form("[12]")]
    assert regex_match(texts, pattern=r"\[\d\]") == [1.0, 0.0, 0.0]
    assert regex_match([form("a\nb")], pattern="a.b") == [0.0] and regex_match([form("a\nb")], pattern="(?s)a.b") == [
        1.0
    ]
    with pytest.raises(InputError, match="needs a pattern"):
        regex_match([])


# --- reasoning_gym ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym")


@FORMS
def test_an_answer_has_the_score_of_its_task(gym, form):
    """Two of leg_counting, whose answer is a number; one of number_sorting, which scores the form of a list too."""
    legs = [json.loads(line) for line in prompt_lines("leg_counting", 2, seed=3, max_animals=4)]
    (sort,) = (json.loads(line) for line in prompt_lines("number_sorting", 1, seed=3))
    entries = [json.loads(row["entry"]) for row in (*legs, sort)]
    again = gym.create_dataset("leg_counting", size=2, seed=3, max_animals=4)
    assert [entry["answer"] for entry in entries[:2]] == [entry["answer"] for entry in again]
    assert legs[0]["prompt"].startswith(entries[0]["question"].strip()) and "<answer>" in legs[0]["prompt"]
    right = [form(f"I count.\n<answer>1</answer> No: <answer> {entry['answer']} </answer>") for entry in entries]
    texts = [row["entry"] for row in (*legs, sort)]
    assert reasoning_gym(right, entry=texts) == reasoning_gym(right, column="e", e=entries) == [1.0, 1.0, 1.0]
    wrong = [form("<answer>-7</answer>"), form(f"It is {entries[1]['answer']}"), form("<answer>[]</answer>")]
    assert reasoning_gym(wrong, entry=texts) == [0.0, 0.0, 0.0]
    assert reasoning_gym(right[:2], entry=[None, texts[0]])[0] is None


def test_an_answer_that_breaks_the_score_of_its_task_has_0(gym):
    (line,) = prompt_lines("prime_factorization", 1, seed=3)
    entry = json.loads(json.loads(line)["entry"])
    score = gym.get_score_answer_fn("prime_factorization")
    with pytest.raises(ValueError):
        score("abc", entry)
    assert reasoning_gym(["<answer>abc</answer>"], entry=[entry]) == [0.0]
    with pytest.raises(ValueError):  # the row is wrong
        reasoning_gym(["<answer>abc</answer>"], entry=[entry | {"answer": "abd"}])


def test_a_task_that_runs_answers_as_python_is_refused(gym, tmp_path):
    marker = tmp_path / "ran"
    (line,) = prompt_lines("string_insertion", 1, seed=3)
    rows = {"entry": [json.loads(line)["entry"]]}
    text = f"<answer>[open({str(marker)!r}, 'w').name]</answer>"
    with pytest.raises(InputError, match=naming("string_insertion ... Python ... run_answers")):
        reasoning_gym([text], **rows)
    assert not marker.exists()
    assert reasoning_gym([text], run_answers=True, **rows) == [0.0] and marker.exists()


def test_the_tasks_that_run_answers_are_known(gym):
    """Every method `score_answer` that calls eval, exec, or sympy's parsers on other than its own entry."""
    from reasoning_gym.factory import DATASETS

    found = set()
    for task, (kind, _) in DATASETS.items():
        tree = ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))
        calls = [
            (ast.unparse(call.func).rpartition(".")[2], ast.unparse(call.args[0]))
            for method in ast.walk(tree)
            if isinstance(method, ast.FunctionDef) and method.name == "score_answer"
            for call in ast.walk(method)
            if isinstance(call, ast.Call) and call.args
        ]
        run = {"eval", "exec", "parse_expr", "sympify", "S", "Poly", "parse_latex", "lambdify"}
        found |= {task for name, argument in calls if name in run and not argument.startswith("entry[")}
    assert found == RUN_ANSWERS


def test_a_task_whose_entries_are_no_json_is_refused(gym):
    with pytest.raises(InputError, match=naming("rearc ... answers are wrong")):
        next(prompt_lines("rearc", 1, seed=3))
    with pytest.raises(InputError, match=naming("legs ... Dataset 'legs' not registered")):
        reasoning_gym(["<answer>1</answer>"], entry=['{"metadata": {"source_dataset": "legs"}}'])


# (completion, final number); the texts are of the kinds that models write on GSM8K.
NUMBERS = [
    ("She earns 9 x 2 = 18 dollars.\nThe answer is 18.", 18),
    ("The answer is $1,234.50 a year, for 12 months.", 1234.5),
    ("The answer is 5 x 3 = 15.", 15),
    ("**Answer:** 42", 42),
    ("The final answer is: **42**.", 42),
    ("the answer is \\boxed{1{,}000}", 1000),
    ("\\boxed{\\$18}. I have checked it 2 times.", 18),
    ("\\boxed{\\frac{1}{2}}", 0.5),
    ("The difference is: \\[ \\boxed{300 - 200} = 100 \\]", 100),
    ("\\boxed{x} = \\frac{6}{4}", 1.5),
    ("\\[ \\boxed{18} = 9 + 9 \\]", 18),
    ("\\boxed{18} = x. It took 2 days.", 18),
    ("\\boxed{9 - 2} = x in 2 days", 9),
    ("\\boxed{20 - 2}\n= 3 * 6", 20),
    ("\\boxed{9 - 2} and 7 = 7", 9),
    ("He has 10-5 = 5 left", 5),
    ("10-5", 5),
    ("It is -5 degrees", -5),
    ("-$5", -5),
    ("#### 72", 72),
    ("48/2 = 24 clips", 24),
    ("It is 3/4", 0.75),
    ("50% of 80 is 40", 40),
    ("So 7,", 7),
    ("It costs .5", 0.5),
    ("The answer is unknown. I counted 3.", 3),
    ("The answer is 3. Or rather, the answer is 4.", 4),
    ("An answer isn't 7", 7),
    ("Answer: Janet makes $18 every day at the market.", 18),
    ("1/0", None),
    ("9" * 5000, None),
    ("no number", None),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == number
    rows = [text, as_messages(text)]
    solution = "5 - 3 = 2, so <<2*3=6>>6.\n#### 6"
    assert right_number(rows, answer=[solution] * 2) == [float(number == 6)] * 2
    if number is not None:
        assert right_number(rows, column="right", right=[str(number), f"1 + 1 = 2\n#### {number:,}"]) == [1.0, 1.0]


def test_a_row_without_a_number_has_no_reward():
    assert right_number(["6", "6", "6"], answer=["#### 6", "six", None]) == [1.0, None, None]


def test_final_numbers_of_the_solutions_of_gsm8k(real_data):
    """Each solution ends with its number behind ####, and has it in its last computation."""
    with gzip.open(real_data / "instruct/gsm8k_train.jsonl.gz", "rt", encoding="utf-8") as file:
        solutions = [json.loads(line)["response"] for line in file]
    golds = [solution.rpartition("####")[2].strip().replace(",", "") for solution in solutions]
    assert len(golds) > 7000 and [final_number(solution) for solution in solutions] == [
        Fraction(gold) for gold in golds
    ]
    assert right_number([f"So it is {gold}." for gold in golds], answer=solutions) == [1.0] * len(golds)
    others = [golds[-1], *golds[:-1]]
    differ = [float(Fraction(a) == Fraction(b)) for a, b in zip(others, golds, strict=True)]
    assert right_number(others, answer=solutions) == differ and sum(differ) < 500
