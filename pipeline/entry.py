"""The way into a stage from the command line: flags first (in milliseconds), then torch, then the stage's loop."""

import importlib
import os
import sys
from typing import Any

from pipeline.errors import InputError
from pipeline.flags import parse


def enter(config_class: Any, stage: str, loop: str, argv: list[str] | None) -> int:
    """Parse the flags of `stage` (sft, reward, ppo) and run `loop`, the name of a module with `train(run, config)`.

    Returns the exit code of design.md, section 3.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        resolved = parse(config_class, words, section=stage, prog=loop.rpartition(".")[0] + ".main")
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            print(*(f"error: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)
        return error.code
    from pipeline.run import run_stage

    return run_stage(resolved, stage=stage, train=lambda: importlib.import_module(loop).train)


def leave(code: int) -> None:
    """End the process with `code`. Interpreter teardown is skipped: with process groups it aborts now and then."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
