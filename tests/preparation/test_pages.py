"""Dry runs as whole pages (`pages/`), each of which a person has read: what is printed, then the errors."""

import re
from pathlib import Path

import deepspeed  # noqa: F401  its first import prints a warning, which is no part of a page
import pytest
from support.in_process import look_in_process
from support.marks import of_tested_torch, rare_but
from support.source_tree import ROOT

from pipeline import hub
from pipeline.console import WIDTH
from rlhf import train

PAGES = Path(__file__).parent / "pages"
# Name of a page: the words of `rlhf train`; CARD is a GPU of 24 GB in a machine of 64 GiB.
CARD = "card.yaml"
CASES = {
    "fits": "--actor-model 125m --target 1xRTX4090 --max-steps 500",
    "explained": "--actor-model 125m --step 3 --explain --target 2xRTX4090 --max-steps 500",
    "optimizer_step": "--actor-model 350m --step 1 --explain --target 1xRTX4090 --sft.gradient-checkpointing true "
    "--sft.per-device-train-batch-size 1",
    "streamed": "--actor-model 13b --step 3 --target 8xRTX4090 --ppo.inference-tp-size 1",
    "whole": "--actor-model 13b --step 3 --target 8xRTX4090 --ppo.inference-tp-size 1 --ppo.rollout-weights whole",
    "smaller": "--actor-model 66b --step 3 --target 2x8xA100-40GB",
    "gives_way": "--actor-model qwen3-8b --lora-dim 16 --quantization int8 --target 1xRTX4090",
    "asked_for": "--actor-model qwen3-8b --lora-dim 16 --quantization int8 --actor-zero-stage 3 --target 1xRTX4090",
    "another_training": f"--actor-model qwen3-8b --step 3 --target {CARD}",
    "auto_fit": f"--actor-model qwen3-8b --step 3 --target {CARD} --auto fit",
}
QUICK = ("fits", "asked_for")


@of_tested_torch
@pytest.mark.parametrize(
    "name", [*QUICK, *rare_but(["explained", "whole"], [name for name in CASES if name not in QUICK])]
)
def test_a_dry_run_prints_a_page_that_a_person_has_read(name, tmp_path, monkeypatch, capsys):
    """No hub is reached, no device was measured, and bitsandbytes, which is optional, is not there."""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr("pipeline.preparation.preflight.is_reachable", lambda: False)
    monkeypatch.setattr("pipeline.planning.changes.find_spec", lambda name: None)
    look_in_process(monkeypatch)
    (tmp_path / "launch").symlink_to(ROOT / "launch")  # the working folder holds no model of an earlier run
    monkeypatch.setattr("rlhf.train_plan.path_from_here", lambda path: str(path.relative_to(ROOT)))
    text = "name: RTX4090\nmemory_gib: 23.6\nhost_memory_gib: 64\n"
    (tmp_path / CARD).write_text(text, encoding="utf-8")
    code = train.main(CASES[name].split(), prog="python train.py")
    printed, errors = capsys.readouterr()
    page, _, commands = printed.partition("\n== stage ")
    assert all(len(line) <= WIDTH for line in page.splitlines())
    shown = [line for line in commands.splitlines() if not re.match(r"  (DeepSpeed JSON|\w+) ", line)]
    actual = "\n".join([page, *(["== stage " + "\n".join(shown)] if shown else []), f"{errors}exit code {code}\n"])
    (tmp_path / "page.txt").write_text(actual, encoding="utf-8")
    read = PAGES / f"{name}.txt"
    assert actual == read.read_text(encoding="utf-8"), f"read {tmp_path}/page.txt, and copy it to {read} if it is right"
