"""A reader that goes away (`| head`, a closed terminal) neither shows a traceback nor ends a run; nor does Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch_stub import ROOT, TINY, started, stub_environment, write_program
from support.marks import slow


def unread(folder: Path, *command: str, both: bool = False, **more: str) -> subprocess.Popen[bytes]:
    """Start a command whose standard output (and error, with `both`) nobody reads any more."""
    reader, writer = os.pipe()
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
        slow((("-m", "step1_sft.main", "--dry-run", "--model_name_or_path", "facebook/opt-125m"),)),
    ],
    ids=" ".join,
)
def test_what_is_printed_may_be_cut_off(tmp_path, words):
    process = unread(tmp_path, *words)
    stderr = process.communicate(timeout=60)[1]
    assert (process.returncode, stderr) == (0, b"")


def test_a_run_goes_on_without_its_console(tmp_path):
    words = (str(ROOT / "train.py"), *TINY, "--step", "1", "2")
    process = unread(tmp_path, *words, both=True, STUB_OUTCOMES="0,0")
    assert process.wait(60) == 0 and len(started(tmp_path)) == 2


def test_a_run_without_a_console_stops_in_order(tmp_path):
    words = (str(ROOT / "train.py"), *TINY, "--step", "1")
    process = unread(tmp_path, *words, both=True, STUB_OUTCOMES="wait")
    outcome, end = tmp_path / "output/runs/sft/outcome/rank-0.json", time.monotonic() + 30
    while not outcome.exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 75


@pytest.mark.parametrize("program", ["train", "chat", "compare", "convert", "export", "merge", "main"])
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
    assert f" is not installed for {bare}; activate the environment" in done.stderr.replace(sys.executable, str(bare))


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


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["start", "dry run"])
def test_ctrl_c_before_the_first_stage_is_one_line(tmp_path, more):
    """A terminal sends SIGINT to the whole group, also to the process that looks at models and data."""
    code = "import pathlib, time\npathlib.Path('looking').touch()\ntime.sleep(30)\n"
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
    stderr = process.communicate(timeout=30)[1]
    assert (process.returncode, stderr) == (75, b"stopped before the first stage; nothing was started\n")
    assert started(tmp_path) == []
