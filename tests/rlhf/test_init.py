"""`rlhf init`: the file that it writes, against the plan of the same flags, and run by `train.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch_stub import ROOT, started, train
from support.messages import naming
from support.tiny_run import make_folder

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import load_yaml
from rlhf.main import main
from rlhf.train_config import TrainConfig
from rlhf.train_plan import make_plan

GIVEN = ("--data-path", "a b.jsonl", "c.jsonl:0.5", "--sft.learning-rate", "2e-5", "--ppo.template", "tokenizer")


def init(*words: str) -> int:
    return main(["init", *words])


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the checkout that can ask nothing: its input is closed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, timeout=600, check=False, **pipes)


def settings(*words: str) -> list[object]:
    plan = make_plan(list(words), prog="x")
    return [plan.config, *(planned.resolved.config for planned in plan.stages.values())]


@pytest.mark.parametrize("model", ["1.3b", "qwen2.5-1.5b", "tiny"])
def test_the_file_says_what_the_flags_say(tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    flags = ("--actor-model", model, *GIVEN)
    assert init("my.yaml", *flags) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: rlhf train --config my.yaml --dry-run"
    content = load_yaml("my.yaml")
    assert content["train"] == {"actor_model": model}
    assert content["reward"] == {"data_path": ["a b.jsonl", "c.jsonl:0.5"]}
    assert content["sft"] == {"data_path": ["a b.jsonl", "c.jsonl:0.5"], "learning_rate": 2e-5}
    assert content["ppo"] == {"data_path": ["a b.jsonl", "c.jsonl:0.5"], "template": "tokenizer"}
    assert settings("--config", "my.yaml") == settings(*flags)


def test_a_flag_whose_mark_is_taken_away_keeps_its_value(tmp_path, monkeypatch):
    """Each comment of the form `# flag: value` is a line that holds once it is none."""
    monkeypatch.chdir(tmp_path)
    assert init("my.yaml", "--actor-model", "1.3b") == 0
    text = (tmp_path / "my.yaml").read_text()
    flags = [*flag_table(TrainConfig), *(name for stage in settings()[1:] for name in flag_table(type(stage)))]
    names = "|".join(name for name in flags if name != "auto")  # meanings have lines that begin with this word
    opened, count = re.subn(rf"^  # ((?:{names}): \S)", r"  \1", text, flags=re.MULTILINE)
    assert count > 20 and "# num_train_epochs: 2.0" in text
    (tmp_path / "open.yaml").write_text(opened)
    assert settings("--config", "open.yaml") == settings("--actor-model", "1.3b", "--reward-model", "350m")


def test_a_preset_that_says_what_would_be_auto_is_shown_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model, shown in {"tiny": "32", "1.3b": '"auto"'}.items():
        assert init(f"{model}.yaml", "--actor-model", model) == 0
        text = (tmp_path / f"{model}.yaml").read_text()
        assert re.findall(r"# per_device_train_batch_size: (.*)", text)[0] == shown


def test_meanings_are_those_of_the_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert init("my.yaml", "--sft.train-on-prompt", "true") == 0
    said = " ".join((tmp_path / "my.yaml").read_text().replace("\n  #", "").split())
    assert f"{flag_table(type(settings()[1]))['train_on_prompt'].meaning} train_on_prompt: true" in said
    assert "(preset 1.3b.yaml) num_train_epochs: 2.0" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("old.yaml",), "old.yaml exists ... rlhf init other.yaml"),
        (("--actor-model", "tiny", "old.yaml"), "old.yaml exists"),
        (("rlhf",), "rlhf ... .yaml"),
        (("--actor-modl", "tiny"), "--actor-modl ... --actor-model?"),
        (("--config", "old.yaml"), "--config ... writes such a file"),
        (("--sft.learning-rate", "fast"), "--sft.learning-rate: got 'fast'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text("train: {step: 1}\n")
    assert init(*words) == 2
    assert capsys.readouterr().err == naming(f"error: {says}")
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]
    assert (tmp_path / "old.yaml").read_text() == "train: {step: 1}\n"


def test_train_plans_all_stages_of_a_file(tmp_path, monkeypatch):
    """Its look at models and data is a stub here; see below."""
    monkeypatch.chdir(tmp_path)
    assert init("--actor-model", "1.3b", *GIVEN) == 0
    done = train(tmp_path, "--config", "rlhf.yaml", "--dry-run")
    assert done.returncode == 0 and done.stdout.count("== stage ") == 3, done.stderr
    assert done.stdout.endswith("dry run: nothing was started\n") and started(tmp_path) == []


@pytest.mark.slow
def test_the_next_command_runs_as_it_is_printed(tmp_path):
    folder = make_folder(tmp_path, num_train=32, num_test=4, num_documents=2)
    flags = ("--actor-model", "base", "--reward-model", "base", "--data-path", "train.jsonl", "--max-steps", "1")
    made = call(folder, "-m", "rlhf", "init", *flags)
    assert made.returncode == 0, made.stderr
    command = made.stdout.splitlines()[-1].removeprefix("next: python ")
    assert command == "-m rlhf train --config rlhf.yaml --dry-run"
    limits = ("--sft.max-seq-len", "96", "--reward.max-seq-len", "96", "--ppo.max-answer-seq-len", "16")
    done = call(folder, *command.split(), *limits, "--ppo.max-prompt-seq-len", "48")
    assert done.returncode == 0 and done.stdout.count("\n== stage ") == 3, done.stderr
    assert done.stdout.endswith("dry run: nothing was started\n")


@pytest.mark.slow
def test_a_file_trains_all_stages(tmp_path):
    folder = make_folder(tmp_path)
    flags = ["--actor-model", "base", "--reward-model", "base", "--data-path", "train.jsonl", "--max-steps", "2"]
    flags += ["--sft.max-seq-len", "96", "--reward.max-seq-len", "96", "--ppo.max-answer-seq-len", "16"]
    assert call(folder, "-m", "rlhf", "init", *flags, "--ppo.max-prompt-seq-len", "48").returncode == 0
    done = call(folder, str(ROOT / "train.py"), "--config", "rlhf.yaml")
    assert done.returncode == 0 and (folder / "output/actor/model.safetensors").is_file(), done.stderr
    assert done.stdout.splitlines()[-1] == "next: python chat.py output/actor"
