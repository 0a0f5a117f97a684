"""A run's folder and its end: logs, resolved configuration, environment, outcome of each rank, signals, exit codes."""

import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline import dist, earlier_runs
from pipeline.config import RunConfig
from pipeline.errors import EXIT_DONE, EXIT_FAULT, EnvironmentFault, RunError, StoppedRun
from pipeline.flags import Resolved, flat_items
from pipeline.layout import done_file, outcome_file, run_folder
from pipeline.saving import write_json

log = logging.getLogger(__name__)

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft", "safetensors", "pydantic")
QUIET_LOGGERS = ("transformers", "datasets", "peft", "torch", "urllib3", "filelock", "matplotlib")


class StopRequest:
    """Remembers SIGTERM and SIGINT until the loop asks; a second signal after 2 s quits at once."""

    def __init__(self) -> None:
        self._first: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # DeepSpeed's launcher sends two in a row for one Ctrl-C.
        if self._first is not None and now - self._first > 2.0:
            os._exit(128 + number)
        self._first = self._first or now

    def here(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._first is not None

    def anywhere(self, world: dist.World) -> bool:
        """Whether any rank was asked to stop. A collective."""
        return dist.max_over_ranks(float(self.here()), world.device) > 0


def write_outcome(run_dir: Path, rank: int, code: int | None, message: str) -> None:
    """What train.py reads: launchers do not carry exit codes."""
    file = outcome_file(run_dir, rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"code": code, "message": message, "pid": os.getpid(), "host": socket.gethostname()})


def start_logging(run_dir: Path, rank: int) -> None:
    """Every rank logs to log/rank-<r>.txt; rank 0 also to log.txt and, without timestamps, to stderr."""
    import transformers

    (run_dir / "log").mkdir(parents=True, exist_ok=True)
    files = [run_dir / "log" / f"rank-{rank}.txt"] + ([run_dir / "log.txt"] if rank == 0 else [])
    handlers: list[logging.Handler] = [logging.FileHandler(file, encoding="utf-8") for file in files]
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    if rank == 0:
        console = logging.StreamHandler(sys.stderr)
        console.setFormatter(logging.Formatter("%(message)s"))
        handlers.append(console)
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(logging.INFO)
    transformers.utils.logging.disable_progress_bar()
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def describe_environment(world: dist.World) -> dict[str, Any]:
    """Versions, hardware and commit, for env.json. No environment variables: they may hold secrets."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "device": device_name(world),
        "num_ranks": world.size,
        "cpu_count": os.cpu_count(),
        "commit": git_commit(),
        "command": sys.argv,
    }


def device_name(world: dist.World) -> str:
    import torch

    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"


def git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    done = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def write_run_files(run: "Run") -> None:
    """config.json (value and origin of every flag) and env.json."""
    resolved = run.resolved
    settings = {name: {"value": value, "from": resolved.origins[name]} for name, value in flat_items(resolved.config)}
    write_json(run.folder / "config.json", settings)
    write_json(run.folder / "env.json", describe_environment(run.world))


def check_writable(run_dir: Path, rank: int) -> None:
    """Raise EnvironmentFault in one line where the run's folder cannot be written."""
    probe = run_dir / f".probe-{rank}"  # one a rank: another's may be gone between two lines of this
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EnvironmentFault(f"{run_dir}: cannot write there: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Run:
    """What a stage's loop knows of its surroundings."""

    world: dist.World
    folder: Path
    stage: str
    resolved: Resolved
    stop: StopRequest

    def stopped(self, step: int, total_steps: int) -> StoppedRun:
        """To be raised when the checkpoint of `step` is written."""
        afresh = earlier_runs.starts_afresh(self.resolved.config.run)
        how = "the same command without --overwrite and --resume never" if afresh else "the same command"
        return StoppedRun(f"stopped at step {step} of {total_steps}; {how} resumes")


def run_stage(resolved: Resolved, *, stage: str, train: Callable[[], Callable[[Run, Any], None]]) -> int:
    """Run a stage's loop; its errors become one line, an exit code, and this rank's outcome file."""
    run_config: RunConfig = resolved.config.run
    folder = run_folder(run_config, stage)
    rank = int(os.environ.get("RANK", "0"))
    stop = StopRequest()
    code, message = EXIT_DONE, "done"
    try:
        check_writable(folder, rank)
        write_outcome(folder, rank, None, "running")
        start_logging(folder, rank)
        world = dist.start(timeout_s=run_config.process_group_timeout_s)
        begin(Run(world, folder, stage, resolved, stop), train)
    except RunError as error:
        code, message = error.code, str(error)
        report(message, rank, with_traceback=run_config.debug)
    except Exception as error:
        code, message = EXIT_FAULT, f"rank {rank}: {type(error).__name__}: {error}"
        log.exception("fault")
        report(
            f"{message}\nthe traceback is in {folder / 'log' / f'rank-{rank}.txt'}", 0, with_traceback=run_config.debug
        )
    write_outcome(folder, rank, code, message)
    if code == EXIT_DONE:
        # After an error the peers may hang in a collective: no barrier then.
        dist.finish()
    return code


def begin(run: Run, train: Callable[[], Callable[[Run, Any], None]]) -> None:
    """Start the loop unless the folder holds a finished run; record what is run and that it is done."""
    if dist.on_main(lambda: is_finished(run)):
        return
    dist.on_main(lambda: write_run_files(run))
    train()(run, run.resolved.config)


def is_finished(run: Run) -> bool:
    """Whether there is nothing to do; clears the run's folder where it is to start afresh."""
    config = run.resolved.config
    for folder in earlier_runs.model_folders(config, run.stage):
        earlier_runs.check_replaceable(folder)
    if earlier_runs.starts_afresh(config.run):
        earlier_runs.clear(run.folder)
    return earlier_runs.finished_steps(run.folder, config, run.stage) is not None


def write_done(run: Run, *, steps: int) -> None:
    """Mark the run as finished, on rank 0."""
    if run.world.is_main:
        write_json(done_file(run.folder), {"stage": run.stage, "steps": steps, "time": time.time()})


def report(message: str, rank: int, *, with_traceback: bool) -> None:
    """Errors that all ranks meet are printed by rank 0 alone."""
    if with_traceback:
        traceback.print_exc()
    if rank == 0:
        print(*(f"error: {line}" for line in message.splitlines()), sep="\n", file=sys.stderr, flush=True)
