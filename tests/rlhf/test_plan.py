"""`rlhf plan`: the cheapest way on each card, beside dry runs of the same command."""

import os
import re
import subprocess
import sys
import time

import pytest
from support.launch_stub import write_program
from support.messages import naming
from support.source_tree import ROOT
from transformers import AutoConfig

from pipeline.launching.target import DEVICES
from pipeline.planning import measurement
from rlhf.main import main

SMALL = ("--actor-model", "smollm2-135m", "--step", "1")


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """No device was measured, and bitsandbytes, which is optional, is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("pipeline.planning.changes.find_spec", lambda name: None)


def rows(printed: str) -> list[list[str]]:
    """The cells of the table below its head."""
    return [re.split(r"\s{2,}", line) for line in printed.splitlines()[1:] if not line.startswith("note: ")]


@pytest.mark.slow
def test_each_card_has_its_cheapest_way_and_the_configuration_is_read_once(monkeypatch, capsys):
    made = []
    for_model = AutoConfig.for_model
    monkeypatch.setattr(AutoConfig, "for_model", lambda **known: made.append(known) or for_model(**known))
    measurement.planned_config.cache_clear()
    measurement.build_shape.cache_clear()
    assert main(["plan", *SMALL, "--cards", "24GB", "RTX4090", "3GB", "1GB"]) == 0
    unknown, known, less, small = rows(capsys.readouterr().out)
    assert len(made) == 1
    assert unknown[:3] == ["24GB", "sft", "1"] and unknown[-1] == "as it is" and len(unknown) == 5
    assert known[:3] == ["RTX4090-24GB", "sft", "1"] and known[4].endswith(" s") and known[-1] == "as it is"
    assert less[:3] == ["3GB", "sft", "1"] and less[-1].startswith("--offload true")
    assert small[:3] == ["1GB", "sft", "1"] and small[-1].startswith("another training: ")


@pytest.mark.parametrize(
    "words, line",
    [
        (["--cards", "RTX9999"], "error: --target RTX9999 ... known are"),
        (["--target", "1xH100"], "error: --target ... --cards"),
    ],
)
def test_wrong_words_are_refused_in_one_line(capsys, words, line):
    assert main(["plan", *SMALL, *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error == naming(line)


def test_help_says_what_is_cheapest_and_what_else_it_takes(capsys):
    assert main(["plan", "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: rlhf plan [--cards CARD ...] [--FLAG VALUE ...]")
    assert "fewest GPUs (1, 2, 4 or 8)" in printed


@pytest.mark.slow
def test_25_cards_take_seconds(capsys):
    cards = [*DEVICES, *(f"{gib}GB" for gib in (8, 10, 12, 20, 28, 40, 64, 96, 128, 192))]
    began = time.process_time()
    words = ["--actor-model", "qwen3-8b", "--step", "1", "--sft.lora-dim", "16"]
    assert main(["plan", *words, "--cards", *cards]) == 0
    took, found = time.process_time() - began, rows(capsys.readouterr().out)
    assert [row[0] for row in found] == cards and len(found) == 25
    assert took < 60 and all(row[2] in "1248" for row in found)


@pytest.mark.slow
def test_a_plan_for_a_method_and_a_length_is_that_of_a_dry_run(tmp_path, capsys):
    """Longer answers take more memory and time, and the dry run of the same words says how much."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "What is 1 and 2?"}\n' * 8)
    given = ["--actor-model", "smollm2-135m", "--step", "3", "--method", "grpo", "--data-path", "d.jsonl"]
    given += ["--ppo.reward-function", "repetition", "--ppo.max-answer-seq-len"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = []
    for length in ("128", "1024"):
        assert main(["plan", *given, length, "--cards", "H100"]) == 0
        (row,) = rows(capsys.readouterr().out)
        assert row[:3] == ["H100-80GB", "ppo", "1"] and row[-1] == "as it is"
        command = [sys.executable, "-m", "rlhf", "train", *given, length, "--target", "H100", "--dry-run"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.stdout == naming(f"ppo ... fits ... {row[3]} to ... {row[4]}"), done.stdout + done.stderr
        assert f"answers of at most {length} tokens" in done.stdout
        found.append((float(row[3]), float(row[4].split()[0])))
    assert found[0][0] < found[1][0] and found[0][1] < found[1][1]


@pytest.mark.slow
def test_a_machine_without_a_gpu_gets_no_warning_of_deepspeed(tmp_path):
    """CUDA_VISIBLE_DEVICES hides what GPUs there are from torch, this nvidia-smi finds none."""
    write_program(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nexit 9\n")
    hidden = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"} | hidden
    command = [sys.executable, "-m", "rlhf", "plan", *SMALL, "--cards", "24GB"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and "accelerator" not in done.stdout + done.stderr
    assert done.stdout.startswith("card ")
