"""`--monitors` is a list, and its switches (`--enable-csv`) add a word to it or take it out."""

import pytest
from support.messages import naming

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import flag_words, parse
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import values_by_rule
from pipeline.configuration.run_flags import TRIED
from pipeline.errors import InputError
from pipeline.training.sinks import SINKS
from rlhf.stages import STAGES
from rlhf.train_plan import make_plan
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig
from website.flags import tables

ALL = ["--enable-tensorboard", "--enable-csv", "true", "--enable-wandb=true"]


def parsed(*words: str) -> Resolved:
    return parse(SFTConfig, list(words), section="sft")


def monitors(*words: str) -> tuple[list[str], str]:
    """The list that a command line makes, and its origin."""
    resolved = parsed(*words)
    return resolved.config.run.monitors, str(resolved.origins["monitors"])


def test_each_word_has_its_sink():
    assert set(flag_table(SFTConfig)["monitors"].choices) == SINKS.keys()
    assert set(flag_table(SFTConfig)["monitors"].switches.values()) <= SINKS.keys()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--enable-csv"], ["tensorboard", "csv"]),
        (["--enable-csv", "TRUE", "--enable-csv", "1"], ["tensorboard", "csv"]),
        (["--enable-csv", "--enable-csv", "false"], ["tensorboard"]),
        (["--enable-tensorboard", "true"], ["tensorboard"]),
        (["--enable-tensorboard", "false"], []),
        (["--enable-tensorboard", "no", "--enable-wandb"], ["wandb"]),
        (ALL, ["tensorboard", "csv", "wandb"]),
        (["--monitors", "csv", "wandb"], ["csv", "wandb"]),
        (["--monitors", "csv", "--enable-wandb"], ["csv", "wandb"]),
        (["--monitors", "none"], []),
        (["--monitors", "none", "--enable-wandb"], ["wandb"]),
        ([*ALL, "--monitors", "wandb"], ["wandb"]),  # the last one counts
    ],
    ids=" ".join,
)
def test_a_switch_changes_the_list_by_its_word(words, expected):
    assert monitors(*words) == (expected, "command line")


def test_a_switch_changes_what_the_layers_below_say(tmp_path):
    assert monitors() == (["tensorboard"], "default")
    preset, file = tmp_path / "preset.yaml", tmp_path / "run.yaml"
    preset.write_text("sft: {monitors: [wandb]}\n")
    file.write_text("sft: {enable-csv: true}\n")
    both = ["--preset", str(preset), "--config", str(file)]
    assert monitors(*both[:2]) == (["wandb"], str(preset))
    assert monitors(*both) == (["wandb", "csv"], str(file))
    assert monitors(*both, "--enable-wandb", "false") == (["csv"], "command line")
    assert monitors(*both, "--monitors", "tensorboard") == (["tensorboard"], "command line")


@pytest.mark.parametrize("text", ["enable_csv: yes\nmonitors: wandb\n", "monitors: [wandb]\nenable_csv: true\n"])
def test_the_order_of_the_lines_of_a_file_says_nothing(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    assert monitors("--config", str(tmp_path / "run.yaml"))[0] == ["wandb", "csv"]


def test_what_is_no_word_and_no_truth_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("enable_csv: 3\nmonitors: 7\n")
    with pytest.raises(InputError) as refused:
        parsed("--config", str(tmp_path / "run.yaml"), "--enable-wandb", "maybe", "--enable-tensorboard", "a", "b")
    assert str(refused.value).splitlines() == [
        naming("--enable-tensorboard ... 2 values (a b) ... one"),
        naming(f"--enable-csv ... 3 ({tmp_path}/run.yaml) ... boolean"),
        naming("--enable-wandb ... 'maybe' (command line) ... boolean"),
        naming(f"--monitors ... 7 ({tmp_path}/run.yaml) ... 'tensorboard', 'csv', ... or 'mlflow'"),
    ]
    with pytest.raises(InputError, match="--monitors: got 'cvs' .*; did you mean csv?"):
        parsed("--monitors", "cvs")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.section)
def test_a_trial_writes_to_no_monitor(stage):
    """Its flags stand behind those of the run that it tries."""
    for words in (ALL, ["--monitors", *SINKS], [*ALL, "--monitors", *SINKS]):
        required = (
            ["--actor-model-name-or-path", "a", "--critic-model-name-or-path", "b"] if stage.section == "ppo" else []
        )
        resolved = parse(stage.config, [*required, *words, *flag_words(TRIED)], section=stage.section)
        assert resolved.config.run.monitors == []


def test_train_py_hands_a_switch_to_all_stages_and_one_of_them_may_have_another_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--actor-model", "tiny", "--enable-csv", "--reward.monitors", "none", "--ppo.enable-tensorboard", "false"]
    plan = make_plan(words, prog="train.py")
    lists = {stage.stage.section: stage.resolved.config.run.monitors for stage in plan.stages.values()}
    assert lists == {"sft": ["tensorboard", "csv"], "reward": [], "ppo": ["csv"]}


def test_no_resume_compares_them():
    assert "monitors" in values_by_rule(parsed(*ALL).config, "free")


def test_the_reference_names_the_switches():
    (row,) = (
        line for line in tables(flag_table(PPOConfig).values()).splitlines() if line.startswith("| `--monitors` |")
    )
    assert "(--enable-tensorboard, --enable-csv, --enable-wandb true\\|false adds to it or takes from it)" in row
