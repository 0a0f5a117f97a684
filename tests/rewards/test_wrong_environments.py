"""Environments that are wrong in many ways: each is refused, ends the run in one line, or loses its episode alone."""

import re
from typing import Any

import pytest
from support.messages import naming
from support.reward_functions import nothing_left
from support.tool_files import class_of, tools_in

from pipeline.errors import InputError
from pipeline.rewards.functions import function_of_file
from pipeline.rewards.pool import Failure
from pipeline.rewards.tool_calls import MEND
from pipeline.rewards.tools import ENVIRONMENT, TOOLS, Tools
from pipeline.rewards.workers import Workers

pytestmark = pytest.mark.slow

WRONG = "--environment ... env.py:"
# Class -> its source, what `begin` gives, what `end` gives; an error is the line that ends the run.
UNSOUND: dict[str, tuple[str, Any, Any]] = {
    "ResetRaises": (
        class_of("ResetRaises", "raise OSError('no\\nway')"),
        failed := Failure("raised", naming("OSError: no way (env.py:")), failed,
    ),
    "ResetHangs": (
        class_of("ResetHangs", "time.sleep(60)"), failed := Failure("timed out", "no answer within 4 s"), failed,
    ),
    "ResetGivesNumber": (
        class_of("ResetGivesNumber", "return 3"),
        InputError(f"{WRONG}ResetGivesNumber: reset returned 3 (int), expected a text or None"), None,
    ),
    "AsyncReset": (class_of("AsyncReset").replace("def reset", "async def reset"), None, None),
    "LongReset": (class_of("LongReset", "return 'x' * 10**6"), re.compile(r"x{20000}\n\[truncated: .*\]"), None),
    "RewardRaises": (
        class_of("RewardRaises", more="    def get_reward(self): raise KeyError(1)"),
        None, Failure("raised", naming("KeyError: 1 (env.py:")),
    ),
    "RewardHangs": (
        class_of("RewardHangs", more="    def get_reward(self): time.sleep(60)"),
        None, Failure("timed out", "no answer within 4 s"),
    ),
    "RewardIsText": (
        class_of("RewardIsText", more="    def get_reward(self): return '1.0'"),
        None, InputError(f"{WRONG}RewardIsText: get_reward returned '1.0' (str), expected a finite number or None"),
    ),
    "RewardIsNaN": (
        class_of("RewardIsNaN", more="    def get_reward(self): return float('nan')"),
        None, InputError(f"{WRONG}RewardIsNaN: get_reward returned nan (float), expected a finite number or None"),
    ),
    "RewardIsTrue": (class_of("RewardIsTrue", more="    async def get_reward(self): return True"), None, 1.0),
    "RewardOfNumpy": (
        class_of("RewardOfNumpy", more="    def get_reward(self):\n        import numpy; return numpy.float32(0.5)"),
        None, 0.5,
    ),
    "RewardIsNone": (class_of("RewardIsNone", more="    def get_reward(self): return None"), None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSOUND)
def test_what_an_environment_does_wrong_is_a_failure_or_ends_the_run(tmp_path, name):
    code, begun, ended = UNSOUND[name]
    with nothing_left(), tools_in(tmp_path / "env.py", f"import time\n{code}", "", name, timeout_s=4.0) as tools:
        for future, expected in ((tools.begin(0, {}), begun), (tools.end(0), ended)):
            if isinstance(expected, InputError):
                with pytest.raises(InputError) as caught:
                    future.result(30)
                assert str(caught.value).splitlines() == [naming(str(expected))]
                return
            got = future.result(30)
            assert expected.fullmatch(got) if isinstance(expected, re.Pattern) else got == expected
            assert type(got) is float or not isinstance(expected, float)


# Class -> its source, and the reasons for which it is refused.
REFUSED = {
    "Needy": (
        class_of("Needy", before="    def __init__(self, size, depth=1): ...\n"),
        ["without arguments and needs 'size'; give it a default"],
    ),
    "Creating": (
        class_of("Creating", before="    def __init__(self): raise OSError(5)\n"),
        ["cannot be loaded: OSError: 5 (Creating.py:2)"],
    ),
    "NoReset": (class_of("NoReset").replace("reset", "start"), ["no method reset ... returns a text or None"]),
    "Bare": ("class Bare:\n    def reset(self): ...\n", ["no public method besides reset ... no get_reward"]),
    "Bad": (
        class_of("Bad", more="    def go(self, n: int): ..."),
        [f"go: Cannot ... has no docstring; {MEND}"],
    ),
    "Untyped": (
        class_of("Untyped", more="    def up(self, n):\n        '''Go up.'''"),
        [f"up: Argument n is missing a type hint in function up; {MEND}"],
    ),
    "Nameless": (class_of("Nameless").replace("(self)", "(self, row, /)", 1), ["its parameter 'row' cannot be given"]),
    "Maze": ("class Maize: ...\n", ["the file has no class 'Maze', only Maize"]),
    "Number": ("Number = 3\n", ["the file has no class 'Number', only none at all"]),
    "Hungry": (
        class_of("Hungry", before="    big = bytearray(2**33)\n"),
        ["cannot be loaded: MemoryError; ... --reward-worker-gib"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_environment_is_refused_at_the_check(tmp_path, name):
    code, reasons = REFUSED[name]
    (tmp_path / f"{name}.py").write_text(code)
    environment = function_of_file(f"{tmp_path}/{name}.py:{name}", ENVIRONMENT)
    workers = Workers(num_workers=1, timeout_s=5, memory_bytes=2**30)
    with nothing_left(), workers, pytest.raises(InputError) as caught:
        Tools([], environment, workers).check()
    lines = str(caught.value).splitlines()
    assert lines == [naming(f"--environment {tmp_path}/{name}.py:{name}: ... {reason}") for reason in reasons]


def test_a_function_and_a_method_of_one_name_are_refused(tmp_path):
    (tmp_path / "tools.py").write_text(f"def look() -> str:\n    '''Look.'''\n    return ''\n{class_of('Room')}")
    functions = [function_of_file(f"{tmp_path}/tools.py:look", TOOLS)]
    environment = function_of_file(f"{tmp_path}/tools.py:Room", ENVIRONMENT)
    with Workers(num_workers=1, timeout_s=5) as workers, pytest.raises(InputError) as caught:
        Tools(functions, environment, workers).check()
    assert str(caught.value).splitlines() == [
        naming("--tools ... look and --environment ... Room ... 'look' ... rename one")
    ]
