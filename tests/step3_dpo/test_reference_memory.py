"""Nothing of the reference is in memory beside the policy, under ZeRO stage 3 too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.preference_runs import words
from support.source_tree import ROOT
from support.tiny_run import make_folder

# DPO's command, which writes the elements of all shards before and after the reference is computed with.
COMMAND = """
import gc, pathlib, sys
from torch.nn import Parameter
from step3_dpo import reference
from step3_dpo.main import main

def elements():
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, Parameter) and hasattr(one, "ds_tensor")]
    return sum(one.ds_tensor.numel() for one in found)

def loaded(*args, **named):
    engine = frozen_engine(*args, **named)
    note.append(elements())
    return engine

def watched(*args, **named):
    yield from score_rows(*args, **named)
    note.append(elements())
    pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, note)))

note, score_rows, frozen_engine = [], reference.score_rows, reference.frozen_engine
reference.score_rows, reference.frozen_engine = watched, loaded
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_the_reference_is_gone_before_the_policy_is_loaded(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_train=8)
    flags = words(folder, "run", per_device_train_batch_size=8, zero_stage=3, max_steps=1)
    command = [sys.executable, "-c", COMMAND, str(tmp_path / "found.txt"), *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(int, (tmp_path / "found.txt").read_text().split())
    assert before > 10_000 and after == 0
