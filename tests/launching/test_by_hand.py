"""Two ranks that `deepspeed` and `torchrun` start by hand, without a launch script: the same steps."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import forks
from support.ports import free_port
from support.source_tree import ROOT
from support.tiny_run import read_metrics

pytestmark = pytest.mark.slow
FLAGS = (
    "--model-name-or-path base --data-path train.jsonl --eval-data-path test.jsonl --data-split none --max-seq-len 96 "
    "--per-device-train-batch-size 4 --dtype fp32 --max-steps 2 --enable-tensorboard false"
).split()
DEEPSPEED = "deepspeed.launcher.runner --hostfile /dev/null --num_gpus 2 --master_port PORT --module"
TORCHRUN = "torch.distributed.run --nproc_per_node 2 --master_port PORT -m"


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """Data and models, and the run of a launch script."""
    command = ["bash", str(ROOT / "launch/single_node.sh"), "--num-gpus", "2", "1", *FLAGS, "--output-dir", "ours/sft"]
    subprocess.run(command, cwd=folder, env=environment(), timeout=300, check=True)
    return folder


def environment() -> dict[str, str]:
    more = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    more |= {"OMP_DISPLAY_ENV": "verbose"}  # libgomp prints what it has read
    return {name: value for name, value in forks.environment().items() if name != "OMP_WAIT_POLICY"} | more


@pytest.mark.parametrize("launcher", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_ranks_that_are_started_by_hand_take_the_same_steps(folder, launcher):
    """`deepspeed` adds a --local_rank to the flags. Threads that wait sleep."""
    output = launcher.partition(".")[0]
    command = [sys.executable, "-m", *launcher.replace("PORT", str(free_port())).split(), "step1_sft.main", *FLAGS]
    words = [*command, "--output-dir", f"{output}/sft"]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.count("GOMP_SPINCOUNT = '0'") >= 2, "on each rank; the launchers may do as they like"
    losses = [[line.get("loss") for line in read_metrics(folder / name / "runs/sft")] for name in (output, "ours")]
    assert losses[0] == losses[1] and len(losses[0]) >= 2
