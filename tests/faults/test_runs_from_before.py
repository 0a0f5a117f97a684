"""Runs of an earlier version resume by the same command, with the defaults of that version, to the last bit.

A worktree of that version takes each run to its end; today's code then resumes it from its first checkpoint.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from stage_runs import metrics
from support.command_run import TIMEOUT_S, Ended, run_command
from support.marks import rare_but
from support.messages import naming
from support.source_tree import ROOT
from support.tiny_run import make_folder

from pipeline.configuration.flag_table import flag_table
from step3_ppo.config import PPOConfig

COMMIT = "5748f8860ef986630c0c5b596c154f43eaa5f4e0"  # the last one before defaults changed
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
PACKAGES = {"ppo": "step3_ppo", "grpo": "step3_ppo", "dpo": "step3_dpo"}
# Nothing is said of the flags whose default is another one today. PPO is rewarded by a model, or a function alone.
FULL = {
    "ppo": f"{SAMPLED} --per-device-generation-batch-size 8 --critic-model-name-or-path scorer",
    "grpo": f"{SAMPLED} --per-device-generation-batch-size 8 --method grpo {ALONE}",
    "dpo": f"{ROWS} --model-name-or-path base --output-dir run/dpo --max-seq-len 96",
}
LORA = {
    "ppo": f"{SAMPLED} --per-device-generation-batch-size 8 {ALONE} --actor-lora-dim 4 --critic-lora-dim 4",
    "grpo": f"{FULL['grpo']} --actor-lora-dim 4",
    "dpo": f"{FULL['dpo']} --lora-dim 4",
}
OF_DPO = {"lora_learning_rate": 5e-4}
OF_SAMPLING = {"max_answer_seq_len": 256, "actor_lora_learning_rate": 5e-4, "critic_lora_learning_rate": 5e-4}
GONE = {name: one.default for flag in flag_table(PPOConfig).values() for name, one in flag.removed.items()}
CASES = [(method, kind, ranks) for method in PACKAGES for kind in ("full", "lora") for ranks in (1, 2)]
Run = Callable[..., Ended]


def git(*words: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *map(str, words)], capture_output=True, check=False)


@pytest.fixture(scope="module")
def run_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`run_command` of the earlier version."""
    if shutil.which("git") is None or git("cat-file", "-e", f"{COMMIT}^{{commit}}").returncode:
        pytest.skip(f"needs a git clone that has commit {COMMIT[:7]}, not a shallow one")
    newest = re.search(r"^transformers==(\S+)", git("show", f"{COMMIT}:constraints.txt").stdout.decode(), re.M)
    assert newest is not None
    if Version(version("transformers")) > Version(newest[1]):
        pytest.skip(f"{COMMIT[:7]} was tested with transformers {newest[1]} at most")
    tree = tmp_path_factory.mktemp("before") / "tree"
    added = git("worktree", "add", "--detach", tree, COMMIT)
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


def tensors(folder: Path) -> dict[str, bytes]:
    """All weights of finished models, and the last checkpoint's moments, counts and averages."""
    files = [file for file in folder.rglob("*.safetensors") if f"step-{STEP}" not in file.parts]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize(("method", "kind", "ranks"), rare_but([(name, "lora", 1) for name in PACKAGES], CASES))
def test_a_run_from_before_resumes_with_its_defaults(method, kind, ranks, run_before, inputs, tmp_path):
    """Its settings, weights, moments and metrics are those of the run that its version took to the end."""
    folder = shutil.copytree(inputs, tmp_path / "work")
    words = f"{SAME} {(LORA if kind == 'lora' else FULL)[method]}".split()
    inner = Path("runs", "dpo" if method == "dpo" else "ppo")
    ended = run_before(PACKAGES[method], words, folder=folder, ranks=ranks)
    assert ended.code == 0, ended.stderr[-2000:]
    whole, resumed = shutil.copytree(folder / "run", folder / "whole"), folder / "run"
    back_to_checkpoint(resumed / inner)

    ended = run_command(PACKAGES[method], words, folder=folder, ranks=ranks)
    assert ended.code == 0 and f"/step-{STEP} " in ended.stderr, ended.stderr[-2000:]
    before, now = settings(whole / inner), settings(resumed / inner)
    assert before.items() >= (OF_DPO if method == "dpo" else OF_SAMPLING).items(), "the earlier version wrote it"
    assert {name: now.get(name, GONE.get(name)) for name in before} == before, "flags that are gone had their defaults"
    expected, found = tensors(whole), tensors(resumed)
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []
    for old, new in zip(metrics(whole / inner), metrics(resumed / inner), strict=True):
        assert new.items() >= old.items()


@pytest.mark.slow
def test_a_run_with_a_preset_from_before_resumes_by_the_path_of_its_file(run_before, inputs, tmp_path):
    """Each stage of a model had a file then. Today its values are a section, and a note says of which file."""
    folder, name = shutil.copytree(inputs, tmp_path / "work"), "launch/presets/tiny.dpo.yaml"
    words = f"--preset {name} {SAME} {FULL['dpo']}".split()
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(git("show", f"{COMMIT}:{name}").stdout)
    ended = run_before("step3_dpo", words, folder=folder, ranks=1)
    assert ended.code == 0, ended.stderr[-2000:]
    whole, resumed = shutil.copytree(folder / "run", folder / "whole"), folder / "run"
    back_to_checkpoint(resumed / "runs/dpo")
    assert json.loads((whole / "runs/dpo/config.json").read_text())["learning_rate"] == {"value": 5e-5, "from": name}

    shutil.rmtree(folder / "launch")
    (folder / "launch").symlink_to(ROOT / "launch")
    ended = run_command("step3_dpo", words, folder=folder, ranks=1)
    assert ended.code == 0 and f"/step-{STEP} " in ended.stderr, ended.stderr[-2000:]
    assert naming(f"{name} ... section dpo ... launch/presets/tiny.yaml") in (ended.stdout + ended.stderr).splitlines()
    assert tensors(whole) == tensors(resumed)
