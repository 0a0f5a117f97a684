"""Tools that a model calls: their schemas, what the model gets, and what costs an episode its place in the batch."""

import json
import logging
import os
import re
import time
from concurrent.futures import CancelledError

import pytest
from support.marks import slow_but
from support.messages import naming
from support.reward_functions import HOSTILE, LIMIT_S, MARK, functions_in, marked, nothing_left, scored, to
from support.tool_files import episodes, tools_in, turn

from pipeline.data.tool_calls import ToolCall, WrongCall
from pipeline.errors import InputError
from pipeline.rewards.functions import function_of_file
from pipeline.rewards.pool import Failure, RewardPool
from pipeline.rewards.tool_calls import MAX_RESULT, MEND
from pipeline.rewards.tools import TOOLS, ToolResult, Tools
from pipeline.rewards.workers import Workers

HEAD = (
    """
import asyncio, ctypes, os, signal, subprocess, sys, time
from pathlib import Path

class Named:
    def __str__(self): return "a name"
"""
    + HOSTILE
)
SEARCH = '''
def search(query: str, limit: int = 3) -> list[str]:
    """Search the library.

    Args:
        query: What is looked for.
        limit: How many are returned.
    """
    return [query] * limit
'''


def tool(name: str, body: str, arguments: str = "") -> str:
    """The source of a tool; each argument is documented, and its name says whether it is a coroutine."""
    names = [one.partition(":")[0] for one in arguments.split(", ") if one]
    lines = ["", "    Args:", *(f"        {one}: A value." for one in names)] if names else []
    docstring = "\n".join(['    """Do it.', *lines, '    """'])
    return f"{'async ' * name.startswith('async_')}def {name}({arguments}):\n{docstring}\n    {body}\n"


# Name -> body of a tool, and exactly what the model gets.
RESULTS = {
    "a_text": ("return 'It is \\n\\tüber.'", "It is \n\tüber."),
    "mapping": ("return {'a': [1, 'ü', None], 2: (True,)}", '{"a": [1, "ü", null], "2": [true]}'),
    "nothing": ("return None", "null"),
    "a_number": ("return 1.50", "1.5"),
    "nan": ("return [float('nan')]", "[NaN]"),
    "in_bytes": ("return b'ab'", "\"b'ab'\""),
    "an_object": ("return [Named()]", '["a name"]'),
    "generating": ("return (n for n in range(3))", re.compile(r'"<generator object .*>"')),
    "half_a_pair": ("return 'a\\ud800b'", "a?b"),
    "endless": ("return 'xy' * 10**7", "xy" * (MAX_RESULT // 2) + "\n[truncated: 20,000 of 20,000,000 characters]"),
    "at_the_limit": (f"return 'x' * {MAX_RESULT}", "x" * MAX_RESULT),
    "async_tool": ("await asyncio.sleep(0); return 'later'", "later"),
    "printing": ("print('x' * 10**6); os.write(1, b'{\"number\": 0}\\n'); return 'printed'", "printed"),
    "closing": ("sys.stdout.close(); os.close(1); os.chdir('/'); return 'closed'", "closed"),
    "forking": ("return 'parent' if os.fork() else 'child'", "parent"),
}
# Name -> body of a tool that raises, and what the model gets after "Error: ".
RAISING = {
    "in_lines": ("raise ValueError('no\\n  way')", "ValueError: no way"),
    "no_message": ("raise ValueError", "ValueError"),
    "silent": ("raise Silent", "Silent: its message cannot be read"),
    "no_file": ("os.stat('/tmp/h/s h/note.txt')", "FileNotFoundError: [Errno 2] No such file or directory: 'note.txt'"),
    "own_path": ("raise OSError(f'{__file__}: {Path.cwd()}/a:b ~/x/y')", "OSError: tools.py: a:b y"),
    "no_paths": ("raise OSError('http://host/a/b a/b/c 3/4 /')", "OSError: http://host/a/b a/b/c 3/4 /"),
    "missing_key": ("{}['ü']", "KeyError: 'ü'"),
    "leaving": ("sys.exit(3)", "SystemExit: 3"),
    "interrupted": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "unwritable": ("return {(1, 2): 3}", "TypeError: keys must be str, int, float, bool or None, not tuple"),
    "circular": ("a = []; a.append(a); return a", "ValueError: Circular reference detected"),
    "quoting": ("raise OSError('sk-canaryCANARYcanaryCANARY01')", "OSError: ***"),
    "async_raising": ("await asyncio.sleep(0); raise LookupError('x')", "LookupError: x"),
    "long_message": (
        "raise ValueError('x' * 10**6)",
        f"ValueError: {'x' * (MAX_RESULT - 19)}\n[truncated: 20,000 of 1,000,019 characters]",
    ),
}  # fmt: skip
# Name -> body of a tool that costs the episode, kind of the failure, and its message.
LOST = {
    "hanging": ("time.sleep(60)", "timed out", "no answer within 4 s"),
    "busy": ("while signal.signal(signal.SIGTERM, signal.SIG_IGN) or 1: pass", "timed out", "no answer within 4 s"),
    "async_hanging": ("await asyncio.sleep(60)", "timed out", "no answer within 4 s"),
    "printing_for_ever": ("while True: print('x' * 1000)", "timed out", "no answer within 4 s"),
    "leaving_softly": ("os._exit(0)", "worker died", "its process ended (exit code 0)"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "worker died", "its process ended (signal 9, Killed)"),
    "segfault": ("ctypes.string_at(0)", "worker died", "its process ended (signal 11, Segmentation fault)"),
    "hungry": (
        "return len(bytearray(2**33))", "raised",
        naming("MemoryError; the memory of its process is --reward-worker-gib (tools.py:"),
    ),
    "forging": ("write_everywhere(b'{\"number\": 0}\\n')", "worker died", "its answer cannot be read"),
}  # fmt: skip


def code_of(table: dict) -> str:
    return HEAD + "\n".join(tool(name, body) for name, (body, *_) in table.items())


def result(tools, name: str, **arguments) -> ToolResult | Failure:
    tools.begin(name, {}).result()
    results = tools.call(name, [ToolCall(name, arguments)]).result(30)
    tools.end(name).result()
    return results if isinstance(results, Failure) else results[0]


# Name -> body, and arguments.
OTHERS = {
    "first": ("raise OSError('sk-canaryCANARYcanaryCANARY01')",),
    "second": ("return [][n]", "n: int"),
    "slow": ("start = time.time(); time.sleep(wait); return [start, time.time()]", "wait: float"),
    "emptying": ("names.append(1); del names[0]; return names", "names: list[int]"),
    "counting": ("COUNT.append(1); return len(COUNT)",),
    "async_looping": ("LOOPS.add(asyncio.get_running_loop()); return len(LOOPS)",),
    "looking": ("return [dict(os.environ), [name in sys.modules for name in ('torch', 'transformers', 'numpy')]]",),
    "loud": ("print('heard'); return ''",),
}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """All tools that answer, in three workers."""
    code = code_of(RESULTS | RAISING) + "".join(tool(name, body, *rest) for name, (body, *rest) in OTHERS.items())
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    names = " ".join(["search", *RESULTS, *RAISING, *OTHERS])
    with pytest.MonkeyPatch.context() as patch, nothing_left():
        patch.setenv("MY_API_KEY", "canary")
        patch.setenv("HARMLESS", "seen")
        with tools_in(file, f"{code}\n{SEARCH}\nCOUNT, LOOPS = [], set()\n", names, num_workers=3) as tools:
            yield tools


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_text(tools, name):
    for _ in range(2):
        got = result(tools, name)
        text = RESULTS[name][1]
        assert isinstance(got, ToolResult) and (got.failed, got.name) == (False, name) and 0 <= got.seconds < 20
        assert text.fullmatch(got.text) if isinstance(text, re.Pattern) else got.text == text


@pytest.mark.parametrize("name", RAISING)
def test_what_a_tool_raises_is_one_line_without_paths(tools, name):
    got = result(tools, name)
    assert isinstance(got, ToolResult) and got.failed and got.text == f"Error: {RAISING[name][1]}"


def test_wrong_arguments_are_told_to_the_model(tools):
    with episodes(tools, 0):
        assert turn(tools, 0, "search", query="a", limit=2) == ['["a", "a"]']
        assert turn(tools, 0, "search") == [
            "Error: TypeError: search() missing 1 required positional argument: 'query'"
        ]
        assert turn(tools, 0, "search", query="a", depth=1) == [
            "Error: TypeError: search() got an unexpected keyword argument 'depth'"
        ]


@pytest.mark.slow
def test_wrong_calls_need_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, mark := f"wrong-{os.getpid()}")
    with tools_in(tmp_path / "tools.py", SEARCH, "search") as tools:
        tools.begin(0, {})
        limit = time.monotonic() + 20
        while marked(mark) and time.monotonic() < limit:  # that of the check is on its way out
            time.sleep(0.02)
        wrong = [WrongCall("", "no JSON"), ToolCall("serach", {}), WrongCall("search", "no 'query'")]
        results = tools.call(0, wrong).result()
        assert marked(mark) == []
    assert results == [
        ToolResult("", "no JSON", failed=True, seconds=0.0),
        ToolResult("serach", "Error: no tool has this name, only search", failed=True, seconds=0.0),
        ToolResult("search", "no 'query'", failed=True, seconds=0.0),
    ]


def test_the_first_error_of_each_tool_is_logged(tools, caplog):
    with episodes(tools, 0):
        turn(tools, 0, "second", "second", n=1)
        turn(tools, 0, "first", "first")
    second, first = caplog.messages
    assert second == naming("--tools ... tools.py:second ... IndexError: list index out of range (tools.py")
    assert first == naming("--tools ... tools.py:first ... OSError: *** (tools.py")


@pytest.fixture(scope="module")
def losing(tmp_path_factory):
    file = tmp_path_factory.mktemp("losing") / "tools.py"
    code = code_of(LOST) + tool("good", "return 'good'") + tool("writing", "open(__file__ + '.calls', 'a').write('x')")
    with nothing_left(), tools_in(
        file, code, " ".join(["good", "writing", *LOST]), num_workers=2, timeout_s=4.0, memory_bytes=2**30
    ) as tools:  # fmt: skip
        tools.file = file
        yield tools


@pytest.mark.parametrize("name", slow_but(["killed", "forging"], LOST))
def test_a_lost_call_is_the_failure_of_its_episode_alone(losing, name):
    """It is the second call of its turn: the third is not made, and those of the turns after it are not."""
    expected = Failure(*LOST[name][1:])
    losing.begin("lost", {})
    with episodes(losing, "other"):
        lost = losing.call("lost", [ToolCall(one, {}) for one in ("good", name, "writing")])
        others = [losing.call("other", [ToolCall("good", {})]) for _ in range(3)]
        assert [[one.text for one in other.result(30)] for other in others] == [["good"]] * 3
        ended = lost.result(30), turn(losing, "lost", "writing"), losing.end("lost").result()
        assert ended == (expected,) * 3 and not losing.file.with_name("tools.py.calls").exists()
        assert turn(losing, "other", "good") == ["good"]


def test_calls_of_a_turn_are_made_one_after_another(tools):
    with episodes(tools, 0):
        first = tools.call(0, [ToolCall("slow", {"wait": wait}) for wait in (0.3, 0.0)])
        second = tools.call(0, [ToolCall("slow", {"wait": 0.0})])
        results = [one for turn in (first, second) for one in turn.result(30)]
    times = [json.loads(one.text) for one in results]
    assert results[0].seconds >= 0.3 > results[1].seconds and times == sorted(times)
    assert all(end <= start for (_, end), (start, _) in zip(times, times[1:], strict=False))


def test_a_tool_that_changes_its_arguments_changes_no_other(tools):
    with episodes(tools, 0):
        call = ToolCall("emptying", {"names": [7, 8]})
        assert turn(tools, 0, call, call) == ["[8, 1]", "[8, 1]"] and call.arguments == {"names": [7, 8]}


def test_what_tools_leave_in_the_module_is_the_users_to_answer_for(tools):
    with episodes(tools, "a", "b"):
        assert turn(tools, "a", "counting") == ["1"] and turn(tools, "b", "counting") == ["2"], "one process"
    assert "must not depend on what earlier calls have left in the module" in " ".join((Tools.__doc__ or "").split())


def test_async_tools_share_a_loop(tools):
    """As clients that hold a connection need it."""
    with episodes(tools, 0):
        assert turn(tools, 0, "async_looping", "async_looping") == ["1", "1"]


def test_tools_see_no_secrets_and_start_with_little(tools):
    with episodes(tools, 0):
        variables, modules = json.loads(turn(tools, 0, "looking")[0])
    assert variables["HARMLESS"] == "seen" and "canary" not in str(variables) and modules == [False] * 3


def test_what_tools_print_is_logged(tools, caplog):
    caplog.set_level(logging.INFO, logger="pipeline.rewards.worker_process")
    with episodes(tools, 0):
        assert turn(tools, 0, "loud") == [""]
        limit = time.monotonic() + 20
        while "heard" not in caplog.text and time.monotonic() < limit:
            time.sleep(0.02)
    assert re.search(r"reward worker \d: heard", caplog.text)


def test_schemas_are_those_of_transformers(tmp_path):
    from transformers.utils import get_json_schema

    scope: dict = {}
    exec(SEARCH, scope)
    code = SEARCH + tool("async_later", "return ''", "when: str | None") + "find = search\n"
    with tools_in(tmp_path / "tools.py", code, "search async_later find") as tools, episodes(tools, 0):
        search, later, find = tools.schemas
        assert turn(tools, 0, "find", query="a") == ['["a", "a", "a"]']
    assert search == get_json_schema(scope["search"]) and search["function"]["parameters"]["required"] == ["query"]
    assert later["function"]["name"] == "async_later" and find["function"] == {**search["function"], "name": "find"}


UNDOCUMENTED = "def {}(n: int):\n    return n\n"
# Name -> source, and the reason for which it is refused.
REFUSED = {
    "no_docstring": (UNDOCUMENTED.format("no_docstring"), f"... has no docstring; {MEND}"),
    "no_hint": (tool("no_hint", "return n", "n"), f"Argument n is missing a type hint in function no_hint; {MEND}"),
    "no_line": (tool("no_line", "return n", "n: int").replace("n: A value.", "m: A value."), f"'n'; {MEND}"),
    "own_class": (HEAD + tool("own_class", "return n", "n: Named"), f"<class 'Named'> to a JSON schema; {MEND}"),
    "a_lambda": ("a_lambda = lambda n: n\n", f"<lambda> because it has no docstring; {MEND}"),
    "starred": (tool("starred", "return n", "*n: int"), "its parameter *n: int has no schema; name each argument"),
    "kwargs": (tool("kwargs", "return n", "**n: int"), "its parameter **n: int has no schema; name each argument"),
    "nameless": (tool("nameless", "return n", "n: int, /"), "its parameter 'n' cannot be given by name; take"),
    "not_there": (tool("there", "return 1"), "the file has no function 'not_there', only there"),
    "no_function": ("no_function = 3\n", "the file has no function 'no_function', only none at all"),
    "no_import": ("import nowhere\n", "cannot be loaded: ModuleNotFoundError ... (no_import.py:1)"),
    "dies": ("import os\nos._exit(4)\n", "cannot be loaded: its process ended (exit code 4)"),
    "a_key": ("raise OSError('sk-canaryCANARYcanaryCANARY01')\n", "cannot be loaded: OSError: ***"),
}  # fmt: skip


@pytest.mark.slow
def test_what_is_no_tool_is_refused_at_the_check_with_what_mends_it(tmp_path):
    functions = []
    for name, (code, _) in REFUSED.items():
        (tmp_path / f"{name}.py").write_text(code)
        functions.append(function_of_file(f"{tmp_path}/{name}.py:{name}", TOOLS))
    (tmp_path / "same.py").write_text(SEARCH)
    (tmp_path / "twice.py").write_text(SEARCH)
    functions += [function_of_file(f"{tmp_path}/{file}.py:search", TOOLS) for file in ("same", "twice")]
    with nothing_left(), Workers(num_workers=2, timeout_s=LIMIT_S) as workers:
        tools = Tools(functions, None, workers)
        with pytest.raises(InputError) as caught:
            tools.check()
    *lines, twice = str(caught.value).splitlines()
    for line, (name, (_, reason)) in zip(lines, REFUSED.items(), strict=True):
        assert line == naming(f"--tools {tmp_path}/{name}.py:{name}: ... {reason.removeprefix('... ')}"), line
    assert twice == naming("--tools ... same.py:search and --tools ... twice.py:search ... 'search' ... rename one")
    assert tools.schemas == []


@pytest.mark.slow
def test_a_file_that_changes_during_a_run_ends_it(tmp_path):
    code = f"import os\n{tool('f', 'return 1')}{tool('die', 'os._exit(1)')}"
    with tools_in(file := tmp_path / "tools.py", code, "f die") as tools, episodes(tools, "a", "b"):
        assert turn(tools, "a", "f") == ["1"]
        file.write_text(code.replace("return 1", "return 2"))
        assert turn(tools, "a", "f") == ["1"], "the worker has loaded it"
        assert turn(tools, "b", "die") == Failure("worker died", "its process ended (exit code 1)")
        with pytest.raises(InputError) as caught:
            turn(tools, "a", "f")
    assert str(caught.value).splitlines() == [
        naming(f"--tools {file}:f: the file has changed since the start; a run uses one version, restore it")
    ]


@pytest.mark.slow
def test_episodes_that_are_not_open_are_errors_of_the_caller(tmp_path):
    with tools_in(tmp_path / "tools.py", SEARCH, "search") as tools:
        with pytest.raises(ValueError, match="'a' is not open"):
            tools.call("a", [])
        assert tools.begin("a", {"level": 3}).result() is None
        with pytest.raises(ValueError, match="'a' is open"):
            tools.begin("a", {})
        assert turn(tools, "a") == [] and tools.end("a").result() is None
        with pytest.raises(ValueError, match="'a' is not open"):
            tools.end("a")


@pytest.mark.slow
def test_tools_and_reward_functions_share_the_workers(tmp_path):
    functions = functions_in(tmp_path / "f.py", "import os\ndef f(completions): return [os.getpid()]\n", "f")
    code = f"import os\n{tool('pid', 'return os.getpid()')}"
    with nothing_left(), tools_in(tmp_path / "tools.py", code, "pid") as tools:
        pool = RewardPool(functions, workers=tools._workers)
        pool.check(())
        tools.begin(0, {})
        (of_tool,) = turn(tools, 0, "pid")
        assert scored(pool, to("a")) == [{"f": [float(of_tool)]}]
        pool.close()
        assert turn(tools, 0, "pid") == [of_tool], "the pool does not end workers that it has not created"


@pytest.mark.slow
def test_a_call_that_is_cancelled_gives_its_worker_back(tmp_path):
    code = f"import time\n{tool('slow', 'time.sleep(0.2); return 1')}"
    with nothing_left(), tools_in(tmp_path / "tools.py", code, "slow") as tools, episodes(tools, *range(4)):
        pending = [tools.call(episode, [ToolCall("slow", {})]) for episode in range(4)]
        time.sleep(0.05)
        for one in pending[:3]:
            one.cancel()
        with pytest.raises(CancelledError):
            pending[1].result()
        assert [one.text for one in pending[3].result(30)] == ["1"]
        assert turn(tools, 1, "slow") == ["1"]


@pytest.mark.slow
def test_workers_end_while_calls_are_pending(tmp_path):
    code = f"import time\n{tool('slow', 'time.sleep(60)')}"
    with nothing_left(), tools_in(tmp_path / "tools.py", code, "slow") as tools:
        for episode in range(4):
            tools.begin(episode, {})
        pending = [tools.call(episode, [ToolCall("slow", {})]) for episode in range(4)]
        time.sleep(0.3)
        tools.close()
        start = time.monotonic()
    assert time.monotonic() - start < 5.0
    assert all(one.cancelled() for one in pending)
