"""The reference's log-probabilities are kept while they are computed: a run that is killed goes on behind them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.command_run import run_command
from support.preference_runs import words
from support.source_tree import ROOT
from support.tiny_run import make_folder, read_metrics

# DPO's command that writes after each part, and is killed when it has written the first ones.
COMMAND = """
import os, signal, sys
from step3_dpo import reference
from step3_dpo.main import main

def killed(*args):
    write_tables(*args)
    written.append(args)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

written, write_tables = [], reference.write_tables
reference.write_tables, reference.PART, reference.WRITE_EVERY_S = killed, 4, 0.0
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_what_is_known_of_its_reference(tmp_path: Path) -> None:
    """Rows pass one by one, so that no number depends on those beside it."""
    folder = make_folder(tmp_path, num_train=32)
    flags = {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 1, "max_steps": 2}
    command = [sys.executable, "-c", COMMAND, *words(folder, "killed", **flags)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    file = folder / "killed/runs/dpo/reference.safetensors"
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert np.isfinite(load_file(file)["train"]).all(axis=1).tolist() == [True] * 12 + [False] * 20
    computed = {}
    for out in ("killed", "whole"):
        ended = run_command("step3_dpo", words(folder, out, **flags), folder=folder)
        assert ended.code == 0, ended.stderr
        (computed[out],) = map(int, re.findall(r"reference: log-probabilities of (\d+) rows", ended.stderr))
    assert computed["whole"] - computed["killed"] == 12
    tables = [load_file(folder / out / "runs/dpo/reference.safetensors") for out in computed]
    assert all((tables[0][name] == tables[1][name]).all() for name in tables[1])
    losses = [[line.get("loss") for line in read_metrics(folder / out / "runs/dpo")] for out in computed]
    assert losses[0] == losses[1] and len(losses[0]) >= 2
