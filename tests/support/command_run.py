"""Run a stage's command line as a user does, in processes of its own, and look at what it left."""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from support import forks

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


def run_command(stage: str, words: Sequence[object], *, folder: Path, ranks: int = 1, **variables: str) -> Ended:
    """Run a stage's command in `folder` to its end, in forked processes, which start sooner than fresh ones."""
    return Command(stage, words, folder, ranks, **variables).end()


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

    def __init__(self, stage: str, words: Sequence[object], folder: Path, ranks: int, **variables: str) -> None:
        self.stdout, self.stderr = (folder.parent / f".{time.monotonic_ns()}.{name}" for name in ("out", "err"))
        port = forks.free_port()
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            launched = forks.rank_variables(rank, ranks, port) if ranks > 1 else {}
            own, files = forks.environment() | launched | variables, (self.stdout, self.stderr)
            self.processes.append(forks.start(child, stage, list(map(str, words)), folder, own, files))

    def end(self) -> Ended:
        for process in self.processes:
            process.join(TIMEOUT_S)
            process.kill()
        printed = [path.read_bytes().decode() if path.exists() else "" for path in (self.stdout, self.stderr)]
        return Ended(forks.exit_code(self.processes), *printed)


def child(stage: str, words: list[str], folder: Path, variables: dict[str, str], files: tuple[Path, Path]) -> None:
    """Be the stage's process; it never returns."""
    code = 70
    try:
        forks.write_output_to(*files)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        main = importlib.import_module(f"{stage}.main")
        main.leave(main.main(words))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
