"""Launch scripts as child processes, with their signals and exit codes."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import FrameType

from pipeline.errors import EXIT_STOPPED, EnvironmentFault

# Process id of an `rlhf train`, at whose death the supervisor stops.
PARENT = "RLHF_TRAIN_PID"


def launch_file(name: str) -> Path:
    """Return the path of a launch script, or of a preset (`presets/...`), of the installed project or the checkout."""
    return Path(str(files("launch"))) / name


def run_script(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bool]:
    """Run `command` to its end, with SIGINT and SIGTERM of this process forwarded to it as SIGTERM.

    Returns its exit code, and True if this process was asked to stop meanwhile. Raises EnvironmentFault: not found.
    """
    variables = {**environment, PARENT: str(os.getpid())}
    # A session of its own: Ctrl-C in a terminal reaches it once, through this process.
    try:
        process = subprocess.Popen(command, start_new_session=True, env=variables)
    except OSError as error:
        raise EnvironmentFault(f"{command[0]} cannot be started: {error.strerror}; look at PATH") from None
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and code < 0:
        return EXIT_STOPPED, True  # the shell died of the signal before it had started anything
    return (code if code >= 0 else 128 - code), bool(received)
