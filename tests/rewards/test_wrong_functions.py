"""Reward functions that are wrong in many ways: each is told of in one line, and costs no other function a value."""

import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
from support.messages import naming
from support.reward_functions import HOSTILE, LIMIT_S, functions_in, nothing_left, scored, to

from pipeline.errors import InputError
from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.pool import Failure, RewardPool

TEXTS = ("ab", "good")
GOOD = [2.0, 4.0]
PATIENT_S = 30.0

HEAD = (
    """
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

HOME = os.getcwd()

def right(completions):
    assert os.getcwd() == HOME and sys.stdin.read() == ""
    print("still heard")
    return [len(text) for text in completions]
"""
    + HOSTILE
)
# Name -> body of a function of `completions`, and what is found in the error.
REFUSED = {
    "too_few": ("return [1.0]", "1 values for 2 responses"),
    "too_many": ("return [1.0] * 3", "3 values for 2 responses"),
    "texts": ("return ['1.0', 'good']", "response 0: returned '1.0' (str)"),
    "one_text": ("return [1.0, 'good']", "response 1: returned 'good' (str)"),
    "long_text": ("return ['x' * 10**6] * 2", "response 0 ... type str"),
    "a_key": ("return ['sk-canaryCANARYcanaryCANARY01', 1]", "response 0: returned '***' (str)"),
    "nan": ("return [1.0, float('nan')]", "response 1: returned nan (float)"),
    "infinite": ("return [float('-inf'), 1.0]", "response 0: returned -inf (float)"),
    "huge": ("return [1, 10 ** 40]", "response 1 ... type int"),
    "endless_digits": ("return [10 ** 6000, 1]", "response 0 ... type int"),
    "beyond_fp32": ("return [1.0, 1e39]", "response 1: returned 1e+39 (float)"),
    "imaginary": ("return [1.0, 2j]", "response 1 ... type complex"),
    "dict_values": ("return [{}, {}]", "response 0 ... type dict"),
    "generator": ("return (len(text) for text in completions)", "type generator ... a list"),
    "mapping": ("return {text: 1.0 for text in completions}", "type dict ... a list"),
    "nothing": ("return None", "type NoneType ... a list"),
    "a_number": ("return 1.0", "1.0 (float) ... a list"),
    "a_text": ("return '12'", "'12' (str) ... a list"),
    "async_generator": ("yield 1.0", "type async_generator ... a list"),
    "other_length": ("return [[1.0, 2.0], [1.0, 2.0]]", "response 1 ... list of 2 values for 4"),
    "nan_token": ("return [[1.0, float('nan')], 1.0]", "response 0 ... list with nan (float)"),
    "nested": ("return [[[1.0], [2.0]], 1.0]", "response 0 ... type list ... type list"),
    "none_token": ("return [[1.0, None], 1.0]", "response 0 ... type list ... type NoneType"),
}
# Name -> body, kind of the failure, and what its message holds.
FAILING = {
    "raising": ("raise ValueError('no\\nway')", "raised", r"^ValueError: no way \(wrong.py:\d+\)$"),
    "silent": ("raise Silent", "raised", r"Silent: <exception str\(\) failed> \(wrong.py:\d+\)$"),
    "quoting": ("raise ValueError('sk-canaryCANARYcanaryCANARY01')", "raised", r"^ValueError: \*\*\* "),
    "leaving": ("sys.exit(3)", "raised", r"^SystemExit: 3"),
    "interrupted": ("raise KeyboardInterrupt", "raised", "^KeyboardInterrupt"),
    "recursive": ("return recursive(completions)", "raised", "^RecursionError: maximum recursion"),
    "asking": ("return [input()]", "raised", "^EOFError"),
    "printing_to_closed": ("sys.stdout.close(); print('a')", "raised", "^ValueError: I/O operation on closed file"),
    "killing_softly": ("os._exit(0)", "worker died", r"^its process ended \(exit code 0\)$"),
    "killing_after_print": ("print('{}', flush=True); os._exit(7)", "worker died", r"\(exit code 7\)$"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "worker died", r"\(signal 9, Killed\)$"),
    "segfault": ("ctypes.string_at(0)", "worker died", r"\(signal 11, Segmentation fault\)$"),
    "deaf": ("os.closerange(3, 64); return [1.0, 1.0]", "worker died", r"^its process ended"),
    "lying": (
        'write_everywhere(b\'{"number": 0, "values": [9, 9]}\\n\')',
        "worker died",
        "^its answer cannot be read$",
    ),
    "orphaning": ("os.fork() or time.sleep(60); os._exit(1)", "worker died", r"\(exit code 1\)$"),
    "hanging": ("time.sleep(60)", "timed out", "^no answer within 0.5 s$"),
    "busy": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    while True: pass", "timed out", "^no answer"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "timed out", "^no answer"),
    "waiting": ("subprocess.run(['sleep', '60'])", "timed out", "^no answer"),
    "async_hanging": ("await asyncio.sleep(60)", "timed out", "^no answer"),
    "async_raising": ("await asyncio.sleep(0); raise OSError(5, 'x')", "raised", r"^OSError: \[Errno 5\] x \(wrong"),
}
# Name -> body of a function whose values are right.
ODD = {
    "chatty": "print('x' * 5_000_000); print('y\\n' * 500_000); sys.stderr.write('z' * 10**6); return [2.0, 4.0]",
    "chatty_in_c": "libc = ctypes.CDLL(None); libc.printf(b'from C\\n'); os.write(1, b'raw\\n'); return [2, 4]",
    "forging": "os.write(1, b'{\"number\": 0, \"values\": [9, 9]}\\n'); print('{}', flush=True); return [2, 4]",
    "closing": "sys.stdout.close(); os.close(1); os.close(2); os.close(0); return [2, 4]",
    "moving": "os.chdir('/'); return [2, 4]",
    "leaving_threads": "threading.Thread(target=time.sleep, args=(60,)).start(); return [2, 4]",
    "leaving_processes": "subprocess.Popen(['sleep', '60']); return [2, 4]",
    "emptying": "values = [*map(len, completions)]; completions.clear(); return values",
    "true": "return [True + 1, True + 3.0]",
    "a_tuple": "return (2, 4)",
}
BODIES = {**{name: body for name, (body, *_) in {**REFUSED, **FAILING}.items()}, **ODD}
CODE = HEAD + "\n".join(
    f"{'async ' if name.startswith('async') else ''}def {name}(completions):\n    {body}\n"
    for name, body in BODIES.items()
)


@contextmanager
def pool_of_all(folder: Path, timeout_s: float) -> Iterator[tuple[RewardPool, dict[str, RewardFunction]]]:
    """A pool of one worker that knows all functions, by name."""
    functions = functions_in(folder / "wrong.py", CODE, " ".join(["right", *BODIES]))
    with RewardPool(functions, num_workers=1, timeout_s=timeout_s) as pool:
        pool.check(())
        yield pool, {function.name: function for function in functions}


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """A pool that waits as long as a busy machine may take, and one for functions that never answer.

    Processes that outlive them are an error.
    """
    folder = tmp_path_factory.mktemp("wrong")
    with nothing_left(), pool_of_all(folder, PATIENT_S) as patient, pool_of_all(folder, LIMIT_S) as impatient:
        yield patient, impatient


@pytest.fixture(scope="module")
def all_functions(pools):
    return pools[0]


def choose(all_functions, *names: str) -> RewardPool:
    pool, by_name = all_functions
    pool.functions = [by_name[name] for name in names]
    return pool


def still_right(all_functions) -> bool:
    return scored(choose(all_functions, "right"), to(*TEXTS)) == [{"right": GOOD}]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_value_ends_the_run(all_functions, name):
    pool = choose(all_functions, "right", name)
    with pytest.raises(InputError) as caught:
        scored(pool, to(*TEXTS))
    line = str(caught.value)
    assert re.match(rf"--reward-function /\S+/wrong.py:{name}: {name}, prompt data.jsonl:7: ", line)
    assert line == naming(REFUSED[name][1]) and ", expected " in line and "\n" not in line and len(line) < 400
    assert still_right(all_functions)


@pytest.mark.few(11)
@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_of_a_kind_and_costs_no_other_function_a_value(pools, name):
    _, kind, message = FAILING[name]
    texts, lengths = (TEXTS[:1], GOOD[:1]) if kind == "timed out" else (TEXTS, GOOD)  # each waits for its limit
    (values,) = scored(choose(pools[kind == "timed out"], name, "right"), to(*texts))
    for failure in values[name]:
        assert isinstance(failure, Failure) and failure.kind == kind
        assert re.search(message, failure.message) and "\n" not in failure.message
    assert len(values[name]) == len(texts) and values["right"] == lengths


@pytest.mark.parametrize("name", ODD)
def test_oddities_are_none_of_the_pools_business(all_functions, name):
    assert scored(choose(all_functions, name, "right"), to(*TEXTS)) == [{name: GOOD, "right": GOOD}]
    assert scored(choose(all_functions, name), to(*TEXTS)) == [{name: GOOD}], "again"
    assert still_right(all_functions)


def test_only_the_responses_that_fail_alone_are_failures(tmp_path):
    code = """
def picky(completions):
    if "bad" in completions:
        raise ValueError(f"{len(completions)} at once")
    return [len(text) for text in completions]
"""
    functions = functions_in(tmp_path / "one.py", code, "picky")
    with RewardPool(functions, num_workers=2, timeout_s=LIMIT_S) as pool:
        pool.check(())
        first, second = scored(pool, to("a", "bad", "abc"), to("abcd"))
    failure = Failure("raised", "ValueError: 1 at once (one.py:4)")
    assert first == {"picky": [1.0, failure, 3.0]} and second == {"picky": [4.0]}


def test_what_functions_print_is_logged_and_not_without_end(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # C's buffer is meant
    caplog.set_level(logging.INFO, logger="pipeline.rewards.worker_process")
    code = HEAD + "\n".join(f"def {name}(completions):\n    {ODD[name]}\n" for name in ("chatty", "chatty_in_c"))
    code += "def loud(completions):\n    print('a', file=sys.stderr); print('sk-canaryCANARYcanaryCANARY01')\n"
    code += "    return [1, 1]\n"
    with RewardPool(functions_in(tmp_path / "loud.py", code, "loud chatty_in_c"), num_workers=1, timeout_s=5) as pool:
        pool.check(())
        scored(pool, to(*TEXTS))
    heard = caplog.text
    assert all(f"reward worker 0: {line}" in heard for line in ("a\n", "***\n", "raw\n", "from C\n")), heard
    caplog.clear()
    with RewardPool(functions_in(tmp_path / "loud.py", code, "chatty"), num_workers=1, timeout_s=5) as pool:
        pool.check(())
        scored(pool, to(*TEXTS))
    assert 200 < len(caplog.messages) <= 202 and max(map(len, caplog.messages)) < 600
    assert "prints more than 200 lines" in caplog.messages[-1]


LOADING = "cannot be loaded: "
NEEDED = "it needs the column 'solutoin', and the data has only solution, level; did you mean solution?"
UNUSABLE = {
    "missing": ("import not_there\n", f"{LOADING}ModuleNotFoundError: No module named 'not_there' (missing.py:1)"),
    "syntax": ("\ndef f(:\n    pass\n", f"{LOADING}SyntaxError: invalid syntax (syntax.py:2)"),
    "other_name": ("def g(completions): ...\n", "the file has no function 'f', only g"),
    "no_function": ("f = 3\n", "the file has no function 'f', only none at all"),
    "leaves": ("import sys\nsys.exit()\n", f"{LOADING}SystemExit (leaves.py:2)"),
    "dies": ("import os\nos._exit(4)\n", f"{LOADING}its process ended (exit code 4)"),
    "hangs": ("import time\ntime.sleep(60)\n", f"{LOADING}no answer within 5 s"),
    "raises": ("raise OSError(5, 'a\\nb')\n", f"{LOADING}OSError: [Errno 5] a b (raises.py:1)"),
    "nameless": ("def f(completions, /): ...\n", "its parameter 'completions' cannot be given by name; take the / out"),
    "in_rank": (
        "async def f(completions): ...\nf.runs_in = 'rank'\n",
        "runs_in: only the built-in judge has it; leave it out, --reward-env NAME gives it a key",
    ),
    "needs": ("def f(completions, solutoin): ...\n", NEEDED),
}


@pytest.mark.slow
def test_what_cannot_be_used_is_found_before_the_start(tmp_path, monkeypatch):
    functions = []
    for name, (code, _) in UNUSABLE.items():
        (function,) = functions_in(tmp_path / f"{name}.py", code, "f")
        functions.append(function)
    monkeypatch.setattr("pipeline.rewards.workers.LOAD_LIMIT_S", 5.0)
    with (
        nothing_left(),
        RewardPool(functions, num_workers=2, timeout_s=LIMIT_S) as pool,
        pytest.raises(InputError) as caught,
    ):
        pool.check(["solution", "level"])
    lines = str(caught.value).splitlines()
    for line, (name, (_, reason)) in zip(lines, UNUSABLE.items(), strict=True):
        assert line.startswith(f"--reward-function {tmp_path}/{name}.py:f: {reason}"), line


def test_a_pool_ends_at_once_and_quietly(all_functions, caplog):
    """One function hangs, one has just been given up, and most calls wait for a worker."""
    _, by_name = all_functions
    functions = [by_name["hanging"], by_name["right"]]
    with nothing_left():
        pool = RewardPool(functions, num_workers=2, timeout_s=LIMIT_S)
        pool.check(())
        handles = [pool.submit(to(*TEXTS)) for _ in range(8)]
        time.sleep(LIMIT_S + 0.1)
        start = time.monotonic()
        pool.close()
        assert time.monotonic() - start < 2.0
    assert all(handle.cancelled() for handle in handles[2:])
    assert caplog.messages == []


@pytest.mark.parametrize("wait_s", [0.0, 0.0001, 0.0003])
def test_a_pool_ends_while_its_worker_is_being_started(tmp_path, wait_s):
    """Between the process and its pipes there are some turns of the loop."""
    functions = functions_in(tmp_path / "f.py", "def f(completions):\n    return [1.0 for _ in completions]\n", "f")
    with nothing_left():
        pool = RewardPool(functions, num_workers=1, timeout_s=LIMIT_S)

        def check() -> None:
            with suppress(CancelledError, InputError):
                pool.check(())

        checking, closing = (Thread(target=work, daemon=True) for work in (check, pool.close))
        checking.start()
        time.sleep(wait_s)
        closing.start()
        closing.join(5.0)
        assert not closing.is_alive(), "it hangs"
        checking.join(5.0)


def test_a_file_that_changes_during_a_run_is_not_mixed_with_what_it_was(tmp_path):
    code = "import os\ndef f(completions, die):\n    die[0] and os._exit(1)\n    return [1.0 for _ in completions]\n"
    functions = functions_in(tmp_path / "f.py", code, "f")
    with RewardPool(functions, num_workers=1, timeout_s=LIMIT_S) as pool:
        pool.check(["die"])
        assert scored(pool, to("a", columns={"die": False})) == [{"f": [1.0]}]
        (tmp_path / "f.py").write_text(code.replace("1.0", "2.0"))
        assert scored(pool, to("a", columns={"die": False})) == [{"f": [1.0]}], "the worker has loaded it"
        with pytest.raises(InputError, match=naming("f.py:f ... prompt data.jsonl:7 ... the file has changed")):
            scored(pool, to("a", columns={"die": True}))
