"""A reader that goes away (`| head`, a closed terminal) neither shows a traceback nor ends a run; nor does Ctrl-C."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from input_calls import make_inputs, stage_words
from support.launch_stub import ROOT, TINY, started, stub_environment, write_program
from support.marks import slow, slow_but
from support.messages import naming


def unread(
    folder: Path, *command: str, both: bool = False, terminal: bool = False, **more: str
) -> subprocess.Popen[bytes]:
    """Start a command whose standard output (and error, with `both`), a pipe or terminal, nobody reads any more."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={
            **stub_environment(folder, gpus=1, **more),
            "PYTHONPATH": f"{folder / 'site'}:{ROOT}",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
    )
    os.close(writer)
    return process


@pytest.mark.parametrize(
    "words",
    [
        (str(ROOT / "train.py"), "--help"),
        (str(ROOT / "train.py"), *TINY, "--dry-run"),
        (str(ROOT / "chat.py"), "--help"),
        ("-m", "rlhf", "--help"),
        ("-m", "step1_sft.main", "--help"),
        slow((("-m", "step1_sft.main", "--dry-run", "--model-name-or-path", "facebook/opt-125m"),)),
    ],
    ids=" ".join,
)
def test_what_is_printed_may_be_cut_off(tmp_path, words):
    process = unread(tmp_path, *words)
    stderr = process.communicate(timeout=60)[1]
    assert (process.returncode, stderr) == (0, b"")


def test_what_is_printed_may_go_to_a_terminal_that_was_closed(tmp_path):
    process = unread(tmp_path, str(ROOT / "chat.py"), "--help", terminal=True)
    stderr = process.communicate(timeout=60)[1]
    assert (process.returncode, stderr) == (0, b"")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `base` and `judge`, and data."""
    return make_inputs(tmp_path_factory.mktemp("console"))


def commands(folder: Path, out: Path) -> dict[str, list[str]]:
    base, limit = str(folder / "base"), ["--max-new-tokens", "2"]
    pairs = ["--data-path", str(folder / "train.jsonl"), "--eval-fraction", "1", "--max-seq-len", "96"]
    return {
        "chat": [str(ROOT / "chat.py"), base, "--prompt", "Who?", *limit],
        "rlhf chat": ["-m", "rlhf", "chat", base, "--prompt", "Who?", *limit],
        "compare": [str(ROOT / "prompt_eval.py"), base, base, *limit],
        "evaluation": ["-m", "step2_reward.eval", str(folder / "judge"), *pairs],
        "export": ["-m", "rlhf", "export", base, "--dtype", "int8", "--output", str(out / "int8")],
        "dry run": [
            *(str(ROOT / "train.py"), "--step", "1", "--dry-run", "--actor-model", base, "--reward-model", base),
            *pairs[:2],
            "--max-seq-len",
            "96",
        ],
        "rlhf --help": ["-m", "rlhf", "--help"],
    }


LEADS = {
    ">/dev/full": "error: standard output ... No space left on device",
    ">&-": "error: standard output is closed ... /dev/null",
    "| head -c 0": "",  # a reader that goes at once
}
NAMES = ("chat", "rlhf chat", "compare", "evaluation", "export", "rlhf --help")
QUICK = [("dry run", ">/dev/full"), ("chat", ">/dev/full"), *(("rlhf --help", lead) for lead in LEADS)]


@pytest.mark.parametrize(("name", "lead"), slow_but(QUICK, [*product(NAMES, LEADS), ("dry run", ">/dev/full")]))
def test_output_that_cannot_be_written_is_one_line_and_without_a_reader_none(model, tmp_path, name, lead):
    command = f"set -o pipefail; {shlex.join([sys.executable, *commands(model, tmp_path)[name]])} {lead}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    needed = "" if name == "rlhf --help" else LEADS[lead]
    assert (done.returncode, [line for line in done.stderr.splitlines(True) if "answers in" not in line]) == (
        3 if needed else 0, [naming(needed)] if needed else [],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lead", [">/dev/full 2>/dev/full", ">&- 2>&-", "2>&- >/dev/full"])
def test_a_run_goes_on_where_nothing_can_be_printed(model, tmp_path, lead):
    words = shlex.join(map(str, stage_words("sft", model, tmp_path)))
    command = f"{shlex.quote(sys.executable)} -m step1_sft.main {words} {lead}"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    assert (
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=variables, timeout=120, check=False).returncode == 0
    )
    run = tmp_path / "runs" / "model"
    assert "checkpoint step-1" in (run / "log.txt").read_text() and '"step": 1' in (run / "metrics.jsonl").read_text()
    assert json.loads((run / "config.json").read_text()) and json.loads((run / "outcome/rank-0.json").read_text())


@pytest.mark.slow
def test_a_run_goes_on_without_its_console(tmp_path):
    words = (str(ROOT / "train.py"), *TINY, "--step", "1", "2")
    process = unread(tmp_path, *words, both=True, STUB_OUTCOMES="0,0")
    assert process.wait(60) == 0 and len(started(tmp_path)) == 2


@pytest.mark.slow
def test_a_run_without_a_console_stops_in_order(tmp_path):
    words = (str(ROOT / "train.py"), *TINY, "--step", "1")
    process = unread(tmp_path, *words, both=True, STUB_OUTCOMES="wait")
    outcome, end = tmp_path / "output/runs/sft/outcome/rank-0.json", time.monotonic() + 30
    while not outcome.exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75


@pytest.mark.parametrize(
    "program",
    [
        "train",
        "chat",
        "compare",
        "init",
        "report",
        "models.convert",
        "models.export",
        "models.merge",
        "rewards.reward",
        "rewards.sample",
        "main",
    ],
)
def test_a_program_runs_as_a_module(program):
    """Also where there is no PATH."""
    command = [sys.executable, "-m", f"rlhf.{program}", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PATH"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and f"usage: python -m rlhf.{program}" in done.stdout


@pytest.mark.parametrize(
    "command", [("train.py", "--dry-run"), ("chat.py", "x"), ("bash", "launch/single_gpu.sh", "1")]
)
def test_a_python_without_the_environment_is_told_in_one_line(tmp_path, command):
    bare = write_program(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    words = command if command[0] == "bash" else (str(bare), *command)
    environment = {**os.environ, "PYTHON": str(bare)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert done.stderr.replace(sys.executable, str(bare)) == naming(f"for {bare} ... activate the environment")


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("train.py",), "pydantic"),
        (("chat.py",), "pydantic"),
        (("prompt_eval.py",), "pydantic"),
        (("-m", "rlhf", "chat"), "pydantic"),
        (("-m", "step2_reward.eval"), "pydantic"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_ctrl_c_while_a_command_is_imported_shows_no_traceback(tmp_path, words, module):
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["start", "dry run"])
def test_ctrl_c_before_the_first_stage_is_one_line(tmp_path, more):
    """A terminal sends SIGINT to the whole group, also to the process that looks at models and data."""
    code = "import pathlib, time\npathlib.Path('looking').touch()\ntime.sleep(20)\n"
    python = write_program(tmp_path / "slow_python", f"#!{sys.executable}\n{code}")
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *TINY, *more],
        cwd=tmp_path,
        env=stub_environment(tmp_path, PYTHON=str(python)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    end = time.monotonic() + 30
    while not (tmp_path / "looking").exists() and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    # A launch script that was asked to end while it begins waits for its Python, on a busy machine.
    stderr = process.communicate(timeout=60)[1]
    assert (process.returncode, stderr) == (75, b"stopped before the first stage; nothing was started\n")
    assert started(tmp_path) == []
