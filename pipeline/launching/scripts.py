"""Launch scripts as child processes, with their signals and exit codes."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import FrameType

from pipeline.errors import EXIT_STOPPED, EnvironmentFault
from pipeline.processes import PARENT, PIPELINE, WAITS, give_go

Script = subprocess.Popen[bytes]  # the process of a launch script


def launch_file(name: str) -> Path:
    """Return the path of a launch script or preset (`presets/...`), in the installed project or the checkout."""
    return Path(str(files("launch"))) / name


def position_in_pipeline(number: int, count: int, later_seconds: Sequence[float]) -> dict[str, str]:
    """Return the environment variable with a stage's number of `count` and the planned seconds of later stages.

    later_seconds: of each later stage; 0: unknown.
    """
    later = f" {sum(later_seconds):.0f}" if later_seconds and all(later_seconds) else ""
    return {PIPELINE: f"{number}/{count}{later}"}


def start_script(command: Sequence[str], environment: Mapping[str, str]) -> Script:
    """Start a launch script. Raises EnvironmentFault if its program is not found."""
    variables = {**environment, PARENT: str(os.getpid())}
    stdin = subprocess.PIPE if WAITS in environment else None
    # In its own session, Ctrl-C in a terminal reaches it once, through this process.
    try:
        return subprocess.Popen(command, start_new_session=True, env=variables, stdin=stdin)
    except OSError as error:
        raise EnvironmentFault(f"{command[0]} cannot be started: {error.strerror}; look at PATH") from None


@contextmanager
def started_early(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Script]:
    """Start a launch script whose supervisor and ranks wait until `run_script` gives the go signal.

    They change nothing before. Without a go signal they end with the block. Raises EnvironmentFault if the program is
    not found.
    """
    process = start_script(command, {**environment, WAITS: "1"})
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()  # closes the pipe, and waits


def run_script(command: Sequence[str], environment: Mapping[str, str], early: Script | None = None) -> tuple[int, bool]:
    """Run `command` to its end, and forward SIGINT and SIGTERM of this process to it as SIGTERM.

    Returns its exit code, and True if this process got such a signal. Raises EnvironmentFault if it is not found.

    Args:
        early: its process, if it was started early.
    """
    process = early or start_script(command, environment)
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        give_go(process)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received and code < 0:
        return EXIT_STOPPED, True  # the shell died of the signal before it had started anything
    return (code if code >= 0 else 128 - code), bool(received)
