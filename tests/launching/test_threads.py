"""Threads of OpenMP that wait sleep, in each program that computes: torch's libgomp reads how when it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import forks
from support.marks import slow_but
from support.source_tree import ROOT

from pipeline.processes import WAITS

# Stands for torch: says what libgomp would read, and ends the process.
TORCH = """
import os
print("torch:", os.environ.get("OMP_WAIT_POLICY"), flush=True)
os._exit(0)
"""
STAGE = "--data-path train.jsonl --output-dir out"
PROGRAMS = {
    "step1_sft.main": STAGE,
    "step2_reward.main": STAGE,
    "step3_ppo.main": STAGE,
    "step3_dpo.main": STAGE,
    "step2_reward.eval": "model --data-path train.jsonl",
    "rlhf chat": "model",
    "rlhf compare": "model other",
    "rlhf sample": "--model model --data-path train.jsonl --output out",
}


def policy_at_import(folder: Path, program: str, **variables: str) -> str:
    """What a program prints as it imports torch."""
    (folder / "torch.py").write_text(TORCH)
    kept = {name: value for name, value in forks.environment().items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-m", *program.split(), *PROGRAMS[program].split()]
    done = subprocess.run(
        command, cwd=folder, env=kept | {"PYTHONPATH": f"{folder}:{ROOT}"} | variables, input="hello", text=True,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.parametrize("program", slow_but(["step3_ppo.main"], PROGRAMS))
def test_threads_that_wait_sleep(tmp_path, program):
    assert policy_at_import(tmp_path, program) == "torch: passive\n"


@pytest.mark.slow
def test_so_do_those_of_ranks_that_are_started_early_and_what_is_set_stays(tmp_path):
    assert policy_at_import(tmp_path, "step1_sft.main", **{WAITS: "1"}) == "torch: passive\n"
    assert policy_at_import(tmp_path, "step1_sft.main", OMP_WAIT_POLICY="active") == "torch: active\n"
