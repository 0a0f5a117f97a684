"""Run a stage's command line as a user does, in processes of its own, and look at what it left."""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from support import forks
from support.ports import free_port

from pipeline.run.entry import leave

TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished command: its exit code and its output."""

    code: int
    stdout: str
    stderr: str


def run_fresh(stage: str, words: Sequence[object], *, folder: Path, ranks: int = 1) -> Ended:
    """Run `python -m STAGE.main WORDS`, or the same by torchrun for several ranks, to its end in `folder`."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    done = subprocess.run(
        [*launcher, f"{stage}.main", *map(str, words)],
        cwd=folder,
        env=forks.environment(),
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Not text=True, which would turn carriage returns into line ends.
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def files_of(*folders: Path) -> dict[Path, bytes]:
    """Return the content of all files below the folders of runs and models, without what any start of a run writes."""
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    each_start = {"log", "log.txt", "run.lock", "outcome", "heartbeat"}
    return {file: file.read_bytes() for file in files if not each_start & set(file.parts)}


def run_command(
    stage: str,
    words: Sequence[object],
    *,
    folder: Path,
    ranks: int = 1,
    first: Callable[[], None] | None = None,
    **variables: str,
) -> Ended:
    """Run a stage's command in `folder` to its end, in forked processes, which start sooner than fresh ones.

    `first` is called in each process before the command; it can be pickled.
    """
    return Command(stage, words, folder, ranks, first, **variables).end()


def run_until(stage: str, words: Sequence[object], *, folder: Path, metrics: Path, step: int) -> Ended:
    """Run a stage's command and send SIGTERM when metrics.jsonl has the line of `step`."""
    command = Command(stage, words, folder, ranks=1)
    (process,) = command.processes
    line = f'"step": {step},'
    end = time.monotonic() + TIMEOUT_S
    while process.is_alive() and not (metrics.is_file() and line in metrics.read_text(encoding="utf-8")):
        if time.monotonic() > end:
            process.kill()
        time.sleep(0.005)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGTERM)
    return command.end()


class Command:
    """A stage's command that runs in `folder`, with files beside it for what it prints."""

    def __init__(
        self,
        stage: str,
        words: Sequence[object],
        folder: Path,
        ranks: int,
        first: Callable[[], None] | None = None,
        **variables: str,
    ) -> None:
        self.files = output_files(folder)
        port = free_port()
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            launched = forks.rank_variables(rank, ranks, port) if ranks > 1 else {}
            own = forks.environment() | launched | variables
            self.processes.append(forks.start(child, stage, list(map(str, words)), folder, own, self.files, first))

    def end(self) -> Ended:
        return ended(self.processes, self.files)


def output_files(folder: Path) -> tuple[Path, Path]:
    """Return names of files, beside a command's folder, for what it prints."""
    now = time.monotonic_ns()
    return folder.parent / f".{now}.out", folder.parent / f".{now}.err"


def ended(processes: list[BaseProcess], files: tuple[Path, Path]) -> Ended:
    """Wait for the processes of a command, which write to `files`."""
    for process in processes:
        process.join(TIMEOUT_S)
        process.kill()
    stdout, stderr = (path.read_bytes().decode() if path.exists() else "" for path in files)
    return Ended(forks.exit_code(processes), stdout, stderr)


def child(
    stage: str,
    words: list[str],
    folder: Path,
    variables: dict[str, str],
    files: tuple[Path, Path],
    first: Callable[[], None] | None,
) -> None:
    """Be the stage's process; it never returns."""
    with as_process(folder, variables, files):
        if first is not None:
            first()
        main = importlib.import_module(f"{stage}.main")
        leave(main.main(words))


@contextmanager
def as_process(folder: Path, variables: dict[str, str], files: tuple[Path, Path]) -> Iterator[None]:
    """Be the process of the command that this context holds: in `folder`, with these variables; it never returns."""
    code = 70
    try:
        forks.write_output_to(*files)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        yield
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
