"""Programs of two ranks on this machine, whose collectives time out after two seconds."""

import os
import subprocess
import sys
from pathlib import Path

from support.ports import free_port
from support.source_tree import ROOT

START = """
import json, os, pathlib, time
import torch
from pipeline import dist, heartbeat
from pipeline.errors import InputError

rank = int(os.environ["RANK"])
ready = [pathlib.Path(f"ready-{number}") for number in (0, 1)]
ready[rank].touch()
while not all(file.exists() for file in ready):
    time.sleep(0.01)
heartbeat.start(pathlib.Path(f"beat-{rank}.json"))
world = dist.start(timeout_s=2)

def told(work):
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:80], dist.follows_from_another_rank(error)

def fail(error):
    raise error
"""


def run_two_ranks(code: str, folder: Path) -> list[list[str]]:
    """Return the lines that each rank printed. Both run START and `code` in `folder`."""
    own = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START + code], cwd=folder, env=os.environ | own | {"RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    return [process.communicate(timeout=60)[0].splitlines() for process in ranks]
