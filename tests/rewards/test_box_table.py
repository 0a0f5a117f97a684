"""The names of the built-in functions, and the check of a function with its settings before a run starts."""

import inspect
import subprocess
import sys

import pytest
from support.messages import naming
from support.source_tree import ROOT

from pipeline.errors import InputError
from pipeline.rewards.box.instructions import CHECKS
from pipeline.rewards.box.table import BOX, check_settings, settings_of


def test_the_box_holds_every_function_by_its_name():
    own = "math_answer exact_match regex_match format_match tags length overlong repetition language reasoning_gym"
    assert BOX.keys() == {*own.split(), "right_number", "instructions", "judge", *CHECKS} and len(CHECKS) == 12
    assert all(inspect.getdoc(function) for function in BOX.values())


def test_settings_are_named_and_have_defaults_and_all_else_is_an_argument_of_trl():
    for name, function in BOX.items():
        parameters = inspect.signature(function).parameters
        others = parameters.keys() - settings_of(function) - {"columns"}
        assert others and others <= {"prompts", "completions", "completion_ids"}, name
        assert all(parameters[setting].default is not inspect.Parameter.empty for setting in settings_of(function))
    assert [*settings_of(BOX["keyword_frequency"])] == ["word", "at_least", "at_most"]


@pytest.mark.parametrize("name", ["format_match", "title", "overlong", "repetition"])
def test_a_function_ignores_other_columns(name):
    settings = {"max_length": 9, "margin": 3} if name == "overlong" else {}
    arguments = {"prompts": ["p"], "completions": ["<<a>>"], "completion_ids": [[1, 2]], "answer": [4]}
    assert BOX[name](**arguments, **settings) == [1.0 if name == "title" else 0.0]


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("format_match", {"patern": "a"}, "'patern' ... pattern? ... pattern"),
        ("title", {"words": 3}, "'words' ... no settings"),
        ("format_match", {"pattern": "("}, "{'pattern': '('} ... missing ), unterminated"),
        ("exact_match", {"pattern": "("}, "missing ), unterminated subpattern"),
        ("regex_match", {"pattern": 5}, "{'pattern': 5} ... must be string"),
        ("number_of_words", {"at_least": "a"}, "{'at_least': 'a'}: '<=' not supported"),
        ("overlong", {}, "needs max_length"),
        ("judge", {"model": "m"}, "url is no "),
    ],
)
def test_what_cannot_run_is_told_before_a_run(name, settings, told):
    with pytest.raises(InputError) as raised:
        check_settings(name, settings)
    assert str(raised.value) == naming(told)


def test_what_can_run_passes():
    for name, settings in {
        "exact_match": {"column": "right"}, "length": {"high": 9}, "overlong": {"max_length": 9, "margin": 3},
        "keywords": {"words": ["a"]}, "instructions": {"strict": True}, "title": {}, "tags": {"names": ["a"]},
        "judge": {"url": "http://127.0.0.1:9/v1", "model": "m"},
    }.items():  # fmt: skip
        if name != "judge" or pytest.importorskip("httpx"):
            check_settings(name, settings)


def test_the_box_loads_no_package_before_it_is_used():
    code = "import sys, pipeline.rewards.box.table; "
    code += (
        "print(*{'torch', 'numpy', 'httpx', 'sympy', 'py3langid', 'reasoning_gym', 'math_verify'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
