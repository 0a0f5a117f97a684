"""Entries of --reward-function: files, built-in ones, weights and args, and what is wrong with them in one line."""

import hashlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.messages import naming
from support.reward_functions import scores, to

from pipeline.errors import InputError
from pipeline.rewards.functions import RewardFunction, parse_reward_functions
from pipeline.rewards.pool import RewardPool
from pipeline.rewards.rollout import EndedResponse, FunctionCalls

CODE = "def length(completions):\n    return [len(text) for text in completions]\n"
# What a box has, for this process and, as a module that Python imports at its start, for workers.
STAND_IN = """
import sys
from types import ModuleType
def digits(completions, *, at_most=100):
    return [min(at_most, sum(map(str.isdigit, text))) for text in completions]
async def upper(completions):
    return [text.isupper() for text in completions]
for name in ("pipeline.rewards.box", "pipeline.rewards.box.table"):
    sys.modules[name] = ModuleType(name)
sys.modules["pipeline.rewards.box.table"].BOX = {"digits": digits, "upper": upper}
sys.modules["pipeline.rewards.box.table"].check_settings = lambda *settings: None
"""


@pytest.fixture
def box(tmp_path, monkeypatch):
    """A box of two functions."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    table = ModuleType("pipeline.rewards.box.table")
    table.BOX = {"digits": len, "upper": len}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.rewards.box", ModuleType("pipeline.rewards.box"))
    monkeypatch.setitem(sys.modules, table.__name__, table)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of functions in the folder of the command, by its name."""
    (tmp_path / "own.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own.py"


def test_entries(file, box):
    digest = hashlib.sha256(CODE.encode()).hexdigest()
    args = {"at_most": 3, "more": [None, {"a": True}]}
    entries = ["own.py:length", "digits:0.5", {"name": "upper", "weight": -2, "args": args}]
    length, digits, upper = parse_reward_functions(entries)
    assert length == RewardFunction("length", f"{file}:length", 1.0, {}, digest)
    assert digits == RewardFunction("digits", "digits", 0.5)
    assert upper == RewardFunction("upper", "upper", -2.0, args)
    assert parse_reward_functions([f"{file}:length:1e-3"])[0].weight == 0.001
    assert parse_reward_functions([{"name": "./own.py:length:0"}])[0] == RewardFunction(
        "length", f"{file}:length", 0.0, {}, digest
    )
    assert parse_reward_functions([]) == []


def test_a_path_may_have_colons(tmp_path):
    (tmp_path / "a.py:b").mkdir()
    (tmp_path / "a.py:b" / "c.py").write_text(CODE)
    (function,) = parse_reward_functions([f"{tmp_path}/a.py:b/c.py:length:2"])
    assert (function.target, function.weight) == (f"{tmp_path}/a.py:b/c.py:length", 2.0)


def test_functions_of_the_box_run_like_others(box, file):
    entries = [{"name": "digits", "args": {"at_most": 2}}, "upper", "own.py:length"]
    (values,) = scores(parse_reward_functions(entries), to("A1", "a123"))
    assert values == {"digits": [1.0, 2.0], "upper": [1.0, 0.0], "length": [2.0, 4.0]}


WRONG = [
    ("owm.py:length", "owm.py:length ... owm.py ... No such file ... own.py?"),
    ("own.py", "own.py ... FILE.py:NAME ... rewards.py:length"),
    ("own.py:", "own.py:: ... no function"),
    ("own.py:two words", "own.py:two words ... no function"),
    ("own.py:length:heavy", "own.py:length:heavy ... 'heavy' ... finite number ... 0.5"),
    ("own.py:length:nan", "own.py:length:nan ... 'nan' ... finite number"),
    ("own.py:length:", "own.py:length:: ... '' ... finite number"),
    ("own.py:length:1:2", "own.py:length:1:2 ... '1:2' ... finite number"),
    ("digits:inf", "digits:inf ... 'inf' ... finite number"),
    ("digit", "digit ... digits? ... FILE.py:NAME"),
    ("helpfulness", "helpfulness ... digits, upper ... FILE.py:NAME"),
    ("own:length", "own:length ... digits, upper ... FILE.py:NAME"),
    ("./own", "./own ... no function"),
    ("", ": no such built-in function"),
    (".", ".: no such built-in function"),
    ({"name": "digits", "weight": True}, "digits ... True ... finite number"),
    ({"name": "digits", "weight": None}, "digits ... None ... finite number"),
    ({"name": "digits:1", "weight": 2}, "digits:1 ... weight: 2 ... name ... once"),
    ({"name": "own.py:length:1", "weight": 2}, "own.py:length:1 ... weight: 2 ... name"),
    ({"name": "digits", "wieght": 2}, "digits ... 'wieght' ... weight?"),
    ({"name": "digits", "file": 2}, "digits ... 'file' ... name, weight, args"),
    ({"name": "digits", "args": [1]}, "digits ... args ... [1] ... a mapping"),
    ({"name": "digits", "args": {"a": {1}}}, "digits ... args ... {'a': {1}} ... a mapping"),
    ({"name": "digits", "args": {1: 2}}, "digits ... args ... {1: 2} ... a mapping"),
    ({"name": "digits", "args": {"a": float("nan")}}, "digits ... args ... {'a': nan} ... a mapping"),
]


@pytest.mark.parametrize(("entry", "line"), WRONG, ids=str)
def test_a_wrong_entry_is_refused_in_one_line(file, box, entry, line):
    with pytest.raises(InputError) as caught:
        parse_reward_functions([entry])
    assert str(caught.value) == naming(f"--reward-function {line}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", [3, None, {}, {"weight": 1}, {"name": 3}, ["own.py:length"]], ids=str)
def test_what_is_no_entry_is_refused(entry):
    with pytest.raises(InputError, match=naming("--reward-function ... FILE.py:NAME ... name")):
        parse_reward_functions([entry])


def test_two_of_one_name_are_refused(file, box):
    for entries in (["own.py:length", "own.py:length:2"], ["digits", {"name": "digits"}]):
        with pytest.raises(InputError, match=naming("--reward-function ... one name")):
            parse_reward_functions(entries)


def test_without_functions_a_pool_starts_nothing():
    with RewardPool([], num_workers=2, timeout_s=1) as pool:
        pool.check(["level"])
        assert pool.gather([pool.submit(to("a"))]) == [{}]


def calls_by(pool: Any, *, takes_tokens: bool) -> FunctionCalls:
    """The calls for a rollout of eight prompts with three responses each, whose text is the list of their ids."""
    tokenizer: Any = SimpleNamespace(batch_decode=lambda rows, **_: [f" {ids} " for ids in rows])
    calls = FunctionCalls(pool, max_failures=0.05, takes_tokens=takes_tokens)
    calls.begin([{"messages": "[]"}] * 8, tokenizer, num_samples=3, step=0)
    return calls


def test_functions_get_the_responses_to_a_prompt_by_their_numbers_in_whatever_order_they_end():
    given = []
    pool = SimpleNamespace(functions=[RewardFunction("f", "f")], submit=given.append)
    calls = calls_by(pool, takes_tokens=True)
    for row, sample in ((7, 2), (4, 0), (7, 0), (4, 2), (7, 1), (4, 1)):
        calls.ended(row, sample, EndedResponse([row, sample]))
    assert [one.row.split()[0] for one in given] == ["8", "5"]
    assert [one.ids for one in given] == [[[7, 0], [7, 1], [7, 2]], [[4, 0], [4, 1], [4, 2]]]
    assert [one.texts for one in given] == [[str(ids) for ids in one.ids] for one in given]


@pytest.mark.parametrize("values", [[[0.5], None, 1.0], [None, 1.0, [0.5, 0.0]]])
def test_values_of_tokens_are_refused_in_any_response(values):
    """Of a method that compares responses."""
    pool = SimpleNamespace(
        functions=[RewardFunction("f", "f")], submit=lambda *_: 0, gather=lambda handles, _: [{"f": values}]
    )
    calls = calls_by(pool, takes_tokens=False)
    for sample in range(3):
        calls.ended(7, sample, EndedResponse([sample]))
    with pytest.raises(InputError, match=naming("a value for each token")):
        calls.wait(lambda: False)
