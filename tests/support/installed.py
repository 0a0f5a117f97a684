"""The project as a wheel, and a tiny step 1 by an installed command, far from the checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.launch_stub import write_program
from support.source_tree import PACKAGES, ROOT
from support.tiny_run import make_folder, read_metrics

BUILD_FILES = ("pyproject.toml", "requirements.txt", "LICENSE")
NO_CACHES = shutil.ignore_patterns("__pycache__")


def build_wheel(folder: Path) -> Path:
    """Build the project's wheel in `folder`, from a copy: a build leaves files beside its sources."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=NO_CACHES)
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, folder / "source")
    pip(sys.executable, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip(python: str | Path, *words: str | Path) -> str:
    """Return the output of `python -m pip WORDS`."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def call(command: list[str | Path], folder: Path, **variables: str) -> str:
    """Return the output of a command run in `folder`, where no checkout, launcher or other Python is found."""
    wrong = write_program(folder / "bin" / "python", "#!/bin/sh\nexit 9\n").parent
    hidden = ("PYTHON", "PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    kept |= {"PATH": f"{wrong}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=kept, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tiny_step(program: list[str | Path], folder: Path, **variables: str) -> None:
    """Run one optimizer step of step 1 by `PROGRAM train` in `folder`, with relative paths."""
    (folder / "data").mkdir()
    make_folder(folder / "data", num_train=8, num_documents=4)
    sizes = "--sft.max-steps 1 --sft.per-device-train-batch-size 2 --sft.max-seq-len 64".split()
    words = ["train", "--step", "1", "--actor-model", "data/base", "--sft.data-path", "data/train.jsonl", *sizes]
    printed = call([*program, *words], folder, **variables)
    assert "== stage 1: done in" in printed
    assert "next: rlhf chat output/sft" in printed or "next: python -m rlhf chat" in printed
    assert len(read_metrics(folder / "output" / "runs" / "sft")) >= 1
    assert (folder / "output" / "sft" / "config.json").is_file()
