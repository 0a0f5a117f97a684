"""What reward functions are given, where they run, what they can see, and when their workers end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming
from support.reward_functions import MARK, functions_in, marked, nothing_left, scored, scores, to

from pipeline import heartbeat
from pipeline.data.turns import Message
from pipeline.errors import EnvironmentFault, InputError
from pipeline.processes import python_environment
from pipeline.rewards.box.table import BOX
from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.pool import Failure, RewardPool
from pipeline.rewards.worker_flags import WorkerFlags, reward_pool

# Writes what it was called with, a line of JSON for each call.
TELLING = """
import json
def tell(what):
    with open(__file__ + ".jsonl", "a") as file:
        file.write(json.dumps(what) + chr(10))
    return [0]
def called(**given):
    trainer = {name: type(given.pop(name)).__name__ for name in ("trainer_state", "log_extra", "log_metric")}
    return tell(given | trainer)
def named(completions, level, missing="default", *, own):
    return tell([completions, level, missing, own])
def short(completions, lacking="default"):
    return tell([completions, lacking])
def logging(completions, trainer_state, log_metric, log_extra):
    log_metric("a", 1.0)
    log_extra("b", [1] * len(completions))
    return [trainer_state.global_step] * len(completions)
"""


def told(file: Path) -> list[Any]:
    """What the functions of TELLING in a file were called with."""
    return [json.loads(line) for line in file.with_name(f"{file.name}.jsonl").read_text().splitlines()]


def test_a_function_with_kwargs_is_given_all(tmp_path):
    functions = functions_in(tmp_path / "f.py", TELLING, "called")
    turns = [Message("tools", "[{}]"), Message("system", "Be brief."), Message("user", "How?")]
    text = to("ab", columns={"level": 3, "prompts": "of the row"})
    spoken = to("ab", messages=turns, is_conversation=True, columns={"level": [1]})
    for responses in (text, spoken):
        scores(functions, responses, columns=["level", "answer", "prompts", "completion_ids"])
    first, second = told(tmp_path / "f.py")
    rest = {"trainer_state": "SimpleNamespace", "log_extra": "function", "log_metric": "function", "answer": [None]}
    assert first == {"prompts": ["How?"], "completions": ["ab"], "completion_ids": [[97, 98]], "level": [3]} | rest
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]
    assert second == {
        "prompts": [conversation], "completions": [[{"role": "assistant", "content": "ab"}]],
        "completion_ids": [[97, 98]], "level": [[1]],
    } | rest  # fmt: skip


def test_a_function_without_kwargs_is_given_what_it_names(tmp_path):
    named, short = functions_in(tmp_path / "f.py", TELLING, "named short")
    named = RewardFunction(named.name, named.target, args={"own": {"a": [1]}}, digest=named.digest)
    for function in (named, short):
        scores([function], to("ab", columns={"level": "x", "other": 1}), columns=["level", "other", "lacking"])
    first, second = told(tmp_path / "f.py")
    assert first == [["ab"], ["x"], "default", {"a": [1]}]
    assert second == [["ab"], [None]], "a column that only other rows have"


def test_what_a_trainer_gives_is_there(tmp_path):
    assert scores(functions_in(tmp_path / "f.py", TELLING, "logging"), to("a", "b", step=7)) == [[7.0, 7.0]]


def test_a_column_of_the_name_of_a_trainers_argument_does_not_take_its_place(tmp_path):
    functions = functions_in(tmp_path / "f.py", TELLING, "logging")
    columns = {"trainer_state": 1, "log_metric": 2}
    assert scores(functions, to("a", step=7, columns=columns), columns=[*columns]) == [[7.0]]


@pytest.mark.parametrize(("args", "column"), [({}, "answer"), ({"column": "solution"}, "solution")])
def test_a_function_of_the_box_is_refused_before_it_lacks_its_column(args, column):
    with RewardPool([RewardFunction("exact_match", "exact_match", args=args)], num_workers=1, timeout_s=20) as pool:
        with pytest.raises(InputError, match=naming(f"'{column}' ... only level")):
            pool.check(["level"])
        pool.check(["level", column])


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"onw": 1}, "args ... 'onw' ... completions, level, missing, own"),
        (
            {"own": 1, "completions": []},
            "args ... 'completions' ... completions, level, missing, own",
        ),
        ({}, "'own' ... only level"),
    ],
)
def test_args_that_a_function_does_not_have_are_refused(tmp_path, args, reason):
    (function,) = functions_in(tmp_path / "f.py", TELLING, "named")
    function = RewardFunction(function.name, function.target, args=args, digest=function.digest)
    with RewardPool([function], num_workers=1, timeout_s=5) as pool, pytest.raises(InputError) as caught:
        pool.check(["level"])
    assert str(caught.value) == naming(f"--reward-function {function.target} ... {reason}")


def test_a_text_prompt_of_several_turns_is_one_text(tmp_path):
    code = "def f(prompts): return [prompts[0] == 'a\\n\\nb\\n\\nc']"
    turns = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert scores(functions_in(tmp_path / "f.py", code, "f"), to("x", messages=turns)) == [[1.0]]


def test_numbers_of_libraries_are_numbers(tmp_path):
    """Exactly: a float of fp32 is that of fp64 which it is."""
    code = """
import numpy as np
class Whole:
    async def __call__(self, completions): return np.arange(2)
whole = Whole()
async def scalars(completions): return [np.float32(0.1), np.array(True)]
def tokens(completions): return [np.array([1, 2], np.int8), (np.float16(0.5), 3, False)]
def mixed(completions): return [None, 1e-45]
"""
    (values,) = scores(functions_in(tmp_path / "f.py", code, "whole scalars tokens mixed"), to("ab", "cde"))
    assert values == {
        "whole": [0.0, 1.0], "scalars": [0.10000000149011612, 1.0],
        "tokens": [[1.0, 2.0], [0.5, 3.0, 0.0]], "mixed": [None, 1e-45],
    }  # fmt: skip
    flat = [value for one in values.values() for value in one if not isinstance(value, list)]
    assert {type(value) for value in flat} == {float, type(None)}


def test_a_call_is_of_one_prompt_whatever_runs_beside_it(tmp_path):
    code = """
import random, time
def seen(prompts, completions, level):
    time.sleep(random.random() / 50)
    assert len({*prompts}) == len({*level}) == 1
    return [1000 * level[0] + 10 * len(completions) + int(text) for text in completions]
"""
    rows = [to(*map(str, range(1 + n % 4)), columns={"level": n}) for n in range(40)]
    values = scores(functions_in(tmp_path / "f.py", code, "seen"), *rows, columns=["level"])
    assert values == [[1000 * n + 10 * (1 + n % 4) + i for i in range(1 + n % 4)] for n in range(40)]


def test_workers_work_beside_this_thread_and_beside_each_other(tmp_path):
    code = """
import os, time
def meet(completions, folder):
    open(os.path.join(folder[0], str(os.getpid())), "w").close()
    while len(os.listdir(folder[0])) < 3: time.sleep(0.01)
    return [os.getpid()]
"""
    functions = functions_in(tmp_path / "f.py", code, "meet")
    (tmp_path / "met").mkdir()
    with RewardPool(functions, num_workers=2, timeout_s=20) as pool:
        pool.check(["folder"])
        row = to("a", columns={"folder": str(tmp_path / "met")})
        start = time.monotonic()
        handles = [pool.submit(row), pool.submit(row)]
        assert time.monotonic() - start < 1.0 and not handles[0].done()
        (tmp_path / "met" / "main").touch()  # only now can they go on
        pids = {values["meet"][0] for values in pool.gather(handles)}
    assert len(pids) == 2 and os.getpid() not in pids


def test_waiting_for_values_beats(tmp_path):
    functions = functions_in(tmp_path / "f.py", "import time\ndef f(completions): time.sleep(1.2); return [1]", "f")
    heartbeat.start(tmp_path / "beat.json")
    try:
        with RewardPool(functions, num_workers=1, timeout_s=20) as pool:
            pool.check(())
            handle, before = pool.submit(to("a")), time.time()
            pool.gather([handle])
            beat = heartbeat.read_beat(tmp_path / "beat.json")
    finally:
        heartbeat.end()
    assert beat is not None and beat.time > before + 0.4


def test_the_first_error_is_of_the_first_prompt_and_function(tmp_path):
    code = "import time\ndef f(completions, wait): time.sleep(wait[0]); return [f'{wait[0]}']\n"
    functions = functions_in(tmp_path / "f.py", f"{code}def g(completions): return ['g']", "f g")
    rows = [to("a", row=f"row {n}", columns={"wait": wait}) for n, wait in enumerate((1.0, 0.0))]
    with pytest.raises(InputError, match=naming("prompt row 0: response 0 ... '1.0'")):
        scores(functions, *rows, columns=["wait"])


SECRETS = {
    "HF_TOKEN": "a", "OPENAI_API_KEY": "b", "WANDB_API_KEY": "c", "AWS_SECRET_ACCESS_KEY": "d", "PGPASSWORD": "e",
    "GITHUB_PAT": "f", "HF_TOKEN_PATH": "g", "SSH_AUTH_SOCK": "h", "AWS_SESSION_TOKEN": "i", "DB_CREDENTIALS": "j",
    "MYSQL_PWD": "m", "SENTRY_DSN": "n", "AZURE_STORAGE_CONNECTION_STRING": "o", "JWT": "p", "NETRC": "q",
    "DB_PASS": "r", "PGPASSFILE": "s", "SLACK_WEBHOOK_URL": "t", "SESSION_COOKIE": "u",
    "HARMLESS_NAME": "sk-canaryCANARYcanaryCANARY01", "PROXY": "http://user:canary@host", "my.key": "k", "TOKEN": "l",
}  # fmt: skip
HARMLESS = {
    "TOKENIZERS_PARALLELISM": "true", "KEYBOARD": "us", "HF_HOME": "/x", "PATHS": "y", "AUTHOR": "z", "OLDPWD": "/",
    "BYPASSES": "1", "DSNAME": "2", "COMPASSION": "3",
}  # fmt: skip


def test_workers_see_no_secrets(tmp_path, monkeypatch):
    for name, value in {**SECRETS, **HARMLESS}.items():
        monkeypatch.setenv(name, f"CANARY-{value}" if len(value) == 1 else value)
    code = """
import os, json
from pathlib import Path
def f(completions):
    raw = Path("/proc/self/environ").read_bytes().decode()
    Path(FILE).write_text(json.dumps([dict(os.environ), raw]))
    return [0]
""".replace("FILE", repr(str(tmp_path / "seen.json")))
    functions = functions_in(tmp_path / "f.py", code, "f")
    assert scores(functions, to("a")) == [[0.0]]
    variables, raw = json.loads((tmp_path / "seen.json").read_text())
    assert not SECRETS.keys() & variables.keys() and HARMLESS.keys() <= variables.keys()
    assert "anary" not in raw and variables["PYTHONHASHSEED"] == "0" and variables["OMP_NUM_THREADS"]
    with reward_pool(WorkerFlags(reward_env=["HF_TOKEN", "JWT"]), functions) as pool:
        pool.check(())
        scored(pool, to("a"))
    variables, _ = json.loads((tmp_path / "seen.json").read_text())
    assert {name: variables[name] for name in SECRETS if name in variables} == {
        "HF_TOKEN": "CANARY-a", "JWT": "CANARY-p",
    }  # fmt: skip


def test_variables_that_are_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="reward_env: got NAME=VALUE, expected NAME") as caught:
        WorkerFlags(reward_env=["KEY=canary"])
    assert "canary" not in str(caught.value.errors()[0]["msg"])
    functions = functions_in(tmp_path / "f.py", "def f(completions): return [1]", "f")
    with (
        reward_pool(WorkerFlags(reward_env=["NOT_THERE"]), functions) as pool,
        pytest.raises(EnvironmentFault) as caught,
    ):
        pool.check(())
    assert str(caught.value) == naming("--reward-env NOT_THERE ... environment")


def test_a_worker_starts_with_little(tmp_path):
    code = "import sys\ndef f(completions): return [float(name in sys.modules) for name in NAMES]".replace(
        "NAMES", repr(names := ["torch", "transformers", "pydantic", "asyncio", "numpy", "json"])
    )
    assert scores(functions_in(tmp_path / "f.py", code, "f"), to(*names)) == [[0.0] * 5 + [1.0]]


def test_a_function_can_import_what_is_beside_it(tmp_path, monkeypatch):
    (tmp_path / "reward_words.py").write_text("WORTH = 3.0")
    monkeypatch.chdir("/")
    code = "from reward_words import WORTH\ndef f(completions): return [WORTH]"
    assert scores(functions_in(tmp_path / "f.py", code, "f"), to("a")) == [[3.0]]


@pytest.mark.slow
def test_the_judge_runs_in_this_process_in_one_thread(monkeypatch):
    """What stands for it here never comes to a worker, which has the real one."""
    running, most, places = 0, 0, set()

    async def judge(completions, mode=(), **others):
        nonlocal running, most
        running += 1
        most = max(most, running)
        places.add((os.getpid(), threading.current_thread().name))
        await asyncio.sleep(0.1)
        running -= 1
        if mode and mode[0] == "down":
            raise RuntimeError("gave up") from ConnectionRefusedError(111, "no")
        if mode and mode[0] == "hang":
            await asyncio.sleep(60)
        return ["x"] if mode and mode[0] == "wrong" else [len(places) - 1, most, os.getpid()][: len(completions)]

    monkeypatch.setitem(BOX, "judge", judge)
    function = RewardFunction("judge", "judge")
    monkeypatch.setattr("pipeline.rewards.pool.RANK_LIMIT_S", 1.0)
    with nothing_left(), RewardPool([function], num_workers=1, timeout_s=0.01) as pool:
        pool.check(["mode"])
        values = scored(pool, *[to("a", "b", "c", columns={"mode": ""})] * 9)
        assert {tuple(one["judge"]) for one in values} == {(1.0, 9.0, float(os.getpid()))}
        down, hang = scored(pool, *(to("a", columns={"mode": mode}) for mode in ("down", "hang")))
        with pytest.raises(InputError, match=naming("judge ... prompt data.jsonl:7: response 0 ... 'x' (str)")):
            scored(pool, to("a", columns={"mode": "wrong"}))
    assert down == {"judge": [Failure("no connection", "RuntimeError: gave up")]}
    assert hang == {"judge": [Failure("timed out", "no answer within 1 s")]}


@pytest.mark.parametrize("error", ["urllib.error.URLError('refused')", "ConnectionResetError()", "socket.gaierror()"])
def test_an_endpoint_that_does_not_answer_is_a_kind_of_its_own(tmp_path, error):
    code = f"import socket, urllib.error\ndef f(completions): raise {error}"
    ((failure,),) = scores(functions_in(tmp_path / "f.py", code, "f"), to("a"))
    assert failure.kind == "no connection"


@pytest.mark.parametrize("error", ["urllib.error.HTTPError('', 500, 'a', {}, None)", "FileNotFoundError(2, 'a')"])
def test_an_answer_is_no_missing_endpoint(tmp_path, error):
    code = f"import urllib.error\ndef f(completions): raise {error}"
    ((failure,),) = scores(functions_in(tmp_path / "f.py", code, "f"), to("a"))
    assert failure.kind == "raised"


PARENT = """
import sys, time
from support.reward_functions import to
from pipeline.rewards.functions import parse_reward_functions
from pipeline.rewards.pool import RewardPool
pool = RewardPool(parse_reward_functions(sys.argv[1:]), num_workers=3, timeout_s=60)
pool.check(())
handles = [pool.submit(to("a")) for _ in range(2)]
time.sleep(0.5)
print("busy", flush=True)
input()
raise ValueError("not closed")
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("end", ["killed", "failing"])
def test_workers_end_with_their_parent(tmp_path, end, monkeypatch):
    """Two are busy in a function."""
    monkeypatch.setenv(MARK, mark := f"parent-{os.getpid()}-{end}")
    (tmp_path / "f.py").write_text("import time\ndef f(completions): time.sleep(60)")
    environment = python_environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{os.path.dirname(os.path.dirname(__file__))}"
    command = [sys.executable, "-c", PARENT, f"{tmp_path}/f.py:f"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=environment) as parent:
        assert parent.stdout and parent.stdout.readline() == b"busy\n"
        limit = time.monotonic() + 20
        while len(marked(mark)) < 1 + 2 * 2 and time.monotonic() < limit:  # each worker has a guard
            time.sleep(0.05)
        assert len(marked(mark)) == 1 + 2 * 2
        if end == "killed":
            parent.send_signal(signal.SIGKILL)
        _, errors = parent.communicate(b"\n", timeout=20)
    assert end == "killed" or errors.decode().splitlines()[-1] == "ValueError: not closed"
    limit = time.monotonic() + 20
    while marked(mark) and time.monotonic() < limit:
        time.sleep(0.05)
    assert marked(mark) == []


def test_a_system_without_processes_is_told(tmp_path, monkeypatch):
    functions = functions_in(tmp_path / "f.py", "def f(completions): return [1]", "f")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    message = naming("cannot be started ... No such file")
    with RewardPool(functions, num_workers=1, timeout_s=5) as pool, pytest.raises(EnvironmentFault, match=message):
        pool.check(())


TRL = """
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward
repetition_penalty = get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0)
soft_overlong = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
"""


@pytest.mark.skipif(find_spec("trl") is None, reason="pip install --no-deps trl==1.16.0 for its reward functions")
def test_functions_of_trl_run_unchanged(tmp_path):
    """The values are those that they return when they are called directly."""
    from trl import rewards as trl_rewards

    functions = functions_in(tmp_path / "f.py", TRL, "think_format_reward repetition_penalty soft_overlong")
    texts = ("<think>a</think>b", "no thought", "<think>\na b\n</think> 1")
    ids = [[1, 2, 3, 4], [5] * 8, [*range(12)]]
    (values,) = scores(functions, to(*texts, ids=ids, is_conversation=True), columns=["level"])
    spoken = [[{"role": "assistant", "content": text}] for text in texts]
    assert values == {
        "think_format_reward": trl_rewards.think_format_reward(spoken),
        "repetition_penalty": trl_rewards.get_repetition_penalty_reward(2, -1.0)(completion_ids=ids),
        "soft_overlong": trl_rewards.get_soft_overlong_punishment(10, 4)(completion_ids=ids),
    }
    assert values["think_format_reward"] == [1.0, 0.0, 1.0] and values["soft_overlong"] == [0.0, -0.5, -1.0]
