"""Flags that change nothing are named once at the start, with what they need."""

from pathlib import Path

import pytest
from support.command_run import run_command
from support.messages import naming
from support.tiny_run import make_folder

from pipeline.configuration.flag_checks import idle_flags
from pipeline.configuration.flags import parse
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


def idle(config_class, *words: str) -> list[str]:
    stage, names = ("ppo", "actor critic") if config_class is PPOConfig else ("sft", "")
    models = [word for name in names.split() for word in (f"--{name}_model_name_or_path", name)]
    own = models or ["--model-name-or-path", "base"]
    resolved = parse(config_class, [*own, "--data-path", "rows.jsonl", "--output-dir", "out", *words], section=stage)
    return list(idle_flags(resolved.config, resolved.origins))


def test_defaults_are_not_spoken_of():
    assert idle(SFTConfig) == [] and idle(PPOConfig) == []


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ("--zero3-gather once", "--zero-stage 3, got --zero-stage 0"),
        ("--zero3-gather once --zero-stage 2", "--zero-stage 3, got --zero-stage 2"),
        ("--sub-group-size 5 --zero-stage 1", "--zero-stage 3, got --zero-stage 1"),
        ("--lora-alpha 8.0", "--lora-dim, got --lora-dim 0"),
    ],
)
def test_each_says_what_it_needs(words, needs):
    name, value = words.split()[:2]
    assert idle(SFTConfig, *words.split()) == [naming(f"{name} {value} (command line) ... no effect ... {needs}")]


def test_what_needs_a_gpu_is_said_on_a_cpu_alone():
    given = parse(SFTConfig, [*"--model-name-or-path b --data-path r.jsonl --gpu-memory-gib 24".split()], section="sft")
    assert list(idle_flags(given.config, given.origins, on_cpu=False)) == []
    (line,) = idle_flags(given.config, given.origins, on_cpu=True)
    assert line == naming("--gpu-memory-gib 24.0 (command line) ... no effect ... a GPU")


def test_one_model_of_two_is_enough():
    words = ("--zero3-gather", "once", "--critic-lora-alpha", "8")
    assert idle(PPOConfig, *words, "--critic-zero-stage", "3", "--critic-lora-dim", "2") == []
    assert [line.split()[0] for line in idle(PPOConfig, *words)] == [words[2], words[0]]


def test_nothing_is_said_of_flags_that_act():
    words = "--zero3-gather once --sub-group-size 5 --zero-stage 3"
    assert idle(SFTConfig, *words.split(), "--lora-dim", "2", "--lora-alpha", "8") == []


def test_a_run_says_it_once(tmp_path: Path):
    folder = make_folder(tmp_path)
    words = ["--model-name-or-path", "base", "--data-path", "train.jsonl", "--data-split", "none", "--max-steps", "1"]
    more = ["--max-seq-len", "48", "--output-dir", "out", "--zero3-gather", "layers", "--keep-checkpoints", "0"]
    more += ["--gpu-memory-gib", "3"]
    ended = run_command("step1_sft", [*words, *more], folder=folder)
    assert ended.code == 0, ended.stderr[-2000:]
    log = (folder / "runs" / "out" / "log.txt").read_text()
    assert log.count("--zero3-gather layers (command line)") == 1
    assert log.count("--gpu-memory-gib 3.0 (command line)") == 1
