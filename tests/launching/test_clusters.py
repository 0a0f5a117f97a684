"""Jobs for Slurm, Kubeflow Trainer and SkyPilot: the train.py that each starts, and the published schemas."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launch_stub import ROOT, write_program

from pipeline.launching.hosts import chosen_hosts, ranks_by_host
from rlhf.train_plan import make_plan, request_of

PYTHON_STUB = """#!/bin/bash
printf '%s\\0' "$@" >"$NOTES"
"""
STOPPED_PYTHON_STUB = """#!/bin/bash
trap 'exit 75' TERM
touch "$NOTES"
while :; do sleep 0.02; done
"""
SCONTROL_STUB = """#!/bin/bash
[[ $* == "show hostnames n[1-2]" ]] && printf 'first\\nsecond\\n'
"""
# Plays `xargs -rn1 printf '%s\n'`.
XARGS_STUB = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} -c 'import shlex, sys; print(*shlex.split(sys.stdin.read()), sep="\\n")'
"""
HARD_FOLDER = 'my "own" $HOME * folder'
HARD_FLAGS = f"--output-dir '{HARD_FOLDER}'"
TWO_OF_EIGHT = {"first": list(range(8)), "second": list(range(8))}


def planned(folder: Path, script: str, *words: str, **variables: str) -> Any:
    """The configuration of the train.py that a shell script starts; the host file must exist for it."""
    write_program(folder / "bin/python", PYTHON_STUB)
    write_program(folder / "bin/scontrol", SCONTROL_STUB)
    if not shutil.which("xargs"):
        write_program(folder / "bin/xargs", XARGS_STUB)
    notes = folder / "notes"
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "NOTES": str(notes)}
    subprocess.run(["bash", "-ec", script, *words], env={**path, **variables}, cwd=folder, timeout=20, check=True)
    if not notes.exists():
        return None
    module, *argv = notes.read_text().split("\0")[1:-1]
    assert module == "rlhf.train"
    return make_plan(argv, prog="rlhf train").config


def test_slurm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (ROOT / "launch/slurm.sbatch").read_text()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"}
    config = planned(tmp_path, script, "slurm.sbatch", "--actor-model", "6.7b", "--step", "1", **slurm)
    assert (config.launcher, config.actor_model, config.step) == ("srun", "6.7b", [1])
    assert chosen_hosts(request_of(config)) == TWO_OF_EIGHT


def test_slurm_is_told_of_one_task_a_node_and_of_a_signal_before_the_time_is_over():
    """More tasks would each be a train.py; without the signal nothing is saved. Slurm reads no line after a command."""
    lines = (ROOT / "launch/slurm.sbatch").read_text().splitlines()
    comments = takewhile(lambda line: line.startswith("#"), lines)
    assert [line for line in comments if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=rlhf",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
        "#SBATCH --signal=B:TERM@300",  # B: to the batch script alone, which train.py has replaced
    ]


def test_slurms_signal_reaches_train_and_the_code_of_train_is_that_of_the_job(tmp_path):
    notes = tmp_path / "notes"
    write_program(tmp_path / "bin/python", STOPPED_PYTHON_STUB)
    write_program(tmp_path / "bin/scontrol", SCONTROL_STUB)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "NOTES": str(notes)}
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **slurm}
    with subprocess.Popen(["bash", ROOT / "launch/slurm.sbatch"], env=environment, cwd=tmp_path) as job:
        deadline = time.monotonic() + 20
        while not notes.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        job.terminate()
        assert job.wait(20) == 75


def test_skypilot(tmp_path):
    task = yaml.safe_load((ROOT / "launch/sky.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
    assert task["num_nodes"] == 2 and task["resources"] == {"accelerators": "H100:8"} and task["workdir"] == "."
    assert task["setup"].splitlines() == ["pip install -c constraints.txt ."]
    sky = {"SKYPILOT_NODE_IPS": "first\nsecond", "SKYPILOT_NUM_GPUS_PER_NODE": "8", **task["envs"]}
    assert planned(tmp_path, task["run"], SKYPILOT_NODE_RANK="1", **sky) is None
    sky["FLAGS"] += f" {HARD_FLAGS}"
    config = planned(tmp_path, task["run"], SKYPILOT_NODE_RANK="0", **sky)
    assert config.output_dir == HARD_FOLDER
    assert (config.launcher, config.actor_model) == ("ssh", "13b")
    assert chosen_hosts(request_of(config)) == TWO_OF_EIGHT


def test_kubeflow_trainer(tmp_path):
    job = yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())
    trainer = job["spec"].pop("trainer")
    assert job == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"generateName": "rlhf-"},
        "spec": {"runtimeRef": {"name": "torch-distributed"}},
    }
    assert trainer == {
        "image": "REGISTRY/rlhf-pipeline:latest",
        "numNodes": 2,
        "numProcPerNode": 8,
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": "8"}},
        "env": [{"name": "FLAGS", "value": "--actor-model 13b --reward-model 350m --output-dir /output"}],
        "command": ["bash", "-ec"],
        "args": trainer["args"],  # what they do is shown by their run
    }
    torch = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
    torch |= {"PET_MASTER_ADDR": "rlhf-node-0-0.rlhf", "PET_MASTER_PORT": "29400"}
    torch |= {variable["name"]: variable["value"] for variable in trainer["env"]}
    config = planned(tmp_path, trainer["args"][0], **torch)
    assert (config.actor_model, config.output_dir) == ("13b", "/output")
    torch["FLAGS"] += f" {HARD_FLAGS}"
    assert planned(tmp_path, trainer["args"][0], **torch).output_dir == HARD_FOLDER
    request = request_of(config)
    assert (request.launcher, request.node_rank, ranks_by_host(request)) == ("none", 1, [8, 8])
    assert (config.master_addr, config.master_port) == ("rlhf-node-0-0.rlhf", 29400)


@pytest.mark.slow
def test_the_trainjob_is_of_the_published_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the extra job-schemas")
    job = yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert json.loads(read.to_json()) == job, "every key is one of the schema"


@pytest.mark.slow
def test_the_sky_task_is_of_the_published_schema():
    schemas = pytest.importorskip("sky.utils.schemas", reason="needs the extra job-schemas")
    import jsonschema

    task = yaml.safe_load((ROOT / "launch/sky.yaml").read_text())
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**task, "num_node": 2}, schemas.get_task_schema())
