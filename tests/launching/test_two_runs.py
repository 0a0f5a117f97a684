"""Several runs by `main([...])` in one process, whose script comes from standard input."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.source_tree import ROOT
from support.tiny_run import make_folder, read_metrics

STAGES = """
from step1_sft.main import main
from step2_reward.main import main as reward
from rlhf.train import main as train

common = "--data-path train.jsonl --data-output-path cache --max-seq-len 96 --max-steps 2 --report false"
batch = "--per-device-train-batch-size 8 --dtype fp32"
alone = f"--model-name-or-path base --data-split none {common} {batch}".split()
road = f"--step 1 --actor-model base {common} {batch}".split()
print("codes", main([*alone, "--output-dir", "a/sft"]), main([*alone, "--output-dir", "b/sft"]),
      reward([*alone, "--output-dir", "b/reward"]), flush=True)
print("codes", *(train([*road, "--output-dir", folder]) for folder in "cd"), flush=True)
"""


@pytest.mark.slow
def test_stages_and_train_run_one_after_another_in_a_script_from_stdin(tmp_path: Path) -> None:
    """The second run learns what the first one does, also behind `rlhf train`."""
    make_folder(tmp_path)
    done = subprocess.run(
        [sys.executable, "-"], input=f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{STAGES}", cwd=tmp_path,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    codes = [line for line in done.stdout.splitlines() if line.startswith("codes")]
    assert (done.returncode, codes) == (0, ["codes 0 0 0", "codes 0 0"]), done.stderr
    losses = {
        folder: [line["loss"] for line in read_metrics(tmp_path / folder / "runs/sft") if "loss" in line]
        for folder in "abcd"
    }
    assert len(losses["a"]) == 2 and losses["a"] == losses["b"] and losses["c"] == losses["d"]
    assert len(read_metrics(tmp_path / "b/runs/reward")) >= 2
