"""Plans and the command of stage 3 where triton is not installed."""

import os
import subprocess
import sys

import pytest
from support.source_tree import ROOT

# A module that is None in sys.modules cannot be imported, as if it were not installed.
PROGRAM = """
import sys
sys.modules["triton"] = None
import pipeline.planning.remedies, pipeline.planning.page, step3_ppo.models.needs
from step3_ppo.main import main
sys.exit(main(sys.argv[1:]))
"""
MODEL = "facebook/opt-125m"  # its shape is known without a hub


@pytest.mark.slow
def test_stage_3_is_planned_without_triton(tmp_path):
    words = ("--dry-run", "--actor-model-name-or-path", MODEL, "--critic-model-name-or-path", MODEL)
    command = [sys.executable, "-c", PROGRAM, *words, "--data-path", "org/rows", "--target", "1xH100"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "plan of ppo, on 1 x H100" in done.stdout and "\n  ppo      fits " in done.stdout
