"""Runs of an earlier commit resume by the same command to the last bit; those of a much earlier one are refused.

A worktree of that commit takes each run to its end; today's code then resumes it from its first checkpoint.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from stage_runs import metrics
from support.command_run import TIMEOUT_S, Ended, files_of, run_command
from support.in_process import error_lines
from support.marks import rare_but
from support.messages import naming
from support.source_tree import ROOT
from support.tiny_run import make_folder

from pipeline.checkpoints.checkpoint import SHARED
from step3_ppo.experience import Collected

PARENT = "0c0ab5fc453f1034473b2b45fc0a37c561e9aa22"  # the last one before records of earlier ones were dropped
REFUSED = "5748f8860ef986630c0c5b596c154f43eaa5f4e0"  # one whose config.json has no kinds of origins
OVER_SAMPLING = "5029b7a4bff07fd198d2162c7a7013711ddc21fd"  # the last one with --over-sample
STEP, END = 2, 4
# Serves the commands of its input, a JSON line each, by its own version of `run_command`.
DRIVER = """
import json, sys
from pathlib import Path
from support.command_run import run_command
for line in sys.stdin:
    stage, words, folder, ranks = json.loads(line)
    ended = run_command(stage, words, folder=Path(folder), ranks=ranks)
    print(json.dumps([ended.code, ended.stdout, ended.stderr]), flush=True)
"""
REWARDS = """
def length(completions):
    return [len(text) / 100 for text in completions]
"""
SAME = f"""--data-path train.jsonl --eval-data-path test.jsonl --data-split none --data-output-path cache --dtype fp32
    --num-train-epochs 100 --max-steps {END} --save-steps {STEP} --keep-checkpoints 2 --eval-interval {STEP}
    --eval-iters 1 --enable-tensorboard false"""
ROWS = "--per-device-train-batch-size 2 --gradient-accumulation-steps 2"
SAMPLED = f"{ROWS} --actor-model-name-or-path base --output-dir run --max-prompt-seq-len 48"
ALONE = "--reward-function rewards.py:length"
PACKAGES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo", "grpo": "step3_ppo", "dpo": "step3_dpo"}
# PPO is rewarded by a model, or a function alone.
FULL = {
    "sft": f"{ROWS} --model-name-or-path base --output-dir run/sft --max-seq-len 96",
    "reward": f"{ROWS} --model-name-or-path base --output-dir run/reward --max-seq-len 96",
    "ppo": f"{SAMPLED} --per-device-generation-batch-size 8 --critic-model-name-or-path scorer",
    "grpo": f"{SAMPLED} --per-device-generation-batch-size 8 --method grpo {ALONE}",
    "dpo": f"{ROWS} --model-name-or-path base --output-dir run/dpo --max-seq-len 96",
}
LORA = {
    "sft": f"{FULL['sft']} --lora-dim 4",
    "reward": f"{FULL['reward']} --lora-dim 4",
    "ppo": f"{SAMPLED} --per-device-generation-batch-size 8 {ALONE} --actor-lora-dim 4 --critic-lora-dim 4",
    "grpo": f"{FULL['grpo']} --actor-lora-dim 4",
    "dpo": f"{FULL['dpo']} --lora-dim 4",
}
CASES = [(method, kind, ranks) for method in PACKAGES for kind in ("full", "lora") for ranks in (1, 2)]
Run = Callable[..., Ended]


def git(*words: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *map(str, words)], capture_output=True, check=False)


@contextmanager
def commands_of(commit: str, folder: Path) -> Iterator[Run]:
    """`run_command` of an earlier commit, by a worktree of it in `folder`."""
    if shutil.which("git") is None or git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        pytest.skip(f"needs a git clone that has commit {commit[:7]}, not a shallow one")
    newest = re.search(r"^transformers==(\S+)", git("show", f"{commit}:constraints.txt").stdout.decode(), re.M)
    assert newest is not None
    if Version(version("transformers")) > Version(newest[1]):
        pytest.skip(f"{commit[:7]} was tested with transformers {newest[1]} at most")
    tree = folder / "tree"
    added = git("worktree", "add", "--detach", tree, commit)
    assert added.returncode == 0, added.stderr.decode()
    own = {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=tree, env=os.environ | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert driver.stdin is not None and driver.stdout is not None

    def run(stage: str, words: list[str], *, folder: Path, ranks: int) -> Ended:
        driver.stdin.write(json.dumps([stage, words, str(folder), ranks]).encode() + b"\n")
        driver.stdin.flush()
        return Ended(*json.loads(driver.stdout.readline()))

    try:
        yield run
    finally:
        driver.stdin.close()
        driver.wait(TIMEOUT_S)
        git("worktree", "remove", "--force", tree)


@pytest.fixture(scope="module")
def run_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with commands_of(PARENT, tmp_path_factory.mktemp("before")) as run:
        yield run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a reward function, and models that have positions for the longest answers that a default allows."""
    folder = make_folder(tmp_path_factory.mktemp("inputs"), num_train=32, max_position_embeddings=640)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def back_to_checkpoint(run_dir: Path) -> None:
    """Leave what a run leaves that is killed between its last checkpoint and the one before."""
    shutil.rmtree(run_dir / "checkpoints" / f"step-{END}")
    (run_dir / "done.json").unlink()


def settings(run_dir: Path) -> dict[str, Any]:
    """What the last checkpoint says of the flags that must be the same."""
    return json.loads((run_dir / "checkpoints" / f"step-{END}" / "state.json").read_text())["settings"]


def tensors(folder: Path) -> dict[str, object]:
    """All weights of finished models, and the last checkpoint's moments, counts, averages and rollout."""
    files = [file for file in folder.rglob("*.safetensors") if f"step-{STEP}" not in file.parts]
    return {str(file.relative_to(folder)): rollout(file) or file.read_bytes() for file in files}


def rollout(file: Path) -> dict[str, list[Any]]:
    """The rollout of a checkpoint, in whichever form it stores the trained tokens; {} for another file."""
    if file.name != SHARED:
        return {}
    found = Collected.restored(load_file(file), {}, torch.device("cpu")).tensors()
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("method", "kind", "ranks"), rare_but([("sft", "full", 1), ("ppo", "full", 1), ("dpo", "lora", 1)], CASES)
)
def test_a_run_from_before_resumes_by_the_same_command(method, kind, ranks, run_before, inputs, tmp_path):
    """Its settings, weights, moments and metrics are those of the run that its commit took to the end."""
    words = f"{SAME} {(LORA if kind == 'lora' else FULL)[method]}".split()
    assert_resumed(run_before, method, words, shutil.copytree(inputs, tmp_path / "work"), ranks, gone={})


@pytest.mark.slow
def test_a_run_that_carried_no_responses_on_resumes(inputs, tmp_path):
    """Its checkpoints have empty places for them; a run that may have some is refused."""
    words = f"{SAME} {FULL['grpo']} --num-samples-per-prompt 2".split()
    with commands_of(OVER_SAMPLING, tmp_path) as run:
        folder = shutil.copytree(inputs, tmp_path / "without")
        assert_resumed(run, "grpo", words, folder, 1, gone={"over_sample": 0.0})
        folder = shutil.copytree(inputs, tmp_path / "with")
        assert run("step3_ppo", [*words, "--over-sample", "0.5"], folder=folder, ranks=1).code == 0
    back_to_checkpoint(folder / "run/runs/ppo")
    ended = run_command("step3_ppo", words, folder=folder, ranks=1)
    assert ended.code == 2 and ended.stderr == naming("--over-sample: removed after commit 5029b7a4 ... 0.5")


def assert_resumed(
    run_before: Run, method: str, words: list[str], folder: Path, ranks: int, *, gone: dict[str, Any]
) -> None:
    """The run of an earlier commit, and that resumed from its first checkpoint; gone: settings that were dropped."""
    inner = Path("runs", "ppo" if PACKAGES[method] == "step3_ppo" else method)
    ended = run_before(PACKAGES[method], words, folder=folder, ranks=ranks)
    assert ended.code == 0, ended.stderr[-2000:]
    whole, resumed = shutil.copytree(folder / "run", folder / "whole"), folder / "run"
    back_to_checkpoint(resumed / inner)

    ended = run_command(PACKAGES[method], words, folder=folder, ranks=ranks)
    assert ended.code == 0 and f"/step-{STEP} " in ended.stderr, ended.stderr[-2000:]
    assert "other settings" not in ended.stderr
    assert settings(resumed / inner) | gone == settings(whole / inner)
    expected, found = tensors(whole), tensors(resumed)
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []
    for old, new in zip(metrics(whole / inner), metrics(resumed / inner), strict=True):
        assert new.items() >= old.items()


@pytest.mark.slow
def test_a_run_of_other_defaults_is_refused_in_one_line(inputs, tmp_path):
    folder, run_dir = shutil.copytree(inputs, tmp_path / "work"), tmp_path / "work/run/runs/ppo"
    words = f"{SAME} {FULL['grpo']}".split()
    with commands_of(REFUSED, tmp_path) as run_refused:
        ended = run_refused("step3_ppo", words, folder=folder, ranks=1)
    assert ended.code == 0, ended.stderr[-2000:]
    back_to_checkpoint(run_dir)
    before = files_of(run_dir / "checkpoints")
    ended = run_command("step3_ppo", words, folder=folder, ranks=1)
    assert ended.code == 2 and files_of(run_dir / "checkpoints") == before
    assert error_lines(ended.stderr) == [
        naming(f"error: ... checkpoints/step-{STEP} ... earlier commit ... --overwrite")
    ]
