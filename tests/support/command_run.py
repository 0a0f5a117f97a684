"""Run a stage's command line as a user does, in a process of its own, and look at what it left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    stdout: str
    stderr: str


def environment() -> dict[str, str]:
    """Without a launcher's variables, one thread, offline."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command_of(stage: str, words: Sequence[object], *, ranks: int) -> list[str]:
    """`python -m STAGE.main WORDS`, or the same through torchrun for several ranks."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    return [*launcher, f"{stage}.main", *map(str, words)]


def run_command(stage: str, words: Sequence[object], *, folder: Path, ranks: int = 1) -> Ended:
    """Run a stage's command in `folder` to its end."""
    done = subprocess.run(
        command_of(stage, words, ranks=ranks),
        cwd=folder,
        env=environment(),
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Not text=True, which would turn carriage returns into line ends.
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_until(stage: str, words: Sequence[object], *, folder: Path, metrics: Path, step: int) -> Ended:
    """Run a stage's command and send SIGTERM when metrics.jsonl has the line of `step`."""
    process = subprocess.Popen(
        command_of(stage, words, ranks=1), cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    end = time.monotonic() + TIMEOUT_S
    wanted = f'"step": {step},'
    while process.poll() is None and not (metrics.is_file() and wanted in metrics.read_text(encoding="utf-8")):
        if time.monotonic() > end:
            process.kill()
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Ended(process.returncode, stdout.decode(), stderr.decode())
