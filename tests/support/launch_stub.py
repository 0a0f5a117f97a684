"""Stand-ins for the programs that launch scripts start: Pythons that play ranks, and nvidia-smi."""

import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import forks
from support.command_run import as_process, ended, output_files

from pipeline.run.evaluations import row_values_line
from pipeline.run.layout import row_values_file
from rlhf.main import run_subcommand

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--actor-model", "tiny", "--reward-model", "tiny")

# Plays the Python of the environment but for the look at models and data: the tests of that have both. With $STUB_LOOK
# it is the code of that, which ends once a rank has started early, if that takes less than ten seconds.
PYTHON_STUB = """#!/bin/sh
if [ "$1 $2" = "-m rlhf.preflight" ]; then
    for _ in ${{STUB_LOOK:+$(seq 100)}}; do [ -e "$STUB_LOG.early" ] || sleep 0.1; done
    exit ${{STUB_LOOK:-0}}
fi
exec {python} "$@"
"""
# Each Python imports it at its start: one that is to be a rank becomes the stand-in.
SITE_STUB = """
import os, sys
words = [word for word in sys.orig_argv[1:] if word != "-u"]
if words[:1] == ["-m"] and "RANK" in os.environ:
    os.execv(sys.executable, [sys.executable, {stub!r}, *words[1:]])
"""
# Plays a rank. It notes its words; the first rank of a host does what $STUB_OUTCOMES wants: "0,0" are two ranks that
# write these codes ("null": none), "wait" is one rank that runs until SIGTERM.
RANK_STUB = """
import json, os, signal, socket, sys, time
from contextlib import suppress
from pathlib import Path

if os.environ.pop("RLHF_WAITS", ""):
    with open(os.environ["STUB_LOG"] + ".early", "a") as early:
        early.write(f"{os.getpid()}\\n")
    if not os.read(0, 1):
        sys.exit(75)
with open(os.environ["STUB_LOG"], "a") as log:
    log.write(json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}) + "\\n")
wanted = os.environ.get("STUB_OUTCOMES")
if wanted is None or os.environ["LOCAL_RANK"] != "0" or "--output-dir" not in sys.argv:
    sys.exit(0)
stage, *words = sys.argv[1:]
output = Path(words[len(words) - 1 - words[::-1].index("--output-dir") + 1])
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
    from pipeline.configuration.flag_table import flat_items
    from pipeline.errors import InputError
    from rlhf.stages import STAGES
    from pipeline.preparation.stage_entry import read_flags
    from pipeline.run.earlier_runs import input_contents, write_done

    (kind,) = [kind for kind in STAGES if kind.package + ".main" == stage]
    resolved = read_flags(kind, words)
    for model in models:
        model.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "training_config.json", "model.safetensors"):
            (model / name).write_text("{}" if name.endswith("json") else "")
    run_dir.mkdir(parents=True, exist_ok=True)
    record = {"stage": kind.section, "versions": {}, "num_ranks": len(codes)}
    (run_dir / "env.json").write_text(json.dumps(record))
    values = {name: {"value": value} | resolved.origins[name].entry for name, value in flat_items(resolved.config)}
    (run_dir / "config.json").write_text(json.dumps(values))
    inputs = {}
    with suppress(InputError):  # most tests have neither data nor models
        inputs = input_contents(resolved.config)
    steps = resolved.config.run.max_steps or 10
    write_done(run_dir, resolved.config, kind, steps=steps, ranks=len(codes), inputs=inputs)
for rank, code in enumerate(codes):
    write(rank, code)
sys.exit(int(os.environ.get("STUB_CODE", "0")))
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def nvidia_smi(gpus: int, held: Mapping[int, str]) -> str:
    """A stand-in for nvidia-smi: so many GPUs, of which some are held: number -> process, or "" for one unseen."""
    table = [f"{i}, GPU-{i}, {9000 if i in held else 3}, Disabled" for i in range(gpus)]
    apps = [f"GPU-{i}, {pid}" for i, pid in held.items() if pid]
    answers = {"--query-gpu=index*": table, "--query-compute-apps*": apps}
    answers["*"] = [f"GPU {i}: NVIDIA (UUID: GPU-{i})" for i in range(gpus)]
    cases = "\n".join(f"{words}) cat <<'END'\n{chr(10).join([*rows, 'END'])}\n;;" for words, rows in answers.items())
    return f"#!/bin/sh\ncase $1 in\n{cases}\nesac\n[ {gpus} -gt 0 ]\n"


def write_row_values(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the values of rows that the accuracies of these evaluations are means of: first ones, then zeros."""
    with row_values_file(run_dir).open("w", encoding="utf-8") as file:
        for line in lines:
            num_rows = line["eval_rows"]
            values = [float(n < round(line["eval_accuracy"] * num_rows)) for n in range(num_rows)]
            file.write(row_values_line(line["step"], {"eval_accuracy": values}, "rows"))


def stub_environment(
    folder: Path, *, gpus: int = 0, held: Mapping[int, str] | None = None, **more: str
) -> dict[str, str]:
    """An environment in which launch scripts meet the stubs; notes go to `folder`/log.jsonl. held: see `nvidia_smi`."""
    bin_dir = folder / "bin"
    python = write_program(bin_dir / "python", PYTHON_STUB.format(python=shlex.quote(sys.executable)))
    rank = write_program(folder / "site/rank.py", RANK_STUB)
    write_program(folder / "site/sitecustomize.py", SITE_STUB.format(stub=str(rank)))
    write_program(bin_dir / "nvidia-smi", nvidia_smi(gpus, held or {}))
    hidden = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "DS_ACCELERATOR", "PYTHONWARNINGS", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    path = f"{bin_dir}:{os.environ['PATH']}"
    stubs = {"PYTHON": str(python), "PYTHONPATH": str(folder / "site"), "STUB_LOG": str(folder / "log.jsonl")}
    return {**kept, "PATH": path, **stubs, **more}


def train(
    folder: Path, *words: str, gpus: int = 2, held: Mapping[int, str] | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """The finished process of `python train.py WORDS`, run in `folder`; forked, which is sooner than a fresh one."""
    files = output_files(folder)
    process = forks.start(train_child, words, folder, stub_environment(folder, gpus=gpus, held=held, **more), files)
    done = ended([process], files)
    return subprocess.CompletedProcess(words, done.code, done.stdout, done.stderr)


def train_child(words: Sequence[str], folder: Path, variables: dict[str, str], files: tuple[Path, Path]) -> None:
    """Do what train.py does; it never returns."""
    with as_process(folder, variables, files):
        sys.exit(run_subcommand("train", list(words), prog="python train.py"))


def started(folder: Path) -> list[list[str]]:
    """The module and the words of each start: of its first rank on a host, or of DeepSpeed's search."""
    return [note["argv"] for note in notes(folder) if note["environment"].get("LOCAL_RANK", "0") == "0"]


def notes(folder: Path) -> list[dict[str, Any]]:
    """What each stand-in has noted: its words (`argv`), its `environment` and its folder (`cwd`)."""
    log = folder / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


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
