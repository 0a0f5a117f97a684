"""Stages of the demo alone and beside processes that compute, on a CPU: processor and wall seconds of the same steps.

    python -m demo.run
    python -m benchmarks.busy --json busy.jsonl

It runs in the folder in which the demo was run, whose models it takes. `spinners` processes compute without a pause.
Processor seconds are user and system time of a command with all its processes. The machine must do nothing else.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.speed.jobs import ROOT, environment, free_port

METHODS = ("ppo", "grpo", "rloo")
OUTPUT = Path("output/busy")
STEP_3 = "--preset {root}/launch/presets/tiny.yaml --method {method} --actor-model output/sft --max-steps {steps}"
Found = dict[str, Any]


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """Let so many processes compute while a block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def commands(method: str, steps: int) -> dict[str, list[str]]:
    """Return the command of each way to start stage 3, by its name: one rank, but two by the launchers."""
    words = STEP_3.format(root=ROOT, method=method, steps=steps).split()
    words += ["--reward-model", "output/reward", *(["--critic-model", "output/reward"] if method == "ppo" else [])]
    stage = [*words, "--output-dir", str(OUTPUT), "--overwrite", "--dtype", "fp32"]
    port, python = str(free_port()), sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port, "-m"]
    deepspeed = "deepspeed.launcher.runner --hostfile /dev/null --num_gpus 2 --module --master_port".split()
    # `rlhf train` leaves out what the preset has for a model that the method has not.
    train = [python, str(ROOT / "train.py"), "--step", "3", "--deployment-type", "single_gpu", "--actor-model", "tiny"]
    train += ["--method", method, "--max-steps", str(steps), "--ppo.actor-model-name-or-path", "output/sft"]
    train += ["--ppo.reward-model-name-or-path", "output/reward"]
    train += ["--ppo.critic-model-name-or-path", "output/reward"] if method == "ppo" else []
    return {
        "python -m": [python, "-m", "step3_ppo.main", *stage],
        "torchrun": [*torchrun, "step3_ppo.main", *stage],
        "deepspeed": [python, "-m", *deepspeed, port, "step3_ppo.main", *stage],
        "train.py": [*train, "--output-dir", str(OUTPUT), "--ppo.overwrite"],
    }


def timed(command: list[str]) -> Found:
    """Run a command to its end; return its wall seconds and processor seconds. Ends the program if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    variables = {name: value for name, value in environment().items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        command, env=variables | {"DS_ACCELERATOR": "cpu"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.perf_counter() - began, 1), "processor_s": round(spent, 1)}


def main() -> int:
    """Measure each method and each way, first alone, then beside the other processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--spinners", type=int, default=6)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--json", type=Path, required=True, help="file to which each pair of runs adds a line")
    options = parser.parse_args()
    for method in options.methods:
        for way, command in commands(method, options.steps).items():
            alone = timed(command)
            with spinning(options.spinners):
                beside = timed(command)
            found = {"method": method, "way": way, "cores": os.cpu_count(), "alone": alone, "beside": beside}
            shutil.rmtree(OUTPUT, ignore_errors=True)
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
