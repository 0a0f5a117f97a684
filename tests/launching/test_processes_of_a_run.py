"""From `python train.py` to the ranks: the Pythons that start are few, and each program that they start is named.

A module that every Python imports at its start writes down its words, and what it starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.source_tree import ROOT

pytestmark = pytest.mark.slow

RECORDER = """
import json, os, sys

def write(kind, words):
    with open(os.environ["STARTS"], "a") as file:
        file.write(json.dumps([kind, os.getpid(), [os.fsdecode(word) for word in words]]) + "\\n")

def hook(event, values):
    if event == "subprocess.Popen":
        write("program", values[1] if isinstance(values[1], list) else [values[1]])
    elif event in ("os.exec", "os.posix_spawn"):
        write("program", values[1])
    elif event == "os.system":
        write("program", [values[0]])

write("python", sys.orig_argv)
sys.addaudithook(hook)
"""
# Programs of the system, and what becomes one of the Pythons by exec: they are no processes that run Python of ours.
LEFT_OUT = {
    "bash": "the launch script, which becomes the supervisor",
    "git": "the commit of the code, for env.json",
    "nvidia-smi": "the GPUs of the machine",
    "uname": "platform, for env.json",
    "lscpu": "torch, on the cores",
    "gcc": "torch and triton look for a compiler",
    "which": "DeepSpeed looks for programs",
    "ldconfig": "ctypes looks for libraries",
}


def recorded(folder: Path, *words: str) -> list[Any]:
    """[kind, process, words] of each start of a Python and of a program under `train.py --step 1 WORDS`."""
    site, starts = folder / "site", folder / "starts.jsonl"
    site.mkdir(exist_ok=True)
    starts.unlink(missing_ok=True)
    (site / "sitecustomize.py").write_text(RECORDER)
    flags = "--step 1 --actor-model base --data-path train.jsonl --eval-data-path test.jsonl --data-split none"
    flags += " --sft.max-seq-len 96 --per-device-train-batch-size 4 --dtype fp32 --max-steps 1 --overwrite"
    variables = {"PYTHONPATH": str(site), "STARTS": str(starts), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *flags.split(), *words]
    subprocess.run(command, cwd=folder, env=forks.environment() | variables, timeout=300, check=True)
    return [json.loads(line) for line in starts.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """A folder in which the data are cached."""
    recorded(folder)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_process_looks_one_supervises_and_each_rank_is_one(folder, ranks):
    several = ("--deployment-type", "single_node", "--num-gpus", str(ranks)) if ranks > 1 else ()
    starts = recorded(folder, *several)
    pythons = [words[1:] for kind, _, words in starts if kind == "python"]
    modules = [words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name for words in pythons]
    # The launch script starts while models and data are looked at.
    assert modules[0] == "train.py" and sorted(modules[1:]) == [
        "rlhf.launch",
        "rlhf.preflight",
        *["step1_sft.main"] * ranks,
    ]
    assert len({process for kind, process, _ in starts if kind == "python"}) == 3 + ranks
    programs = {Path(words[0]).name for kind, _, words in starts if kind == "program"}
    python = Path(sys.executable).name
    assert programs - {python} <= set(LEFT_OUT), "a program that nobody has named"
    assert python in programs and "bash" in programs and os.environ.get("STARTS") is None
