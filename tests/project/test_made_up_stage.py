"""A fourth stage: one package (step4_labelled/, beside this file) and one entry of the list of stages, nothing else.

The entry is the worked example of a stage; docs/contribute/adding.md shows the package's `Stage`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import forks
from support.source_tree import ROOT
from support.tiny_run import read_metrics, write_lines
from support.worked_examples import IGNORED, block, copied_project

PACKAGE = ROOT / "tests/project/step4_labelled"
SETTINGS = {
    "model_name_or_path": "base", "data_path": "labelled.jsonl", "max_seq_len": 64, "data_split": "none",
    "per_device_train_batch_size": 4, "dtype": "fp32", "learning_rate": 1e-3, "eval_fraction": 0,
    "lr_scheduler_type": "constant",
}  # fmt: skip


def project_with(folder: Path, number: int) -> Path:
    """A copy of the project with the made-up stage as that of `number`."""
    copied_project(folder, "stage")
    shutil.copytree(PACKAGE, folder / "step4_labelled", ignore=IGNORED)
    for name in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    stage = folder / "step4_labelled/stage.py"
    stage.write_text(stage.read_text().replace("number=4", f"number={number}"))
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    rows = [{"prompt": f"{n}?", "completion": f"answer {n}", "label": n % 3 > 0} for n in range(24)]
    write_lines(folder / "labelled.jsonl", rows)
    return folder


def run(program: list[str], folder: Path, project: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = forks.environment() | {"PYTHON": sys.executable, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *program], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def train(project: Path, folder: Path, *words: str, **changes: object) -> subprocess.CompletedProcess[str]:
    given = [word for name, value in (SETTINGS | changes).items() for word in (f"--labelled.{name}", str(value))]
    command = [str(project / "train.py"), "--actor-model", "base", "--reward-model", "base", *words, *given]
    return run(command, folder, project)


def test_the_page_shows_its_stage():
    assert block("stage", "python") in (PACKAGE / "stage.py").read_text(encoding="utf-8")


WAYS = {4: ("--step", "4"), 3: ("--step", "3", "--method", "labelled")}


@pytest.mark.slow
@pytest.mark.parametrize("number", WAYS)
def test_it_is_looked_at_and_planned(tmp_path, data, number):
    project = project_with(tmp_path / "project", number)
    done = train(project, data, *WAYS[number], "--explain", max_steps=2)
    assert done.returncode == 0, done.stdout + done.stderr
    word = {4: "4", 3: "labelled"}[number]
    assert f"== stage {number}: answers with a label\n" in done.stdout
    shown = " ".join(done.stdout.replace("\\\n", "").split())
    assert f"launch/single_gpu.sh {word} --" in shown and "plan of labelled, on 1 x CPU" in done.stdout
    assert "24 rows of " in done.stdout, "its own kind of rows was sampled"


@pytest.mark.slow
@pytest.mark.parametrize("number", WAYS)
def test_its_data_and_its_start_model_are_looked_at(tmp_path, data, number):
    project = project_with(tmp_path / "project", number)
    wrong = train(project, data, *WAYS[number], "--dry-run", data_path="base/config.json", max_steps=2)
    assert wrong.returncode == 2 and "--labelled.data-path: base/config.json" in wrong.stderr, wrong.stderr
    chained = train(project, data, *WAYS[number], "--dry-run", model_name_or_path="output/sft", max_steps=2)
    assert chained.returncode == 2 and "--labelled.model-name-or-path: output/sft: got no" in chained.stderr
    assert "--step 1 " in chained.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", WAYS)
def test_it_trains_resumes_and_is_exported(tmp_path, data, number):
    project = project_with(tmp_path / "project", number)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for output, steps in ((whole, 4), (parts, 2), (parts, 4)):
        done = train(project, data, *WAYS[number], "--output-dir", str(output), max_steps=steps, save_steps=1)
        assert done.returncode == 0, done.stdout + done.stderr
        shown = " ".join(done.stdout.split())
        assert f"== stage {number}: done in " in shown and f"model: {output}/labelled" in shown
    again = train(project, data, *WAYS[number], "--output-dir", str(parts), max_steps=4, save_steps=1)
    assert again.returncode == 0 and f"== stage {number}: finished already" in again.stdout
    weights = [load_file(output / "labelled/model.safetensors") for output in (whole, parts)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    start = load_file(data / "base/model.safetensors")
    assert any(not weights[0][name].equal(start[name]) for name in start if name in weights[0])
    losses = [[line["loss"] for line in read_metrics(output / "runs/labelled")] for output in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    exported = tmp_path / "exported"
    done = run(["-m", "rlhf.models.export", str(parts / "runs/labelled"), "--output", str(exported)], data, project)
    assert done.returncode == 0, done.stderr
    assert all(tensor.equal(weights[0][name]) for name, tensor in load_file(exported / "model.safetensors").items())
