"""Environments: an instance for each episode, in one process, and created again where that process is lost."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming
from support.reward_functions import MARK, marked, nothing_left
from support.tool_files import class_of, episodes, tools_in, turn

from pipeline.data.tool_calls import ToolCall, WrongCall
from pipeline.errors import InputError
from pipeline.rewards.pool import Failure
from pipeline.rewards.tools import NOT_REPEATED, Tools

pytestmark = pytest.mark.slow

# Adds numbers to the row's start; tells where it lives, which is what a test looks at and no answer of a right one.
CODE = '''
import asyncio, gc, json, os, random, signal, sys, time

class Sum:
    scale = 1

    def __init__(self):
        self.total, self.seen = 0, []

    @property
    def secret(self):
        raise RuntimeError("is not to be computed")

    @staticmethod
    def version() -> str:
        """Return the version."""
        return "3"

    def reset(self, start, text=None):
        """Begin."""
        self.total = start
        return text

    def add(self, n: int) -> int:
        """Add a number.

        Args:
            n: The number.
        """
        self.total += n
        return self.total

    async def add_later(self, n: int) -> int:
        """Add a number, later.

        Args:
            n: The number.
        """
        await asyncio.sleep(0)
        return self.add(n)

    def double(self) -> str:
        """Double the sum."""
        self.total *= 2
        if self.total > 1000:
            raise OverflowError(f"{self.total} is too much")
        return f"It is {self.total}."

    def act(self, what: str) -> object:
        """Do what no right tool does.

        Args:
            what: What to do.
        """
        match what:
            case "fail":
                self.total += 3
                raise ValueError("after a change")
            case "fill": self.big = bytearray(2**29 + 2**28)
            case "where": return self._where()
            case "hang": time.sleep(60)
            case "die": os._exit(3)
            case "eat": return len(bytearray(2**33))
            case "random": return random.random()
            case "count": return sum(isinstance(one, Sum) for one in gc.get_objects())

    def _where(self) -> int:
        """Not a tool."""
        return os.getpid()

    def get_reward(self):
        return self.total / 10

class Silent(Sum):
    get_reward = None

def where() -> str:
    """Return the process."""
    return str(os.getpid())
'''
FAST = {"timeout_s": 4.0}  # more than a call takes on a busy machine


def adds(tools: Tools, episode: Any, *numbers: int) -> Any:
    return turn(tools, episode, *(ToolCall("add", {"n": n}) for n in numbers))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with nothing_left(), tools_in(
        tmp_path_factory.mktemp("environment") / "env.py", CODE, "where", "Sum",
        num_workers=2, memory_bytes=2**30, **FAST,
    ) as tools:  # fmt: skip
        yield tools


def test_an_episode_has_an_instance_of_its_own(environment):
    starts = [environment.begin(name, {"start": start}) for name, start in (("a", 1), ("b", 10), ("c", 100))]
    assert [one.result(30) for one in starts] == [None] * 3
    assert adds(environment, "a", 1, 2) == ["2", "4"] and adds(environment, "c", 1) == ["101"]
    assert turn(environment, "b", "double") == ["It is 20."] and turn(environment, "b", "add_later", n=5) == ["25"]
    assert turn(environment, "c", "double", "double", "double", "double") == [
        "It is 202.", "It is 404.", "It is 808.", "Error: OverflowError: 1616 is too much",
    ]  # fmt: skip
    assert [environment.end(name).result(30) for name in "abc"] == [0.4, 2.5, 161.6]


def test_a_tool_is_a_public_method(environment):
    names = [schema["function"]["name"] for schema in environment.schemas]
    assert names == ["where", "act", "add", "add_later", "double", "version"] and environment.has_reward
    add = environment.schemas[2]["function"]
    assert add["description"] == "Add a number." and list(add["parameters"]["properties"]) == ["n"]
    with episodes(environment, "a", start=1):
        hidden = [ToolCall(name, {}) for name in ("reset", "get_reward", "_where", "__init__", "secret", "scale")]
        texts = turn(environment, "a", *hidden)
        assert texts == ["Error: no tool has this name, only where, act, add, add_later, double, version"] * 6
        assert turn(environment, "a", "version") == ["3"]


def test_reset_gets_the_columns_that_it_takes(tmp_path, environment):
    assert environment.begin("a", {"start": 1, "text": "Hello. ü", "other": 2}).result(30) == "Hello. ü"
    code = """
class All:
    def reset(self, **row): return str(sorted(row.items()))
    def get_reward(self): return None
"""
    with tools_in(tmp_path / "all.py", code, "", "All") as tools:
        assert tools.begin(0, {"level": [1], "b": {"c": None}}).result(30) == "[('b', {'c': None}), ('level', [1])]"
        assert tools.end(0).result() is None
    assert environment.end("a").result(30) == 0.1


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("hang", Failure("timed out", "no answer within 4 s")),
        ("die", Failure("worker died", "its process ended (exit code 3)")),
        ("eat", Failure("raised", naming("MemoryError; ... --reward-worker-gib (env.py"))),
    ],
)
def test_a_lost_process_costs_no_other_episode(environment, what, failure, home):
    """Another one of its worker has had an error, a wrong call and a call of a function, and gets the same again."""
    names = ["a", "b", "c", "d"]
    for number, name in enumerate(names):
        environment.begin(name, {"start": 10 + number})
        adds(environment, name, number, 1)
        turn(environment, name, "where", "double", WrongCall("x", "y"), "add", ToolCall("act", {"what": "fail"}))
    lost, other = names[home], names[home + 2]
    got = turn(environment, lost, ToolCall("add", {"n": 1}), ToolCall("act", {"what": what}), ToolCall("add", {"n": 1}))
    assert got == failure
    assert adds(environment, other, 1) == [str(2 * (10 + 2 * (home + 2) + 1) + 3 + 1)]
    expected = {name: (2 * (10 + 2 * n + 1) + 3 + (name == other)) / 10 for n, name in enumerate(names)}
    assert adds(environment, lost, 1) == failure, "and it stays lost"
    assert {name: environment.end(name).result(30) for name in names} == expected | {lost: failure}


def test_an_episode_that_fills_the_memory_does_not_cost_the_next_one_its_room(environment):
    """Each of the two has less than the limit, and together they have more."""
    for name in range(4):
        environment.begin(name, {"start": 1})
    fill, where = ToolCall("act", {"what": "fill"}), ToolCall("act", {"what": "where"})
    assert turn(environment, 0, fill) == ["null"]
    before = turn(environment, 2, where)
    assert turn(environment, 2, fill) == Failure("raised", naming("MemoryError; ... --reward-worker-gib (env.py"))
    assert turn(environment, 0, where) != before and turn(environment, 0, "version") == ["3"]
    environment.close()


def test_a_failed_episode_leaves_nothing_in_its_process(environment):
    """A reward function, or a tool of another worker, may have failed: the process lives."""
    for name in range(4):
        environment.begin(name, {"start": 0}).result(30)
    count = ToolCall("act", {"what": "count"})
    before = turn(environment, 0, count)
    environment._episodes[2].failure = Failure("timed out", "elsewhere")
    assert environment.end(2).result(30) == Failure("timed out", "elsewhere")
    assert before == ["2"] and turn(environment, 0, count) == ["1"]
    environment.close()
    with episodes(environment, "last", start=0):
        assert turn(environment, "last", count) == ["1"]


def test_an_episode_that_is_ended_is_forgotten(environment):
    count = ToolCall("act", {"what": "count"})
    with episodes(environment, 0, start=0):
        for _ in range(5):
            environment.begin("again", {"start": 7})
            environment.begin("beside", {"start": 8})
            assert adds(environment, "again", 1) == ["8"] and adds(environment, "beside", 1) == ["9"]
            assert turn(environment, 0, count) == ["2"]
            assert environment.end("beside").result(30) == 0.9 and environment.end("again").result(30) == 0.8
            with pytest.raises(ValueError, match="not open"):
                environment.end("again")
        assert turn(environment, 0, count) == ["1"]


def test_what_does_not_give_the_same_again_is_lost(environment):
    draw = ToolCall("act", {"what": "random"})
    for name in "abcde":
        environment.begin(name, {"start": 1})
    assert [len(turn(environment, name, draw)) for name in "ce"] == [1, 1]
    assert isinstance(turn(environment, "a", ToolCall("act", {"what": "die"})), Failure)
    lost = Failure("worker died", NOT_REPEATED)
    assert turn(environment, "c", "double") == lost and turn(environment, "c", "double") == lost
    assert environment.end("c").result(30) == lost and environment.end("e").result(30) == lost
    assert adds(environment, "b", 1) == ["2"] and environment.end("b").result(30) == 0.2
    environment.close()


def test_a_process_that_ends_between_two_calls_costs_nothing(environment):
    with episodes(environment, 0, 1, start=5):
        assert adds(environment, 0, 1) == ["6"]
        process = environment._workers._workers[0]._process
        os.kill(process.pid, signal.SIGTERM)
        limit = time.monotonic() + 20
        while process.returncode is None and time.monotonic() < limit:
            time.sleep(0.02)
        assert adds(environment, 0, 1) == ["7"] and adds(environment, 1, 1) == ["6"]


def test_episodes_depend_on_no_others(environment):
    """Whatever is lost and begun between their calls: the results are those of an episode alone."""
    draws = random.Random(3)
    pending: list[tuple[int, Any, Any]] = []
    for number in range(30):
        environment.begin(number, {"start": number})
        plan = [ToolCall("add", {"n": draws.randrange(9)}) for _ in range(draws.randrange(1, 4))]
        bad = number % 7 == 3
        calls = environment.call(number, [*plan, ToolCall("act", {"what": "die"})] if bad else plan)
        more = environment.call(number, [ToolCall("double", {})])
        pending.append((number, None if bad else plan, (calls, more, environment.end(number))))
    for number, plan, (calls, more, end) in pending:
        if plan is None:
            assert all(isinstance(one.result(60), Failure) for one in (calls, more, end))
            continue
        totals = [number + sum(call.arguments["n"] for call in plan[: n + 1]) for n in range(len(plan))]
        assert [one.text for one in calls.result(60)] == [str(total) for total in totals]
        assert [one.text for one in more.result(60)] == [f"It is {2 * totals[-1]}."]
        assert end.result(60) == 2 * totals[-1] / 10


def test_what_ends_without_a_reward_needs_no_process(tmp_path, monkeypatch):
    """Its process is lost; nothing is repeated."""
    monkeypatch.setenv(MARK, mark := f"silent-{os.getpid()}")
    with tools_in(tmp_path / "env.py", CODE, "", "Silent", **FAST) as tools:
        for name in "ab":
            tools.begin(name, {"start": 1})
        assert adds(tools, "b", 1) == ["2"] and not tools.has_reward
        failure = turn(tools, "a", ToolCall("act", {"what": "die"}))
        limit = time.monotonic() + 20
        while marked(mark) and time.monotonic() < limit:
            time.sleep(0.02)
        assert tools.end("b").result(30) is None and tools.end("a").result(30) == failure
        assert marked(mark) == []


def test_an_environment_whose_file_changes_is_not_mixed_with_what_it_was(tmp_path):
    with tools_in(file := tmp_path / "env.py", CODE, "", "Sum", **FAST) as tools:
        for name in "ab":
            tools.begin(name, {"start": 1})
        assert adds(tools, "b", 1) == ["2"]
        file.write_text(CODE.replace("self.total += n", "self.total -= n"))
        assert adds(tools, "b", 1) == ["3"], "the process has loaded it"
        turn(tools, "a", ToolCall("act", {"what": "die"}))
        with pytest.raises(InputError) as caught:
            adds(tools, "b", 1)
    assert str(caught.value).splitlines() == [naming(f"--environment {file}:Sum: the file has changed since the start")]


def test_a_row_is_that_of_its_episode(tmp_path):
    """An environment that changes its row changes no other's, and gets the same when it is created again."""
    code = class_of("Rows").replace("reset(self): return None", "reset(self, row): row.append(1); self.row = row")
    code = code.replace("'''Look.'''", "'''Look.'''\n        self.row.append(2)\n        return self.row")
    dying = "import os\ndef die() -> None:\n    '''Die.'''\n    os._exit(1)\n"
    row: dict[str, Any] = {"row": [0]}
    with tools_in(Path(tmp_path / "env.py"), code + dying, "die", "Rows", **FAST) as tools:
        for name in "ab":
            tools.begin(name, row)
        tools.begin("lost", row)
        row["row"].append("later")
        assert json.loads(turn(tools, "a", "look")[0]) == [0, 1, 2] and isinstance(turn(tools, "lost", "die"), Failure)
        assert json.loads(turn(tools, "a", "look")[0]) == [0, 1, 2, 2]
        assert json.loads(turn(tools, "b", "look")[0]) == [0, 1, 2]
