"""Reports of real runs: of three stages by one command, by hand, on two ranks, resumed, failed and killed."""

import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from support import forks
from support.command_run import Command, run_command, run_until
from support.source_tree import ROOT
from support.tiny_run import make_folder, read_metrics

from pipeline.run.reporter import SWITCH
from rlhf.stages import STAGES

pytestmark = pytest.mark.slow

ON = {SWITCH: "true"}
SIZES = {"per_device_train_batch_size": 4, "dtype": "fp32", "data_split": "none", "lora_dim": 2}
LENGTHS: dict[str, dict[str, object]] = {
    "sft": {"max_seq_len": 96}, "reward": {"max_seq_len": 96}, "dpo": {"max_seq_len": 96},
    "ppo": {"max_prompt_seq_len": 48, "max_answer_seq_len": 8, "per_device_generation_batch_size": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("report-inputs"))


def words(stage: str, inputs: Path, **flags: object) -> list[str]:
    """The flags of a stage by hand, which starts from the models of `make_folder`."""
    starts = {"actor_model_name_or_path": inputs / "base", "critic_model_name_or_path": inputs / "scorer"}
    given = starts if stage == "ppo" else {"model_name_or_path": inputs / "base"}
    data = {"data_path": inputs / "train.jsonl", "eval_data_path": inputs / "test.jsonl", "data_split": "none"}
    output = {"output_dir": "output" if stage == "ppo" else f"output/{stage}", "max_steps": 2, "dtype": "fp32"}
    own = given | data | output | {"per_device_train_batch_size": 4} | LENGTHS[stage] | flags
    return [word for name, value in own.items() for word in (f"--{name}", str(value))]


def call(*command: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = forks.environment() | ON | {"PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def numbers(page: Path) -> dict[tuple[str, str, str], str]:
    """(run, metric, first or last) -> number of the table."""
    text = page.read_text(encoding="utf-8")
    pattern = r'data-run="([^"]+)" data-metric="([^"]+)" data-at="(\w+)" data-value="([^"]*)"'
    return {(run, metric, place): value for run, metric, place, value in re.findall(pattern, text)}


def check_numbers(page: Path, runs: dict[str, Path]) -> None:
    """The table has the first and the last evaluation of each run."""
    found = numbers(page)
    assert {run for run, _, _ in found} == set(runs)
    for (run, metric, place), value in found.items():
        lines = [line for line in read_metrics(runs[run]) if metric in line]
        assert float(value) == lines[0 if place == "first" else -1][metric] and len(lines) >= 2


def check_curves(folder: Path) -> None:
    """Each picture has pixels of a colour, which only curves have."""
    files = list((folder / "curves").glob("*.png"))
    assert files
    for file in files:
        pixels = matplotlib.image.imread(file)[..., :3]
        assert (np.ptp(pixels, axis=-1) > 0.4).sum() > 20, file


def test_three_stages_by_one_command_have_one_report_with_answers(inputs: Path, tmp_path: Path) -> None:
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    flags = SIZES | {"data_path": "train.jsonl", "eval_data_path": "test.jsonl", "max_steps": 2}
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    lengths = [w for stage in STAGES[:3] for name, value in LENGTHS[stage.section].items()
               for w in (f"--{stage.section}.{name}", str(value))]  # fmt: skip
    models = ["--actor-model", "base", "--reward-model", "base"]
    train = [sys.executable, str(ROOT / "train.py"), "--step", "1", "2", "3", *models, *given, *lengths]
    done = call(*train, folder=tmp_path)
    report, following = done.stdout.splitlines()[-2:]
    assert report == "report: output/report.html" and following.startswith("next: ")
    output = tmp_path / "output"
    check_numbers(output / "report.html", {stage.section: output / "runs" / stage.section for stage in STAGES[:3]})
    check_curves(output)
    assert not list(output.glob("runs/*/report.html")), "the road has it"
    text = (output / "report.html").read_text()
    assert text.count('<section class="step"') == 3 and "<td>--lora-dim</td><td>2</td>" in text
    (command,) = re.findall(r'<pre class="command">(python -m rlhf compare [^<]+)</pre>', text)
    python, *rest = shlex.split(html.unescape(command))
    call(sys.executable, *rest, "--max-new-tokens", "4", folder=tmp_path)
    assert (
        call(sys.executable, "-m", "rlhf", "report", "output", folder=tmp_path).stdout == "report: output/report.html\n"
    )
    text = (output / "report.html").read_text()
    assert "Win rate: how often" in text and "output/actor" in text and "rlhf compare" not in text


def test_a_launch_script_leaves_the_report_of_its_run(inputs: Path, tmp_path: Path) -> None:
    call("bash", str(ROOT / "launch" / "single_gpu.sh"), "1", *words("sft", inputs), folder=tmp_path)
    folder = tmp_path / "output" / "runs" / "sft"
    check_numbers(folder / "report.html", {"sft": folder})
    assert not (tmp_path / "output" / "report.html").exists()


def test_a_supervisor_whose_rank_dies_leaves_the_report(inputs: Path, tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "launch" / "single_gpu.sh"), "1", *words("sft", inputs, max_steps=500)]
    environment = forks.environment() | ON | {"PYTHON": sys.executable}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        folder, end = tmp_path / "output" / "runs" / "sft", time.monotonic() + 120
        while not (metrics := folder / "metrics.jsonl").is_file() or '"step": 3,' not in metrics.read_text():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        os.kill(json.loads((folder / "outcome" / "rank-0.json").read_text())["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "warning: no report" not in errors, errors
    text = (folder / "report.html").read_text()
    assert 'class="verdict bad"' in text and re.search(r"Died at step \d+ of 500 without an error", text)
    check_curves(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_supervisor_rank_0_leaves_the_report(inputs: Path, tmp_path: Path, ranks: int) -> None:
    done = run_command("step3_ppo", words("ppo", inputs), folder=tmp_path, ranks=ranks, **ON)
    assert done.code == 0, done.stderr
    folder = tmp_path / "output" / "runs" / "ppo"
    check_numbers(folder / "report.html", {"ppo": folder})
    check_curves(folder)
    text = (folder / "report.html").read_text()
    assert ("on 2 ranks" in text) == (ranks == 2) and "The same prompts through training" in text
    assert "warning" not in done.stderr


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "dpo"])
def test_a_flag_turns_the_report_off(inputs: Path, tmp_path: Path, stage: str) -> None:
    package = next(one.package for one in STAGES if one.section == stage)
    done = run_command(package, words(stage, inputs, report="false", max_steps=1), folder=tmp_path, **ON)
    assert done.code == 0 and (tmp_path / "output" / "runs" / stage / "meaning.json").is_file(), done.stderr
    assert not list(tmp_path.rglob("report.*")) and not list(tmp_path.rglob("curves"))


def test_a_stopped_run_that_is_resumed_has_the_report_of_both_parts(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "true")
    folder, given = tmp_path / "output" / "runs" / "sft", words("sft", inputs, max_steps=30)
    stopped = run_until("step1_sft", given, folder=tmp_path, metrics=folder / "metrics.jsonl", step=2)
    assert stopped.code == 75 and "Stopped on request at step" in (folder / "report.html").read_text(), stopped.stderr
    assert run_command("step1_sft", given, folder=tmp_path, **ON).code == 0
    text, steps = (folder / "report.html").read_text(), [line["step"] for line in read_metrics(folder)]
    (resumed,) = re.findall(r"Finished after 30 steps · resumed from step (\d+)", text)
    assert 2 <= int(resumed) < 30
    trained = [line["step"] for line in read_metrics(folder) if "step_s" in line]
    assert trained == list(range(1, 31)) and sorted(steps) == steps
    check_numbers(folder / "report.html", {"sft": folder})


def test_a_run_that_was_killed_at_its_first_checkpoint_has_curves(inputs: Path, tmp_path: Path) -> None:
    command = Command("step1_sft", words("sft", inputs, save_steps=1), tmp_path, 1, None, **ON)
    folder, (process,) = tmp_path / "output" / "runs" / "sft", command.processes
    end = time.monotonic() + 120
    while process.is_alive() and not list(folder.glob("checkpoints/*")) and time.monotonic() < end:
        time.sleep(0.002)
    process.kill()
    command.end()
    assert not (folder / "done.json").exists() and not (folder / "report.html").exists()
    call(sys.executable, "-m", "rlhf", "report", str(folder), folder=tmp_path)
    check_curves(folder)
    text = (folder / "report.html").read_text()
    assert 'class="verdict bad"' in text and "died at step" in text
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert all({"stage", "step", "time"} <= json.loads(line, parse_constant=fail).keys() for line in lines)


def fail(constant: str) -> Any:
    raise AssertionError(constant)
