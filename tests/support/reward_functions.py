"""Reward functions in files, pools of them, and the processes that they may leave behind."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.data.turns import Message
from pipeline.rewards.functions import RewardFunction, parse_reward_functions
from pipeline.rewards.pool import Responses, RewardPool, Value

MARK = "REWARD_TEST"  # a variable that all processes of a pool inherit
# Source of what disturbs a worker: an error without a text, and bytes in all files that it has open.
HOSTILE = """
class Silent(Exception):
    def __str__(self): raise OSError

def write_everywhere(line):
    for number in range(3, 20):
        try:
            os.write(number, line)
        except OSError:
            pass
"""
LIMIT_S = 0.5


def as_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


FORMS = pytest.mark.parametrize("form", [str, as_messages])  # a response in each form in which functions get one


def functions_in(file: Path, code: str, names: str) -> list[RewardFunction]:
    """Write a file of reward functions, and return those of these names."""
    file.write_text(code, encoding="utf-8")
    return parse_reward_functions([f"{file}:{name}" for name in names.split()])


def to(*texts: str, **changes: Any) -> Responses:
    """Responses to one prompt; the tokens of each are its characters."""
    ids = [[ord(letter) for letter in text] for text in texts]
    fields: dict[str, Any] = {"row": "data.jsonl:7", "messages": [Message("user", "How?")], "is_conversation": False}
    return Responses(**fields | {"texts": texts, "ids": ids} | changes)


def scored(pool: RewardPool, *responses: Responses) -> list[dict[str, list[Value]]]:
    return pool.gather([pool.submit(one) for one in responses])


def scores(functions: Sequence[RewardFunction], *responses: Responses, columns: Sequence[str] = ()) -> list[Any]:
    """The values of one function for each prompt, or of several by name."""
    with RewardPool(functions, num_workers=2, timeout_s=20.0) as pool:
        pool.check(columns)
        values = scored(pool, *responses)
    return [one[functions[0].name] if len(functions) == 1 else one for one in values]


def marked(mark: str) -> list[psutil.Process]:
    """Processes of this machine whose environment has the mark, but this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fail where a process that is started in the body outlives it."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        yield
        end = time.monotonic() + 5.0
        while (rest := marked(mark)) and time.monotonic() < end:
            time.sleep(0.05)
        for process in rest:
            process.kill()
        assert rest == []
