"""The launch scripts: exact words for DeepSpeed's launcher, for the three deployments."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch_stub import ROOT, started, stub_environment, write_program
from support.marks import slow_but

from pipeline.errors import InputError
from pipeline.launching.machine import num_ranks
from pipeline.launching.plan import make_plan
from pipeline.run.outcome import RUN_DIR
from rlhf.train import STAGES as KINDS
from rlhf.train import ranks_of

MODULES = {"1": "step1_sft.main", "2": "step2_reward.main", "3": "step3_ppo.main"}
HARD_WORDS = ["a b", 'say "yes"', "it's", "$HOME `id` \\", "", "*", "a;b", "--data_output_path=x y"]

no_real_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


def launch(folder: Path, deployment: str, *words: str, gpus: int = 2, cwd: Path | None = None, **more: str):
    """(launcher's words, its environment) of `bash launch/<deployment>.sh WORDS`."""
    script = str(ROOT / "launch" / f"{deployment}.sh")
    environment = stub_environment(folder, gpus=gpus, **more)
    # The stub's ranks say nothing, so the supervisor calls it a fault.
    subprocess.run(["bash", script, *words], env=environment, check=False, timeout=60, cwd=cwd or folder)
    note = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    return note["argv"], note


def checkout(folder: Path, *packages: str) -> Path:
    """A checkout in `folder` with launch scripts of its own and these packages of the project."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    for name in ("pyproject.toml", *packages):
        (folder / name).symlink_to(ROOT / name)
    return folder


def without_port(words: list[str]) -> list[str]:
    """The words with the picked port checked and replaced."""
    place = words.index("--master_port") + 1
    assert 1024 <= int(words[place]) <= 65535
    return [*words[:place], "PORT", *words[place + 1 :]]


@pytest.mark.parametrize("step", slow_but(["3"], ["1", "2", "3"]))
def test_single_gpu(tmp_path, step):
    words, _ = launch(tmp_path, "single_gpu", step, "--seed", "1")
    assert without_port(words) == [
        "--log_level", "critical", "--hostfile", "/dev/null", "--master_port", "PORT", "--num_gpus", "1",
        "--no_local_rank", "--module", MODULES[step], "--seed", "1",
    ]  # fmt: skip


def test_single_node_takes_all_gpus(tmp_path):
    words, _ = launch(tmp_path, "single_node", "2")
    assert without_port(words)[4:] == ["--master_port", "PORT", "--no_local_rank", "--module", MODULES["2"]]


def test_launcher_flags_come_before_the_step(tmp_path):
    words, _ = launch(
        tmp_path, "single_node", "--num_gpus", "2", "--master_port=1234", "--save_pid", "3", "--seed", "3"
    )
    assert words == [
        "--log_level", "critical", "--hostfile", "/dev/null", "--master_port", "1234", "--save_pid", "--num_gpus", "2",
        "--no_local_rank", "--module", MODULES["3"], "--seed", "3",
    ]  # fmt: skip


def test_multi_node(tmp_path):
    (tmp_path / "my hosts").write_text("a slots=1\nb slots=1\n")
    common = ["--hostfile", "my hosts", "--no_local_rank", "--module", MODULES["3"], "--data_path", "a.jsonl:0.7"]
    given = ("--hostfile", "my hosts", "3", "--data_path", "a.jsonl:0.7")
    assert launch(tmp_path, "multi_node", *given)[0] == ["--launcher", "ssh", *common]
    assert launch(tmp_path, "multi_node", "--launcher=SRUN", *given)[0] == ["--launcher", "srun", *common]
    assert launch(tmp_path, "multi_node", "--no_ssh", "--node_rank", "1", *given)[0] == [
        "--launcher", "ssh", "--no_ssh", "--node_rank", "1", *common
    ]  # fmt: skip
    write_program(tmp_path / "bin/ssh", "#!/bin/sh\n")
    pdsh, _ = launch(tmp_path, "multi_node", "--launcher", "pdsh", *given)
    assert pdsh == ["--log_level", "critical", "--launcher", "pdsh", *common]


# Plays DeepSpeed's launcher of one host: notes the words and variables of the rank.
HOST_STUB = """import json, os, sys
names = ("PYTHON_RUN_SUPERVISOR", "NCCL_DEBUG", "FROM_FILE", "SLURM_NODEID")
variables = {name: os.environ.get(name) for name in names}
flags = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if word.startswith("--m") and "=" in word)
words = sys.argv[sys.argv.index("--module") + 2 :]
json.dump([words, variables, flags], open(os.environ.get("SLURM_NODEID", "0") + ".json", "w"))
"""
# Play ssh and srun: the last word is a shell's line, or all words after the flags are a command's.
SSH_STUB = '#!/bin/bash\nexec bash -c "${@: -1}"\n'
SRUN_STUB = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 != --nodelist=b ]] || node=1; shift; done
SLURM_NODEID=${node:-0} SLURM_NTASKS=1 exec "$@"
"""


@pytest.mark.parametrize("launcher", ["ssh", "srun"])
def test_words_and_variables_reach_every_host(tmp_path, launcher):
    environment = stub_environment(tmp_path, gpus=2, PYTHON=sys.executable, NCCL_DEBUG="INFO")
    write_program(tmp_path / "bin" / "ssh", SSH_STUB)
    write_program(tmp_path / "bin" / "srun", SRUN_STUB)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=a b\n")
    copy = checkout(tmp_path / "copy", "pipeline", "step1_sft")
    (copy / "deepspeed/launcher").mkdir(parents=True)
    for name, text in (("__init__", ""), ("launcher/__init__", ""), ("launcher/launch", HOST_STUB)):
        (copy / f"deepspeed/{name}.py").write_text(text)
    words = ["--data_path", *HARD_WORDS]
    flags = ["--launcher", launcher, "--hostfile", "hosts", "--master_addr", "here", "--exclude", "a:1", "1"]
    script = str(copy / "launch" / "multi_node.sh")
    done = subprocess.run(
        ["bash", script, *flags, *words], env=environment, cwd=tmp_path, check=False, timeout=90, capture_output=True
    )
    assert done.returncode == 1 and b"before any rank had started" in done.stderr, "the stub starts no ranks"
    for node in ("0", "1") if launcher == "srun" else ("0",):
        got, variables, master = json.loads((tmp_path / f"{node}.json").read_text())
        assert got == words and variables["NCCL_DEBUG"] == "INFO" and variables["FROM_FILE"] == "a b"
        assert master["master_addr"] == "here" and 20000 <= int(master["master_port"]) < 30000
        assert variables["PYTHON_RUN_SUPERVISOR"].endswith(f"@{socket.gethostname()}")


@pytest.mark.parametrize("deployment", ["single_gpu", "single_node"])
def test_words_survive(tmp_path, deployment):
    given = ["--column_map", "two\nlines", "--data_path", *HARD_WORDS]
    words, _ = launch(tmp_path, deployment, "1", *given)
    assert words[-len(given) :] == given


@pytest.mark.slow
def test_words_survive_pdsh(tmp_path):
    """Through the real DeepSpeed launcher and a pdsh that does what pdsh does: one shell line per host."""
    environment = stub_environment(tmp_path, gpus=2, PYTHON=sys.executable)
    own_flags = "while [[ $1 == -* ]]; do [[ $1 == -S ]] && shift || shift 2; done"
    write_program(tmp_path / "bin" / "pdsh", f'#!/bin/bash\n{own_flags}\nline="$*"\nbash -c "${{line//%n/0}}"\n')
    (tmp_path / "hosts").write_text("one slots=1\n")
    copy = checkout(tmp_path / "copy", "pipeline")
    stage = copy / "step1_sft"
    stage.mkdir()
    (stage / "__init__.py").touch()
    shutil.copy(ROOT / "step1_sft" / "config.py", stage)
    (stage / "main.py").write_text("import json, sys\njson.dump(sys.argv[1:], open('words.json', 'w'))\n")
    script = str(copy / "launch" / "multi_node.sh")
    flags = [
        "--launcher",
        "pdsh",
        "--hostfile",
        "hosts",
        "--no_ssh_check",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        "29517",
    ]
    words = ["--data_path", *HARD_WORDS]
    subprocess.run(["bash", script, *flags, "1", *words], env=environment, cwd=tmp_path, check=False, timeout=90)
    assert json.loads((tmp_path / "words.json").read_text()) == words


def test_visible_devices_are_kept(tmp_path):
    one, _ = launch(tmp_path, "single_gpu", "1", gpus=8, CUDA_VISIBLE_DEVICES="3,5")
    assert one[one.index("--include") + 1] == "localhost:3"
    two, _ = launch(tmp_path, "single_node", "--num_gpus", "2", "1", gpus=8, CUDA_VISIBLE_DEVICES="3,5,7")
    assert two[two.index("--include") + 1] == "localhost:3,5"
    assert "--num_gpus" not in one + two


def test_include_replaces_the_count(tmp_path):
    words, _ = launch(tmp_path, "single_gpu", "--include", "localhost:1", "1")
    assert "--num_gpus" not in words and words[words.index("--include") + 1] == "localhost:1"


def test_a_folder_of_the_callers_is_not_taken_for_a_package(tmp_path):
    for name in ("pipeline", "launch", "step1_sft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not the project')")
    assert launch(tmp_path, "single_gpu", "1")[1]["argv"]


def test_environment(tmp_path):
    _, note = launch(tmp_path, "single_gpu", "1", NCCL_DEBUG="INFO", PYTHONPATH="/mine")
    assert note["environment"]["PYTHONPATH"] == f"{ROOT}:/mine"
    assert note["environment"]["PYTHONWARNINGS"] == "ignore::FutureWarning"
    assert note["environment"]["NCCL_DEBUG"] == "INFO"
    assert note["environment"]["DS_ACCELERATOR"] is None and note["environment"]["OMP_NUM_THREADS"] is None
    assert note["cwd"] == str(tmp_path), "relative paths are the caller's"


def test_the_cpu_is_taken_where_it_is_asked_for(tmp_path):
    two = ("single_node", "--num_gpus", "2", "1")
    argv, note = launch(tmp_path, *two, gpus=4, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="3")
    assert note["environment"]["CUDA_VISIBLE_DEVICES"] is None
    assert argv[argv.index("--num_gpus") + 1] == "2" and "--include" not in argv


@no_real_gpu
def test_environment_without_gpu(tmp_path):
    _, note = launch(tmp_path, "single_node", "--num_gpus", "2", "1", gpus=0, CUDA_VISIBLE_DEVICES="0")
    cores = len(os.sched_getaffinity(0))
    assert note["environment"]["DS_ACCELERATOR"] == "cpu"
    assert note["environment"]["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert note["environment"]["CUDA_VISIBLE_DEVICES"] is None
    _, note = launch(tmp_path, "single_gpu", "1", gpus=0, OMP_NUM_THREADS="7")
    assert note["environment"]["OMP_NUM_THREADS"] == "7"


RANKS = [
    (0, "single_node", (), 1),
    (0, "single_node", ("--num_gpus", "2"), 2),
    (2, "single_node", (), 2),
    (2, "single_gpu", (), 1),
    (4, "single_node", ("--exclude", "localhost:1"), 3),
]


@no_real_gpu
@pytest.mark.parametrize("gpus, deployment, words, ranks", slow_but(RANKS[:1], RANKS))
def test_train_plans_as_many_ranks_as_the_launch_script_starts(tmp_path, monkeypatch, gpus, deployment, words, ranks):
    argv, _ = launch(tmp_path, deployment, *words, "1", gpus=gpus)
    if not gpus:  # else the launcher would take a process for each NUMA node
        assert argv[argv.index("--num_gpus") + 1] == str(ranks)
    monkeypatch.setenv("PATH", stub_environment(tmp_path, gpus=gpus)["PATH"])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = make_plan(["--actor-model", "tiny", "--deployment-type", deployment, *words], KINDS, prog="rlhf train")
    assert ranks_of(plan) == num_ranks(argv) == ranks


def test_python_of_the_path(tmp_path):
    environment = stub_environment(tmp_path, gpus=1)
    del environment["PYTHON"]
    script = str(ROOT / "launch/single_gpu.sh")
    subprocess.run(["bash", script, "1"], env=environment, cwd=tmp_path, check=False, timeout=60)
    assert (tmp_path / "log.jsonl").exists()


def test_works_from_a_folder_with_spaces(tmp_path):
    copy = checkout(tmp_path / "my project", "pipeline", "step1_sft")
    environment = stub_environment(tmp_path, gpus=1)
    script = str(copy / "launch/single_gpu.sh")
    subprocess.run(["bash", script, "1"], env=environment, cwd=tmp_path, check=False, timeout=60)
    note = json.loads((tmp_path / "log.jsonl").read_text())
    assert note["environment"]["PYTHONPATH"].split(":")[0] == str(copy)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "STEP: found none"),
        (("4",), "STEP: found '4', wanted 1, 2 or 3"),
        (("--num_gpus", "1"), "STEP: found none"),
        (("--num_gpus",), "--num_gpus: found no value"),
        (("--num_gpus", "0", "1"), "--num_gpus: found '0', wanted a number from 1 on"),
        (("sft", "--seed", "1"), "STEP: found 'sft'"),
        (("--launcher", "pdhs", "1"), "--launcher: found 'pdhs', wanted ssh, srun, pdsh or another one of DeepSpeed's"),
        (("--master_port", "abc", "1"), "--master_port: found 'abc', wanted 0 to 65535"),
        (("--master_port", "65536", "1"), "--master_port: found '65536', wanted 0 to 65535"),
        (("1", "--seed", "1", "--num_gpus", "2"), "--num_gpus: found behind STEP, wanted before it"),
        (("1", "--include=a:0"), "--include=a:0: found behind STEP"),
        (("--zero_stage", "2", "1"), "--zero_stage: not a flag of the launcher; those of the stage follow STEP"),
        (("--autotuning", "tume", "1"), "--autotuning: found 'tume', wanted tune or run"),
    ],
)
def test_wrong_step(tmp_path, words, message):
    done = subprocess.run(
        ["bash", str(ROOT / "launch/single_node.sh"), *words],
        env=stub_environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr and "usage: bash launch/single_node.sh" in done.stderr


def test_help_needs_no_launcher(tmp_path):
    script = str(ROOT / "launch/single_node.sh")
    environment = stub_environment(tmp_path)
    done = subprocess.run(
        ["bash", script, "2", "--help"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "--centering_coef" in done.stdout and not (tmp_path / "log.jsonl").exists()


def test_flags_without_value_are_those_of_the_installed_launcher():
    from deepspeed.launcher import runner

    source = Path(runner.__file__).read_text()
    parser_source = source[source.index("def parse_args") : source.index("def fetch_hostfile")]
    blocks = parser_source.split("add_argument(")[1:]
    switches = {b.split('"')[1 if '"-q"' not in b else 3] for b in blocks if "store_true" in b}
    script = (ROOT / "launch" / "_run.sh").read_text()
    assert switches == {"--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi",
                        "--save_pid", "--bind_cores_to_rank", "--quiet"}  # fmt: skip
    assert all(switch in script for switch in switches)
    named = {name for block in blocks for name in re.findall(r'"(-[-\w]+)"', block)}
    assert all(re.search(rf"(?<![-\w]){name}\b", script) for name in named), "the script refuses all others"


@pytest.mark.parametrize(
    ("words", "rc", "message"),
    [
        (("--ssh_port", "x"), 2, "error: --ssh_port: invalid int value: 'x'\n"),
        (("--launcher", "srun"), 3, "error: far: needs srun, which is not installed on this machine\n"),
        (("--launcher", "ssh"), 3, "error: far: needs ssh, which is not installed on this machine\n"),
    ],
)
def test_what_reaches_the_hosts_is_looked_at_before(tmp_path, words, rc, message):
    (tmp_path / "hosts").write_text("far slots=1\n")
    command = ["-m", "pipeline.launching.host_launcher", *words, "--hostfile", "hosts", "--module", "step1_sft.main"]
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT), RUN_DIR: str(tmp_path)}
    (tmp_path / "run.lock").write_text("{}")
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (rc, message)


@pytest.mark.parametrize(
    ("launcher", "program"),
    [("pdsh", "pdsh"), ("openmpi", "ompi_info"), ("mpich", "mpirun"), ("impi", "mpirun"), ("mvapich", "mpiname"),
     ("slurm", "sinfo")],
)  # fmt: skip
def test_the_missing_program_of_a_launcher_is_named(tmp_path, launcher, program):
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    script = str(ROOT / "launch/multi_node.sh")
    done = subprocess.run(
        ["bash", script, "--launcher", launcher, "--hostfile", "hosts", "1"], env={"PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    wanted = f"error: --launcher {launcher}: {program} is not installed on this machine; install its package"
    assert done.stderr.startswith(wanted)


def test_a_first_host_out_of_reach_is_one_line(tmp_path):
    environment = stub_environment(tmp_path)
    write_program(tmp_path / "bin/pdsh", "#!/bin/sh\n")
    write_program(tmp_path / "bin/ssh", '#!/bin/sh\nprintf "%s " "$@" >>asked\nexit 255\n')
    (tmp_path / "hosts").write_text("far slots=1\nother slots=1\n", encoding="utf-8")
    words = "--launcher pdsh --ssh_port 2222 --hostfile hosts 1 --model_name_or_path base --output_dir out".split()
    done = subprocess.run(
        ["bash", str(ROOT / "launch/multi_node.sh"), *words], env=environment, cwd=tmp_path, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        3, "error: host far: not reachable by ssh; `ssh far true` must work without a password\n",
    )  # fmt: skip
    assert (tmp_path / "asked").read_text() == "-o PasswordAuthentication=no -p 2222 far hostname "
    assert started(tmp_path) == []


def test_wrong_flags_are_refused_before_anything_starts(tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "launch/single_gpu.sh"), "1", "--learning_rat", "1"],
        env=stub_environment(tmp_path, gpus=1), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "log.jsonl").exists()
    assert done.stderr == "error: --learning_rat: unknown flag; did you mean --learning_rate?\n"


def test_a_taken_port_is_found_at_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        started = time.monotonic()
        done = subprocess.run(
            ["bash", str(ROOT / "launch/single_gpu.sh"), "--master_port", port, "1"],
            env=stub_environment(tmp_path, gpus=1), cwd=tmp_path, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 3 and f"--master-port: {port}: Address already in use" in done.stderr
    assert not (tmp_path / "log.jsonl").exists() and time.monotonic() - started < 3.0


def test_the_supervisor_knows_the_stages(tmp_path):
    """It names them, since nothing in pipeline/ imports them."""
    from pipeline.launching.job import STAGES, stage_flags

    assert list(STAGES) == list(MODULES.values())
    for module, kind in zip(STAGES, KINDS.values(), strict=True):
        resolved, section = stage_flags(module, [])
        assert type(resolved.config) is kind.config_class and section == kind.section
    with pytest.raises(InputError, match="os: not a stage"):
        stage_flags("os", [])
