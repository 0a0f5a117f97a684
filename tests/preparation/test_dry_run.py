"""The dry run of a stage by each of its three ways in: `python -m`, the launch script, `train.py`."""

import json
import subprocess
from pathlib import Path

import pytest
from support.command_run import Ended, run_command
from support.launch_stub import ROOT, TINY, started, stub_environment, train
from support.marks import slow_but
from support.messages import naming
from support.tiny_run import make_folder

PACKAGES = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}
ON_THE_HUB = {
    1: ("--model-name-or-path", "org/model", "--data-path", "org/rows"),
    2: ("--model-name-or-path", "org/model", "--data-path", "org/rows"),
    3: ("--actor-model-name-or-path", "org/a", "--critic-model-name-or-path", "org/c", "--data-path", "org/rows"),
}
ENGINES = {1: ["model"], 2: ["model"], 3: ["actor", "critic", "reference", "reward model"]}


def dry_run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the checkout in the empty `folder`, with stubs for launcher and GPUs."""
    folder.mkdir(exist_ok=True)
    variables = stub_environment(folder.parent, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", **environment)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=60, check=False)


def stage_dry_run(folder: Path, step: int, *words: str, **environment: str) -> Ended:
    """Run a stage's command in the empty `folder` in a forked process."""
    folder.mkdir(exist_ok=True)
    return run_command(PACKAGES[step], words, folder=folder, **environment)


def engine_jsons(output: str) -> dict[str, dict[str, object]]:
    mark = "  DeepSpeed JSON of the "
    lines = [line.removeprefix(mark).split(": ", 1) for line in output.splitlines() if line.startswith(mark)]
    return {name: json.loads(content) for name, content in lines}


@pytest.mark.parametrize("step", slow_but([3], [1, 2, 3]))
def test_a_stage_prints_flags_presets_and_json_and_writes_nothing(tmp_path, step):
    preset = str(ROOT / "launch/presets/tiny.yaml")
    zero = "--actor-zero-stage" if step == 3 else "--zero-stage"
    words = ["--preset", preset, "--explain", zero, "2", "--seed", "7", *ON_THE_HUB[step]]
    done = stage_dry_run(tmp_path / "empty", step, *words, WORLD_SIZE="4")
    assert done.code == 3 and ": not planned: org/" in done.stderr, "a model that a start could not fetch either"
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert ["seed", "7", "command line"] in rows and ["per_device_train_batch_size", "32", preset] in rows
    assert ["adam_beta1", "0.9", "default"] in rows
    jsons = engine_jsons(done.stdout)
    assert list(jsons) == ENGINES[step]
    first = jsons[ENGINES[step][0]]
    assert first["zero_optimization"]["stage"] == 2 and first["train_micro_batch_size_per_gpu"] == 32
    assert done.stdout.count("(no network): org/") == 1
    assert done.stdout.endswith("dry run: nothing was started\n") and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize(
    ("ranks", "machines", "hardware"),
    [(4, "2 + 2", "2 x 2 x CPU"), (5, "2 + 2 + 1", "(2 + 2 + 1) x CPU"), (2, "", "2 x CPU")],
)
def test_a_rank_of_several_hosts_plans_all_of_them_and_says_so(tmp_path, ranks, machines, hardware):
    """It sees its own machine alone; torchrun tells how many ranks there are here, and in all."""
    folder = make_folder(tmp_path, num_train=8, num_test=4, num_documents=2)
    words = "--model-name-or-path base --data-path train.jsonl --max-seq-len 96 --output-dir out --explain".split()
    given = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    done = run_command("step1_sft", words, folder=folder, **given)
    assert f"\nplan of sft, on {hardware}, " in f"\n{done.stdout}" and f" x {ranks} ranks = " in done.stdout, (
        done.stderr
    )
    note = f"note: {ranks} ranks, 2 of them here: "
    assert " ".join(done.stdout.split()).startswith(note if machines else "plan of sft, ")


@pytest.mark.slow
def test_a_launch_script_starts_no_rank(tmp_path):
    words = ["--num-gpus", "2", "3", "--explain", "--actor-zero-stage", "1", *ON_THE_HUB[3]]
    done = dry_run(tmp_path / "empty", "bash", str(ROOT / "launch/single_node.sh"), *words)
    assert done.returncode == 3 and list(engine_jsons(done.stdout)) == ENGINES[3], done.stderr
    assert started(tmp_path) == [] and not list((tmp_path / "empty").iterdir())


def test_only_rank_0_prints(tmp_path):
    command = (tmp_path / "empty", 1, "--dry-run", *ON_THE_HUB[1])
    assert stage_dry_run(*command, RANK="1", WORLD_SIZE="2").stdout == ""
    assert "nothing was started" in stage_dry_run(*command, RANK="0", WORLD_SIZE="2").stdout


def test_settings_that_contradict_are_refused_in_one_line(tmp_path):
    done = stage_dry_run(tmp_path / "empty", 1, "--dry-run", "--zero-stage", 0, "--offload")
    assert done.code == 2 and done.stdout == ""
    assert done.stderr == naming("error: --offload ... 1, 2 or 3") and done.stderr.count("\n") == 1


def test_train_prints_the_same_for_each_stage(tmp_path):
    done = train(tmp_path, *TINY, "--explain")
    assert done.returncode == 0 and done.stdout.count("DeepSpeed JSON of the ") == 6
    short = train(tmp_path, *TINY, "--dry-run")
    commands_in_one_line = short.stdout.replace("\\\n", "")
    assert short.stdout.count("== stage ") == 3 and len(commands_in_one_line.splitlines()) < 12
    assert short.stdout.count("--dry-run") == short.stdout.count("--explain") == 0  # its commands start the stages
    asked_of_a_stage = train(tmp_path, *TINY, "--sft.dry-run")
    assert asked_of_a_stage.stdout.endswith("dry run: nothing was started\n") and started(tmp_path) == []


def test_a_task_of_srun_that_is_alone_says_what_to_do(tmp_path):
    command, variables = (tmp_path / "empty", 1, "--dry-run", *ON_THE_HUB[1]), {"SLURM_NTASKS": "4"}
    done = stage_dry_run(*command, SLURM_PROCID="0", **variables)
    assert done.code == 3 and done.stderr == naming("error: SLURM_NTASKS ... 4 ... run of one")
    assert "torchrun" in done.stderr and done.stderr.count("\n") == 1
    other = stage_dry_run(*command, SLURM_PROCID="1", **variables)
    assert (other.code, other.stderr) == (3, "")
    assert "not planned" in stage_dry_run(*command, RANK="0", WORLD_SIZE="4", **variables).stderr, "it is looked at"


@pytest.mark.parametrize("num_gpus", [1, 4])
def test_a_preset_keeps_its_batch_on_fewer_gpus(tmp_path, num_gpus):
    words = ("--actor-model", "1.3b", "--deployment-type", "single_node", "--num-gpus", str(num_gpus), "--explain")
    done = train(tmp_path, *words, gpus=4)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert rows.count(["per_device_train_batch_size", "auto", "default"]) == 3
    assert [row[1] for row in rows if row[:1] == ["gradient_accumulation_steps"]] == ["auto"] * 3, "it follows"
    assert ["rollout_batch_size", "0", "default"] in rows and ["generation_batches", "0", "default"] in rows
