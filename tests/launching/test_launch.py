"""The launch scripts: words and variables of the ranks that they start, for the three deployments."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.launch_stub import ROOT, notes, stub_environment, write_program
from support.marks import slow_but
from support.messages import naming

from pipeline.errors import InputError
from pipeline.launching.hosts import ranks_by_host
from pipeline.launching.request import parse_request
from rlhf.stages import NUMBERS, STAGES, stage_of, stages_of_method, word_of
from rlhf.train_plan import make_plan, ranks_of

MODULES = {"1": "step1_sft.main", "2": "step2_reward.main", "3": "step3_ppo.main", "dpo": "step3_dpo.main"}
STAGE_PACKAGES = [module.partition(".")[0] for module in MODULES.values()]
HARD_WORDS = ["a b", 'say "yes"', "it's", "$HOME `id` \\", "", "*", "a;b", "--data-output-path=x y"]

no_real_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


def launch(folder: Path, deployment: str, *words: str, gpus: int = 2, cwd: Path | None = None, **more: str) -> Any:
    """What each rank of `bash launch/<deployment>.sh WORDS` has noted, in the order of the ranks."""
    script = str(ROOT / "launch" / f"{deployment}.sh")
    environment = stub_environment(folder, gpus=gpus, **more)
    # The stub's ranks say nothing, so the supervisor calls it a fault.
    subprocess.run(["bash", script, *words], env=environment, check=False, timeout=60, cwd=cwd or folder)
    return sorted(notes(folder), key=lambda note: note["environment"]["RANK"])


def variables(note: Any, *names: str) -> list[str | None]:
    return [note["environment"].get(name) for name in names]


def checkout(folder: Path, *packages: str) -> Path:
    """A checkout in `folder` with launch scripts of its own and these packages of the project."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("pyproject.toml", *packages):
        (folder / name).symlink_to(ROOT / name)
    return folder


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("step", slow_but(["3", "ppo"], ["1", "2", "3", "ppo"]))
def test_single_gpu(tmp_path, step):
    (rank,) = launch(tmp_path, "single_gpu", step, "--seed", "1")
    assert rank["argv"] == [MODULES.get(step, "step3_ppo.main"), "--seed", "1"]
    assert variables(rank, *NAMES) == ["0", "0", "1", "1", "127.0.0.1", "0"]
    assert 1024 <= int(rank["environment"]["MASTER_PORT"]) <= 65535


def test_single_node_takes_all_gpus(tmp_path):
    ranks = launch(tmp_path, "single_node", "2")
    assert [variables(rank, *NAMES) for rank in ranks] == [
        [str(number), str(number), "2", "2", "127.0.0.1", "0,1"] for number in (0, 1)
    ]


def test_launcher_flags_come_before_the_step(tmp_path):
    flags = ("--num-gpus", "2", "--master-port=1234", "--module", "--no-python", "-q", "--log-level", "debug")
    flags += ("--enable-each-rank-log", "logs")
    ranks = launch(tmp_path, "single_node", *flags, "3", "--seed", "3")
    assert [rank["argv"] for rank in ranks] == [[MODULES["3"], "--seed", "3"]] * 2
    assert [variables(rank, "MASTER_PORT") for rank in ranks] == [["1234"]] * 2
    assert sorted(file.name[-10:] for file in (tmp_path / "logs").iterdir()) == ["_rank0.log", "_rank1.log"]


def run_script(folder: Path, *words: str, deployment: str = "single_node", **more: str) -> Any:
    """The finished process of a launch script."""
    environment = stub_environment(folder, **more)
    return subprocess.run(
        ["bash", str(ROOT / f"launch/{deployment}.sh"), *words], env=environment, cwd=folder, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


# Play ssh and srun: the last word is a shell's line, or all words after the flags are a command's.
SSH_STUB = '#!/bin/bash\nexec bash -c "${@: -1}"\n'
SRUN_STUB = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
SLURM_NTASKS=1 exec "$@"
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("launcher", slow_but(["ssh"], ["ssh", "srun"]))
def test_words_and_variables_reach_every_host(tmp_path, launcher):
    for name, text in (("ssh", SSH_STUB), ("srun", SRUN_STUB)):
        write_program(tmp_path / "bin" / name, text)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=a b\n")
    words = ["--data-path", *HARD_WORDS]
    flags = ["--launcher", launcher, "--hostfile", "hosts", "--master-addr", "here", "--exclude", "a:1"]
    flags += ["--enable-each-rank-log", str(tmp_path / "logs")]
    done = run_script(tmp_path, *flags, "1", *words, deployment="multi_node", NCCL_DEBUG="INFO", HOME=str(tmp_path))
    assert done.returncode == 1 and "before it had started" in done.stderr, "the stub's ranks say nothing"
    ranks = sorted(notes(tmp_path), key=lambda note: note["environment"]["RANK"])
    assert [rank["argv"] for rank in ranks] == [[MODULES["1"], *words]] * 3
    assert [variables(rank, *NAMES) for rank in ranks] == [
        ["0", "0", "3", "1", "here", "0"], ["1", "0", "3", "2", "here", "0,1"], ["2", "1", "3", "2", "here", "0,1"],
    ]  # fmt: skip
    assert sorted(file.name[-10:] for file in (tmp_path / "logs").iterdir()) == [f"_rank{n}.log" for n in range(3)]
    for rank in ranks:
        assert variables(rank, "NCCL_DEBUG", "FROM_FILE") == ["INFO", "a b"]
        assert 20000 <= int(rank["environment"]["MASTER_PORT"]) < 30000
        assert rank["environment"]["PYTHON_RUN_SUPERVISOR"].endswith(f"@{socket.gethostname()}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("launcher", "program", "reason"),
    [
        ("ssh", "", "ssh ... not installed"),
        ("srun", "", "srun ... not installed"),
        ("ssh", "exit 255", "255 ... `ssh far true` ... without a password"),
        ("srun", "exit 1", "srun ... 1 ... same path on each host"),
    ],
)
def test_a_host_that_cannot_be_reached_is_one_line(tmp_path, launcher, program, reason):
    """Where nothing is installed, the PATH has no ssh or srun."""
    for name in ("bash", "dirname"):
        (tmp_path / "path").mkdir(exist_ok=True)
        (tmp_path / "path" / name).symlink_to(str(shutil.which(name)))
    if program:
        write_program(tmp_path / "path" / launcher, f"#!{shutil.which('bash')}\n{program}\n")
    (tmp_path / "hosts").write_text("far slots=1\n")
    words = ("--launcher", launcher, "--hostfile", "hosts", "1", "--output-dir", "out")
    path = {"PATH": str(tmp_path / "path"), "PYTHON": sys.executable}
    done = run_script(tmp_path, *words, deployment="multi_node", **path)
    assert (done.returncode, done.stderr) == (3, naming(f"error: far: ... {reason}")) and notes(tmp_path) == []


@pytest.mark.parametrize("deployment", ["single_gpu", "single_node"])
def test_words_survive(tmp_path, deployment):
    given = ["--column-map", "two\nlines", "--data-path", *HARD_WORDS]
    assert launch(tmp_path, deployment, "1", *given, gpus=1)[0]["argv"] == [MODULES["1"], *given]


@pytest.mark.slow
def test_visible_devices_are_kept(tmp_path):
    (one,) = launch(tmp_path / "one", "single_gpu", "1", gpus=8, CUDA_VISIBLE_DEVICES="3,5")
    two = launch(tmp_path / "two", "single_node", "--num-gpus", "2", "1", gpus=8, CUDA_VISIBLE_DEVICES="3,5,7")
    assert variables(one, "CUDA_VISIBLE_DEVICES") == ["3"]
    assert [variables(rank, "CUDA_VISIBLE_DEVICES") for rank in two] == [["3,5"]] * 2
    lacking = run_script(tmp_path / "three", "--num-gpus", "3", "1", gpus=8, CUDA_VISIBLE_DEVICES="3,5")
    assert (lacking.returncode, lacking.stderr) == (
        3, naming("error: --num-gpus ... 3 ... 2 GPUs ... 2"),
    )  # fmt: skip


def test_include_replaces_the_count(tmp_path):
    (rank,) = launch(tmp_path, "single_gpu", "--include", "localhost:1", "1")
    assert variables(rank, "WORLD_SIZE", "CUDA_VISIBLE_DEVICES") == ["1", "1"]


def test_a_folder_of_the_callers_is_not_taken_for_a_package(tmp_path):
    for name in ("pipeline", "launch", "step1_sft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not the project')")
    assert launch(tmp_path, "single_gpu", "1")[0]["argv"]


def test_environment(tmp_path):
    (rank,) = launch(tmp_path, "single_gpu", "1", NCCL_DEBUG="INFO", PYTHONPATH=f"{tmp_path}/site:/mine")
    assert variables(rank, "PYTHONPATH", "PYTHONWARNINGS", "NCCL_DEBUG", "DS_ACCELERATOR", "OMP_NUM_THREADS") == [
        f"{ROOT}:{tmp_path}/site:/mine", "ignore::FutureWarning", "INFO", None, None,
    ]  # fmt: skip
    assert rank["cwd"] == str(tmp_path), "relative paths are the caller's"


def test_the_cpu_is_taken_where_it_is_asked_for(tmp_path):
    two = ("single_node", "--num-gpus", "2", "1")
    ranks = launch(tmp_path, *two, gpus=4, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="3")
    assert [variables(rank, "CUDA_VISIBLE_DEVICES", "WORLD_SIZE") for rank in ranks] == [[None, "2"]] * 2


@pytest.mark.slow
@no_real_gpu
def test_environment_without_gpu(tmp_path):
    ranks = launch(tmp_path / "two", "single_node", "--num-gpus", "2", "1", gpus=0, CUDA_VISIBLE_DEVICES="0")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in ranks:
        assert variables(rank, "DS_ACCELERATOR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES") == ["cpu", threads, None]
    (one,) = launch(tmp_path / "one", "single_gpu", "1", gpus=0, OMP_NUM_THREADS="7")
    assert variables(one, "OMP_NUM_THREADS") == ["7"]


RANKS = [
    (0, "single_node", (), 1),
    (0, "single_node", ("--num-gpus", "2"), 2),
    (2, "single_node", (), 2),
    (2, "single_gpu", (), 1),
    (4, "single_node", ("--exclude", "localhost:1"), 3),
]


@no_real_gpu
@pytest.mark.parametrize("gpus, deployment, words, ranks", RANKS)
def test_train_plans_as_many_ranks_as_the_launch_script_starts(tmp_path, monkeypatch, gpus, deployment, words, ranks):
    monkeypatch.setenv("PATH", stub_environment(tmp_path, gpus=gpus)["PATH"])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = make_plan(["--actor-model", "tiny", "--deployment-type", deployment, *words], prog="rlhf train")
    assert [ranks_of(plan)] == ranks_by_host(parse_request(deployment, [*words, "1"])) == [ranks]


def test_python_of_the_path(tmp_path):
    write_program(tmp_path / "bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert launch(tmp_path, "single_gpu", "1", gpus=1, PYTHON="")


def test_works_from_a_folder_with_spaces(tmp_path):
    copy = checkout(tmp_path / "my project", "pipeline", "rlhf", *STAGE_PACKAGES)
    script, environment = str(copy / "launch/single_gpu.sh"), stub_environment(tmp_path, gpus=1)
    subprocess.run(["bash", script, "1"], env=environment, cwd=tmp_path, check=False, timeout=60)
    (rank,) = notes(tmp_path)
    assert rank["environment"]["PYTHONPATH"].split(":")[0] == str(copy)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("4",), "STAGE ... '4' ... 1, 2 or 3"),
        (("--num-gpus", "1"), "STAGE ... 1, 2 or 3"),
        (("--launcher", "pdhs", "1"), "--launcher ... 'pdhs' ... ssh, srun or none"),
    ],
)
def test_wrong_words_of_the_launcher_end_in_its_usage(tmp_path, words, message):
    done = run_script(tmp_path, *words)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == naming(f"error: {message}")
    assert done.stderr.splitlines()[1].startswith("usage: bash launch/single_node.sh [")


def test_help_starts_nothing(tmp_path):
    done = run_script(tmp_path, "2", "--help-all")
    assert done.returncode == 0 and "--centering-coef" in done.stdout and not notes(tmp_path)


def test_wrong_flags_are_refused_before_anything_starts(tmp_path):
    done = run_script(tmp_path, "1", "--learning-rat", "1", gpus=1)
    assert done.returncode == 2 and not notes(tmp_path)
    assert done.stderr == naming("error: --learning-rat ... --learning-rate?")


def test_a_taken_port_is_found_at_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = time.monotonic()
        done = run_script(tmp_path, "--master-port", port, "1", gpus=1)
    assert done.returncode == 3 and done.stderr == naming(f"--master-port ... {port} ... already in use")
    assert not notes(tmp_path) and time.monotonic() - started < 3.0


def test_the_list_of_stages_says_what_each_is():
    assert [(word_of(stage), f"{stage.package}.main") for stage in STAGES] == list(MODULES.items())
    assert [stage.number for stage in STAGES] == [1, 2, 3, 3] and NUMBERS == (1, 2, 3)
    assert [stage.section for stage in stages_of_method("ipo").values()] == ["sft", "reward", "dpo"]
    assert stages_of_method("kto") == stages_of_method("dpo")
    assert [stage.section for stage in stages_of_method("ppo").values()] == ["sft", "reward", "ppo"]
    with pytest.raises(InputError, match=naming("os ... not a stage ... sft, reward, ppo, dpo")):
        stage_of("os")
    with pytest.raises(InputError, match=naming("--method ... 'orpo' ... ppo")):
        stages_of_method("orpo")
