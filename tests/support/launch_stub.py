"""Stand-ins for the programs that launch scripts start: a Python that plays DeepSpeed's launcher, and nvidia-smi."""

import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support import forks
from support.command_run import as_process, ended, output_files

from rlhf.main import run_subcommand

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--actor-model", "tiny", "--reward-model", "tiny")

# Plays `python -m deepspeed.launcher.runner` or our launcher of hosts.
# It notes its words, then what $STUB_OUTCOMES wants: "0,0" are two ranks that
# write these codes ("null": none), "wait" is one rank that runs until SIGTERM. A search (--autotuning)
# finds $STUB_TUNED. Everything else goes to the real Python.
PYTHON_STUB = """#!/bin/sh
case "$1 $2" in
    "-m pipeline.launching.preflight_job") exit 0 ;;  # the tests of it have data and models
    "-m deepspeed.launcher.runner" | "-m pipeline.launching.host_launcher") exec {python} "$0.py" "$@" ;;
    *) exec {python} "$@" ;;
esac
"""
LAUNCHER_STUB = """
import json, os, signal, socket, sys, time
from contextlib import suppress
from pathlib import Path

names = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONWARNINGS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG")
environment = {name: os.environ.get(name) for name in names}
with open(os.environ["STUB_LOG"], "a") as log:
    log.write(json.dumps({"argv": sys.argv[3:], "environment": environment, "cwd": os.getcwd()}) + "\\n")
if "--autotuning" in sys.argv:
    if "STUB_TUNED" in os.environ:
        Path("autotuning_results").mkdir()
        Path("autotuning_results/ds_config_optimal.json").write_text(os.environ["STUB_TUNED"])
    sys.exit(0)
wanted = os.environ.get("STUB_OUTCOMES")
if wanted is None:
    sys.exit(0)
words = sys.argv[3:]
output = Path(words[len(words) - 1 - words[::-1].index("--output_dir") + 1])
stage = words[words.index("--module") + 1]
run_dir = output / "runs/ppo" if stage == "step3_ppo.main" else output.parent / "runs" / output.name
models = [output / "actor", output / "critic"] if stage == "step3_ppo.main" else [output]


def write(rank, code):
    folder = run_dir / "outcome"
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "rank": rank, "code": code, "message": "stub", "secondary": False, "halved": {}, "pid": os.getpid(),
        "host": socket.gethostname(), "supervisor": os.environ["PYTHON_RUN_SUPERVISOR"], "time": time.time(),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


if wanted.startswith("wait"):
    stop = []
    if wanted == "wait":
        signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write(0, None)
    while not stop:
        time.sleep(0.05)
    time.sleep(0.7)
    write(0, 75)
    sys.exit(1)
codes = json.loads(f"[{wanted}]")
if codes and set(codes) == {0}:
    from pipeline.errors import InputError
    from pipeline.launching.job import stage_flags
    from pipeline.run.earlier_runs import input_contents, write_done

    resolved, section = stage_flags(stage, words[words.index("--module") + 2 :])
    for model in models:
        model.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "training_config.json", "model.safetensors"):
            (model / name).write_text("{}" if name.endswith("json") else "")
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "env.json").write_text(json.dumps({"stage": section}))
    inputs = {}
    with suppress(InputError):  # most tests have neither data nor models
        inputs = input_contents(resolved.config)
    steps = resolved.config.run.max_steps or 10
    write_done(run_dir, resolved.config, section, steps=steps, ranks=len(codes), inputs=inputs)
for rank, code in enumerate(codes):
    write(rank, code)
sys.exit(int(os.environ.get("STUB_CODE", "0")))
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def stub_environment(folder: Path, *, gpus: int = 0, **more: str) -> dict[str, str]:
    """An environment in which launch scripts meet the stubs; notes go to `folder`/log.jsonl."""
    bin_dir = folder / "bin"
    python = write_program(bin_dir / "python", PYTHON_STUB.format(python=shlex.quote(sys.executable)))
    write_program(bin_dir / "python.py", LAUNCHER_STUB)
    listing = "\n".join(f"echo 'GPU {i}: NVIDIA (UUID: GPU-{i})'" for i in range(gpus))
    write_program(bin_dir / "nvidia-smi", f"#!/bin/sh\n{listing}\n[ {gpus} -gt 0 ]\n")
    hidden = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DS_ACCELERATOR", "PYTHONWARNINGS", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = f"{bin_dir}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHON": str(python), "STUB_LOG": str(folder / "log.jsonl"), **more}


def train(folder: Path, *words: str, gpus: int = 2, **more: str) -> subprocess.CompletedProcess[str]:
    """The finished process of `python train.py WORDS`, run in `folder`; forked, which is sooner than a fresh one."""
    files = output_files(folder)
    process = forks.start(train_child, words, folder, stub_environment(folder, gpus=gpus, **more), files)
    done = ended([process], files)
    return subprocess.CompletedProcess(words, done.code, done.stdout, done.stderr)


def train_child(words: Sequence[str], folder: Path, variables: dict[str, str], files: tuple[Path, Path]) -> None:
    """Do what train.py does; it never returns."""
    with as_process(folder, variables, files):
        sys.exit(run_subcommand("train", list(words), prog="python train.py"))


def started(folder: Path) -> list[list[str]]:
    """The words of each launcher that was started; a picked port is cut out."""
    log = folder / "log.jsonl"
    calls = [json.loads(line)["argv"] for line in log.read_text().splitlines()] if log.exists() else []
    return [words[words.index("--num_gpus") if "--num_gpus" in words else 0 :] for words in calls]


def make_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("")


def processor_seconds(code: str) -> tuple[float, str]:
    """(seconds of processor time of `python -c CODE` in the project's folder, its output).

    Not of the clock: other tests and whoever shares the machine make a run wait.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout
