"""`--show-data N`, by a stage's own command and by train.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_run import run_command
from support.launch_stub import ROOT
from support.messages import naming
from support.tiny_run import make_folder, write_lines
from transformers import PreTrainedModel

LENGTHS = re.compile(r"tokens: ((?:\d+ % \d+, )+)longest (\d+), limit (\d+)")
CODES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and 40 pairs of which 8 are cut in stage 1, and 4 are dropped."""
    folder = make_folder(tmp_path_factory.mktemp("page"), num_train=8, num_test=4, num_documents=2)
    rows = [{"prompt": f"p {n}?", "chosen": "word " * (200 if n < 8 else 3), "rejected": "bad"} for n in range(40)]
    write_lines(folder / "rows.jsonl", [*rows, *({"prompt": " ", "chosen": "a", "rejected": "b"},) * 4])
    return folder


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("weights are loaded")


def refuse_weights() -> None:
    PreTrainedModel.from_pretrained = refuse


def words(folder: Path, *more: str) -> list[str]:
    data = ["--data-path", "rows.jsonl", "--eval-fraction", "0", "--data-output-path", str(folder / "cache")]
    return ["--model-name-or-path", "base", *data, "--output-dir", "out/sft", *more]


def test_a_page_of_a_stage_loads_no_weights_and_starts_nothing(folder):
    before = {path.name for path in folder.iterdir()}
    command = words(folder, "--max-seq-len", "60", "--show-data", "3")
    done = run_command("step1_sft", command, folder=folder, first=refuse_weights)
    assert done.code == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert text == naming("sft rows: 40 to train on ... 0 held out, 4 dropped, of 44 ... 8 cut")
    assert text == naming("sft rows: 20.0% cut, 9.1% dropped")
    shares, longest, limit = LENGTHS.search(text).groups()
    numbers = dict(map(int, pair.split(" % ")) for pair in shares.removesuffix(", ").split(", "))
    assert (int(longest), int(limit), numbers[95], numbers[99]) == (60, 60, 60, 60) and numbers[50] < 60
    titles = re.findall(r"^sft row (.*): ", done.stdout, re.MULTILINE)
    assert titles == ["1 (truncated)", "14", "27"]
    assert max(map(len, done.stdout.splitlines())) <= 80 and "\x1b" not in done.stdout
    assert {path.name for path in folder.iterdir()} - before == {"cache"}


def test_colour_changes_no_other_byte(folder):
    command = words(folder, "--show-data", "2")
    plain, coloured = (run_command("step1_sft", command, folder=folder, FORCE_COLOR=on) for on in ("", "1"))
    assert CODES.search(coloured.stdout) and CODES.sub("", coloured.stdout) == plain.stdout
    never = run_command("step1_sft", command, folder=folder, FORCE_COLOR="1", NO_COLOR="1")
    assert never.stdout == plain.stdout


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["1", "1 2 3"])
def test_train_shows_the_rows_of_its_stages(folder, steps):
    """Stage 3 reads the tokens of a model that stage 1 is still to make."""
    before = {path.name for path in folder.iterdir()} | {"cache"}
    models = ("--actor-model", "base", "--reward-model", "base", "--data-path", "rows.jsonl")
    flags = ("--step", *steps.split(), *models, "--data-output-path", str(folder / "cache"), "--show-data", "1")
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(sft|reward|ppo) row 1.*: \d+ tokens$", done.stdout, re.MULTILINE)
    assert found == ["sft", "reward", "ppo"][: len(steps.split())]
    assert {path.name for path in folder.iterdir()} <= before
