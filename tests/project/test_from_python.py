"""The blocks of the page "From Python" run as they stand, in their order, with a tiny model of the published name."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import forks
from support.pages import blocks
from support.source_tree import ROOT
from support.tiny_run import make_folder

PAGE = (ROOT / "docs" / "guides" / "from_python.md").read_text(encoding="utf-8")
BLOCKS = dict(blocks(PAGE, "python"))
MODEL = "HuggingFaceTB/SmolLM2-135M"


@pytest.mark.slow
def test_the_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / MODEL).parent.mkdir()
    (made := tmp_path / "made").mkdir()
    (make_folder(made) / "base").rename(tmp_path / MODEL)
    environment = forks.environment() | {"PYTHONPATH": str(ROOT)}
    printed = {}
    for name, text in BLOCKS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        words = [sys.executable, name]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        printed[name] = done.stdout
    steps = [line.split() for line in printed["read_metrics.py"].splitlines()]
    assert [step for step, *_ in steps] == ["0", "1", "2", "2"], "evaluations before and after two steps"
    better, worse = map(float, re.findall(r"-?\d+\.\d+", printed["score.py"].splitlines()[-1]))
    assert better != worse
    # Advantages are +-sqrt(3)/2, for 4 and 5 tokens, and each ratio is e^0.1: what is left is one token.
    assert float(printed["use_a_loss.py"].split()[0]) == pytest.approx(math.exp(0.1) * math.sqrt(3) / 2, rel=1e-3)
