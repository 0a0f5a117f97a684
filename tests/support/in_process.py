"""Call a stage's `main(argv)` inside the test's own process and put back all that it changes there."""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed


@contextmanager
def undone_afterwards() -> Iterator[None]:
    """Environment, signal handlers, loggers and the process group are as before when the context ends."""
    variables = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root = logging.getLogger()
    loggers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(loggers):
            handler.close()
        root.handlers, root.level = loggers, level
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(variables)
        leave_group()


@contextmanager
def group_of_one() -> Iterator[Any]:
    """The world of a process group of this process alone; the environment that joining it wrote is taken back."""
    from pipeline import dist
    from pipeline.engine.start import start_deepspeed

    before = dict(os.environ)
    leave_group()  # DeepSpeed keeps that of an earlier file
    try:
        made = dist.start(timeout_s=60)
        start_deepspeed()
        yield made
    finally:
        leave_group()
        os.environ.clear()
        os.environ.update(before)


def look_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `rlhf train` look at models and data in this process, not in one of its own."""
    from rlhf import preflight

    def here(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=preflight.main(command[-1]))

    monkeypatch.setattr(preflight.subprocess, "run", here)


def refusal_of(main: Callable[[list[str]], int], words: list[str], captured: Any, *, code: int = 2) -> str:
    """Return the only line that a user reads of a command that ends with `code`; captured: capsys or capfd."""
    with undone_afterwards():
        actual = main(words)
    lines = error_lines(captured.readouterr().err)
    assert (actual, len(lines)) == (code, 1), (actual, lines)
    return lines[0]


def error_lines(stderr: str) -> list[str]:
    """Return the lines that a user reads, without row counts, the preview of rows and the linker's words."""
    noise = (
        r"(sft|reward|ppo|text) rows?|  rows: |⟦|  (text|prompt|response|chosen|rejected)?  |/usr/bin/ld: |collect2: "
    )
    return [line for line in stderr.splitlines() if not re.match(noise, line)]


def leave_group() -> None:
    """Also DeepSpeed forgets the group, so that the next run in this process joins its own."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "deepspeed" in sys.modules:  # a run that came to its end has left the group itself
        import deepspeed.comm.comm as deepspeed_comm
        from deepspeed.utils import groups

        deepspeed_comm.cdb = None
        for name, value in list(vars(groups).items()):
            if isinstance(value, torch.distributed.ProcessGroup):
                setattr(groups, name, None)
