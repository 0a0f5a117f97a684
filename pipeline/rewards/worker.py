"""A worker: calls functions for the process that started it, in JSON lines over its standard input and output.

What a function prints, also from C, goes to standard error. The worker ends with its parent, whatever a function does,
and so do the processes that functions start: a guard, which is between the two, ends them.
"""

import ctypes
import inspect
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from pipeline.processes import end_with_parent, send
from pipeline.rewards.calls import Call, Signature, answer_to, check_args, checked_values, loaded_function
from pipeline.rewards.functions import FLAG
from pipeline.rewards.modules import check_modules
from pipeline.rewards.tool_calls import ToolCalls

CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
SIGNALLED = 128  # the exit code of the guard is this and the number of the signal that has ended the worker
Loaded = dict[str, tuple[Callable[..., Any], Signature]]  # target -> function


def main() -> None:
    """Answer requests, one a line, until the parent closes the pipe.

    Arguments of the command line: the parent's process id, and the bytes of memory that are the limit.
    """
    parent, limit = map(int, sys.argv[1:])
    guarded(parent)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # not addresses, of which libraries reserve many
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit, hard % 2**63),) * 2)
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.dup(2)
    home, worker, loaded, seen, tools = Path.cwd(), os.getpid(), Loaded(), {"__main__"}, ToolCalls()
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as answers:
        for line in requests:
            os.chdir(home)  # a function may have left it, and closed what it prints to
            for file, number in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(file, number)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
            request = json.loads(line)
            answer = answered(request, loaded, seen, tools) | {"number": request["number"]}
            if os.getpid() != worker:  # a function has forked, and has returned in the child too
                os._exit(0)
            ctypes.CDLL(None).fflush(None)
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
    os._exit(0)  # else Python waits for threads that functions have left behind


def guarded(parent: int) -> None:
    """Return in a child of this process, the guard: it stays until child or parent end, and ends all that is below it.

    Orphans below it are given to it, also those that have left their session (PR_SET_CHILD_SUBREAPER).
    """
    guard, code = os.getpid(), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1)
    end_with_parent(parent, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Python drops an error that is raised while it forks
    if not (worker := os.fork()):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        end_with_parent(guard, signal.SIGKILL)
        return
    with suppress(SystemExit):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while (ended := os.wait())[0] != worker:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while below := psutil.Process().children(recursive=True):
        for process in below:
            send(process.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    os._exit(code if code >= 0 else SIGNALLED - code)


def answered(request: Mapping[str, Any], loaded: Loaded, seen: set[str], tools: ToolCalls) -> dict[str, Any]:
    """Return the answer to a request: the signature of a function that it loads, the values of a call, or `tools`'s.

    All with "beside": modules that are imported now and were not known; see `check_modules`.
    """
    target = request["target"]
    try:
        if request["flag"] != FLAG:
            answer = tools.answer(request)
        elif "call" not in request:
            loaded[target] = loaded_function(target, request["digest"])
            check_args(target, request["args"], loaded[target][1])
            answer = {"signature": asdict(loaded[target][1])}
        else:
            function, signature = loaded[target]
            call = Call(**request["call"])
            values = function(**call.arguments(signature))
            if inspect.isawaitable(values):
                values = result_of(values)
            answer = {"values": checked_values(values, call.lengths)}
        return answer | {"beside": check_modules(target, request["modules"], seen)}
    except BaseException as error:  # also SystemExit
        answer = answer_to(error, target) | ({"is_full": True} if isinstance(error, MemoryError) else {})
        if "failed" in answer and request.get("prints_trace", True):
            with suppress(Exception):  # of a stream that the function has closed
                traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        return answer


def result_of(waiting: Awaitable[Any]) -> Any:
    """Run a coroutine to its end."""
    import asyncio

    async def awaited() -> Any:
        return await waiting

    return asyncio.run(awaited())


if __name__ == "__main__":
    main()
