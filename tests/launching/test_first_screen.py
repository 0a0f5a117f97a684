"""The help of every command: one fast screen, all flags behind --help-all; and colours of errors."""

import os
import pty
import re
import subprocess
import sys

import pytest
from support.launch_stub import ROOT, processor_seconds
from support.messages import naming

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import parse
from pipeline.configuration.help import help_text
from rlhf.main import SUBCOMMANDS, run_subcommand
from rlhf.stages import STAGES, stage_of
from rlhf.train_config import TrainConfig, train_help
from rlhf.train_plan import make_plan
from step1_sft.config import SFTConfig

HEAVY = {"torch", "deepspeed", "transformers", "datasets", "peft", "numpy", "pyarrow"}
SCREENS = {"train.py": "train.py", **{stage.section: f"-m {stage.package}.main" for stage in STAGES}}
OTHERS = {name: f"-m rlhf {name}" for name in SUBCOMMANDS if name != "train"} | {"reward_eval": "-m step2_reward.eval"}
RED = "\x1b[31merror:\x1b[0m "
CLEARED = "\r\x1b[K\x1b[?25h"  # what a killed rank's progress bar left is erased first


# Runs a program as `python` does, and prints the packages that it has imported as its last line.
CODE = """
import runpy, sys
program, sys.argv = {program!r}, {argv!r}
try:
    runpy.run_path(program, run_name="__main__") if program.endswith(".py") else runpy.run_module(
        program, run_name="__main__", alter_sys=True
    )
except SystemExit as end:
    assert not end.code, end.code
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


class OtherUsualFlags(SFTConfig):
    """SFT, whose first screen shows flags of which an empty value has a meaning."""

    usual = ("run_dir", "push_to_hub")


def call(words: str, *more: str) -> tuple[str, set[str], float]:
    """What a command prints, the packages that it imports, and its seconds of processor time; it ends with 0."""
    program, *argv = words.removeprefix("-m ").split()
    seconds, output = processor_seconds(CODE.format(program=program, argv=[program, *argv, *more]))
    text, _, imported = output.strip().rpartition("\n")
    return text, set(imported.split()), seconds


def quick_call(words: str) -> tuple[str, set[str]]:
    """The help of a command and what it imports.

    One of three calls takes half a second or, on a busy or slow machine, less than six times what importing pydantic
    takes there just before: one to four times are usual, torch alone takes more.
    """
    for _ in "123":
        limit_s = max(0.5, 6 * processor_seconds("from pydantic import BaseModel, TypeAdapter")[0])
        text, imported, seconds = call(words, "--help")
        if seconds < limit_s:
            break
    assert seconds < limit_s
    return text, imported


@pytest.mark.parametrize("name", SCREENS)
def test_the_first_screen(name):
    """Check 1 of the terminal: purpose, three examples, the ten usual flags, in 25 lines of 80 columns."""
    text, imported = quick_call(SCREENS[name])
    lines = text.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80
    program = lines[0].removeprefix("usage: ").removesuffix(" [--FLAG VALUE ...]")
    assert sum(line.startswith(f"  {program} --") for line in lines) == 3
    assert len(re.findall(r"^  --[\w-]+ {2,}\S", text, re.MULTILINE)) == 10
    assert lines[-1] == naming(f"{program} --help-all ... --help lora")
    assert "pydantic" in imported and not HEAVY & imported


def test_the_first_screen_keeps_what_0_and_empty_mean():
    train = " ".join(train_help(TrainConfig, "x").split())
    sft, ppo = (" ".join(help_text(stage_of(section).config, "x").split()) for section in ("sft", "ppo"))
    assert "GPUs of each machine; 0: all [0]" in train
    assert "LoRA rank; 0: full fine-tuning [0]" in sft and "LoRA rank; 0: full fine-tuning [0]" in ppo
    assert "Steps between evaluations; 0: only before and after training [0]" in sft
    shown = " ".join(help_text(OtherUsualFlags, "x").split())
    assert "--run-dir Folder of metrics, logs, checkpoints; empty: <parent>/runs/<stage> [none]" in shown
    assert "to this repository of the hub, private if new; empty: nowhere [none]" in shown


def test_required_words_are_shown_as_required(capsys):
    for section, flag in {"sft": "model", "ppo": "actor-model"}.items():
        text = " ".join(help_text(stage_of(section).config, "x").split())
        assert f"--{flag} Hub id or folder of the model to start from [required]" in text
    required = {
        "chat": ["model"], "compare": ["model"], "sample": ["model", "data"], "report": ["folder"],
        "convert": ["folders"], "export": ["checkpoint", "output"], "merge": ["folders"],
        "reward": ["reward-function", "data"], "eval": ["model", "data-path"],
    }  # fmt: skip
    for name, flags in required.items():
        with pytest.raises(SystemExit):
            run_subcommand(name, ["--help"], prog=name)
        text = capsys.readouterr().out
        shown = re.findall(r"^  --([\w-]+) .*\n(?:      .*\n)*?      .*\[required\]$", text, re.MULTILINE)
        assert shown == flags, name
        assert run_subcommand(name, [], prog=name) == 2
        assert f"--{flags[0]}: " in capsys.readouterr().err


def test_what_names_all_flags_names_help_all(capsys):
    assert run_subcommand("init", ["--help"], prog="rlhf init") == 0
    assert capsys.readouterr().out == naming("rlhf train: rlhf train --help-all")
    page = (ROOT / "website" / "errors.yaml").read_text(encoding="utf-8")
    assert "`--help-all` lists all" in page


@pytest.mark.parametrize("name", OTHERS)
def test_a_subcommand_explains_itself_without_heavy_imports(name):
    text, imported = quick_call(OTHERS[name])
    assert text.startswith("usage: ") and not HEAVY & imported
    # A type of many choices is a word that no line can break.
    assert all(len(line) <= 80 or line.startswith("  --") for line in text.splitlines())


def test_a_version_is_that_of_the_project():
    text, imported, _ = call("-m rlhf", "--version")
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert text.strip() == f"rlhf-pipeline {version}" and not HEAVY & imported


def test_the_list_of_subcommands_fits_a_terminal():
    text, *_ = call("-m rlhf", "--help")
    assert set(re.findall(r"^  (\w+) ", text, re.MULTILINE)) == set(SUBCOMMANDS)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.section)
def test_everything_is_behind_help_all(stage):
    text, *_ = call(f"-m {stage.package}.main", "--help_all")
    assert all(f"\n  {flag.shown} " in text for flag in flag_table(stage.config).values())
    assert re.findall(r"^[A-Z]\w*(?: \(\w+\))?:$", text, re.MULTILINE)


def test_everything_of_train_is_behind_its_help_all():
    text, *_ = call("train.py", "--help-all")
    tables = [flag_table(config) for config in (TrainConfig, *(stage.config for stage in STAGES))]
    assert all(f"\n  {flag.shown} " in text for table in tables for flag in table.values())
    assert all(f"--{stage.section}.FLAG VALUE" in text for stage in STAGES)


def test_examples_are_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("{}")
    for stage in STAGES:
        for words in stage.config.examples:
            parse(stage.config, words.split(), section=stage.section)
    for words in TrainConfig.examples:
        assert make_plan(words.split(), prog="x").chosen


def test_two_errors_of_a_file_are_both_told_with_the_right_name(tmp_path):
    """Check 2 of the terminal."""
    (tmp_path / "wrong.yaml").write_text("train: {stp: 1}\nsft: {learning_rat: 1}\n")
    command = [sys.executable, str(ROOT / "train.py"), "--config", "wrong.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.splitlines() == [
        naming("error: wrong.yaml ... stp ... step?"),
        naming("error: sft: wrong.yaml ... learning_rat ... learning_rate?"),
    ]


def printed(*words: str, terminal: bool, **variables: str) -> str:
    """The stderr, a pipe or a terminal, of a command with a wrong word."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    names = ("NO_COLOR", "FORCE_COLOR", "TERM")
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"TERM": "xterm"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment | variables, stderr=writer, timeout=60, check=False)
    os.close(writer)
    assert done.returncode == 2
    text = os.read(reader, 10_000).decode().replace("\r\n", "\n")
    os.close(reader)
    return text


@pytest.mark.parametrize(
    ("terminal", "variables", "mark"),
    [
        (True, {}, CLEARED + RED),
        (False, {}, "error: "),
        (True, {"NO_COLOR": "1"}, CLEARED + "error: "),
        (True, {"TERM": "dumb"}, "error: "),
        (False, {"FORCE_COLOR": "1"}, RED),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, "error: "),
    ],
)
def test_errors_keep_their_line_and_are_red_on_a_terminal(terminal, variables, mark):
    """Check 6 of the terminal."""
    said = printed("-m", "rlhf", "trin", terminal=terminal, **variables)
    assert said.startswith(f"{mark}trin: ") and said == naming("train?")


def test_each_line_of_several_errors_is_red():
    said = printed("train.py", "--stp", "1", "--sft.sed", "1", terminal=True)
    assert said.replace(CLEARED, "").splitlines() == [
        naming(f"{RED}--stp ... --step?"),
        naming(f"{RED}--sft.sed ... --sft.seed?"),
    ]
