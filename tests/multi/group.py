"""Run a worker script as a process group of gloo ranks, once for all its cases, and read what each rank found."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 900.0

Case = Callable[[Path], Any]


def run_group(script: str, world_size: int, folder: Path, inputs: Path) -> list[dict[str, Any]]:
    """What each rank of `tests/multi/<script>` found, by case. A case that did not come to its end is missing."""
    from pipeline.dist import free_port

    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(str(path) for path in (ROOT, ROOT / "tests", ROOT / "tests" / "multi"))
    shared = {
        **os.environ,
        "PYTHONPATH": paths,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    processes = []
    for rank in range(world_size):
        with (folder / f"rank-{rank}.log").open("wb") as log:
            command = [sys.executable, str(ROOT / "tests" / "multi" / script), str(folder), str(inputs)]
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
            )
    wait_for(processes)
    logs = "\n".join((folder / f"rank-{rank}.log").read_text(errors="replace")[-4000:] for rank in range(world_size))
    files = [folder / f"rank-{rank}.pt" for rank in range(world_size)]
    assert all(file.is_file() for file in files), logs
    print(logs)  # pytest shows it where a test fails
    return [torch.load(file, weights_only=True) for file in files]


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; a rank that is left alone or hangs is killed."""
    end = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + 5.0)
        if time.monotonic() > end:
            for process in processes:
                process.kill()
                process.wait()
        time.sleep(0.1)


def run_cases(cases: Mapping[str, Case]) -> None:
    """The body of a worker: join the group, run the cases in order, save what was found after each one."""
    from pipeline import dist
    from pipeline.engine.start import start_deepspeed
    from pipeline.run.entry import leave

    folder, inputs = Path(sys.argv[1]), Path(sys.argv[2])
    world = dist.start(timeout_s=300)
    start_deepspeed()
    found: dict[str, Any] = {}
    for name, case in cases.items():
        started = time.monotonic()
        found[name] = case(inputs)
        print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
        torch.save(found, folder / f"rank-{world.rank}.pt")
    dist.finish()
    leave(0)
