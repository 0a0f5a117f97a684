"""Time from `train.py --step 1` to its first optimizer step: `python -m benchmarks.speed.start FOLDER ...`.

Each FOLDER is a checkout; they take turns, so that what else the machine does falls on all of them. The demo's model
and data are made once by `make demo` or are given by --demo; the first start of each checkout, which fills caches, is
not counted. Another model: --flags "--actor-model FOLDER --data-path output/demo/data --data-split none ...".
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Each Python imports it at its start, and writes down when that was and what it runs, and later when a mark comes.
RECORDER = """
import json, os, sys, time

# Audit event -> end of the name that it is about -> what that means of a process that does it first.
MARKS = {
    "import": {"torch": "imports torch", "deepspeed": "imports DeepSpeed"},
    "open": {"log.txt": "opens its log: it has the word of train.py", "metrics.jsonl": "has evaluated"},
}

def write(mark=""):
    with open(os.environ["STARTS"], "a") as file:
        file.write(json.dumps([time.time(), mark, sys.orig_argv[1:]]) + "\\n")

def hook(event, values):
    marks = MARKS.get(event)
    end = str(values[0]).rpartition("/")[2] if marks else ""
    if marks and end in marks:
        write(marks.pop(end))

write()
sys.addaudithook(hook)
"""
FLAGS = "--step 1 --overwrite --sft.max-steps 1 --output-dir output"


def name_of(words: list[str]) -> str:
    """Return what a Python runs: its module or script."""
    return words[words.index("-m") + 1] if "-m" in words[:3] else Path(words[0]).name


def start_once(checkout: Path, folder: Path, flags: str) -> tuple[float, list[tuple[str, float]]]:
    """Return the seconds to the first step's line of metrics, and (program, seconds) of each Python's start and marks.

    flags: besides `FLAGS`.
    """
    starts, metrics = folder / "starts.jsonl", folder / "output/runs/sft/metrics.jsonl"
    starts.unlink(missing_ok=True)
    shutil.rmtree(folder / "output/runs", ignore_errors=True)
    shutil.rmtree(folder / "output/sft", ignore_errors=True)
    variables = {"PYTHONPATH": str(folder / "site"), "STARTS": str(starts), "PYTHON": sys.executable}
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(checkout / "train.py"), *f"{FLAGS} {flags}".split()]
    began = time.time()
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    while not (metrics.is_file() and '"loss"' in metrics.read_text(encoding="utf-8")):
        if process.poll() is not None and not metrics.is_file():
            raise SystemExit(f"{checkout}: train.py ended with {process.returncode}")
        time.sleep(0.005)
    seconds = time.time() - began
    process.wait()
    lines = [json.loads(line) for line in starts.read_text(encoding="utf-8").splitlines()]
    moments = [(f"{name_of(words)} {mark}".strip(), moment - began) for moment, mark, words in lines]
    return seconds, [(name, moment) for name, moment in moments if moment <= seconds]


def main() -> None:
    """Print the median of each checkout, and the processes of its median run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="+")
    parser.add_argument("--demo", type=Path, default=Path("output/demo"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--flags", default="--actor-model tiny")
    given = parser.parse_args()
    runs: dict[Path, list[tuple[float, list[tuple[str, float]]]]] = {path.resolve(): [] for path in given.checkouts}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(RECORDER, encoding="utf-8")
        shutil.copytree(given.demo, folder / "output/demo")
        for repeat in range(given.repeats + 1):
            for checkout, measured in runs.items():
                run = start_once(checkout, folder, given.flags)
                measured += [run] if repeat else []
    first = 0.0
    for checkout, measured in runs.items():
        middle = statistics.median_low(seconds for seconds, _ in measured)
        first = first or middle
        print(f"{checkout.name}: {middle:.2f} s to the first step ({middle / first:.2f} of the first checkout)")
        for program, moment in next(starts for seconds, starts in measured if seconds == middle):
            print(f"  {moment:6.2f} s  {program}")


if __name__ == "__main__":
    main()
