"""Outputs that are inputs, another run's or somebody's files are refused before anything is written."""

import json
from pathlib import Path

import pytest
from support.messages import naming

from pipeline.configuration.flags import parse
from pipeline.errors import InputError
from pipeline.files import OURS, PROJECT
from pipeline.run.lock import locked
from pipeline.run.outcome import SUPERVISOR
from pipeline.run.output_checks import check_outputs
from rlhf.stages import stage_of
from step1_sft.config import SFTConfig
from step1_sft.main import main as sft_main
from step2_reward.config import RewardConfig
from step3_dpo.config import DPOConfig
from step3_ppo.config import PPOConfig
from step3_ppo.main import main as ppo_main

CLASSES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "dpo": DPOConfig}


def model(folder: Path) -> Path:
    """A model that this project has saved."""
    folder.mkdir(parents=True)
    for name in ("config.json", OURS):
        (folder / name).write_text("{}")
    return folder


def problems(stages: dict[str, str], **more: bool) -> list[str]:
    """The lines about stages, given as words of their flags."""
    configs = {
        stage_of(stage): parse(CLASSES[stage], words.split(), section=stage).config for stage, words in stages.items()
    }
    try:
        check_outputs(configs, **more)
    except InputError as error:
        return str(error).splitlines()
    return []


CASES = {
    "the start model": ("sft", "--model-name-or-path base --output-dir base", "base (--model-name-or-path)"),
    "by another spelling": ("sft", "--model-name-or-path base --output-dir ./a/../base", "base (--model-name-or-path)"),
    "by a link": ("sft", "--model-name-or-path base --output-dir link", "base (--model-name-or-path)"),
    "data inside the output": ("sft", "--data-path out/a.jsonl:0.5 --output-dir out", "out/a.jsonl (--data-path)"),
    "evaluation rows": ("reward", "--eval-data-path out --output-dir out", "out (--eval-data-path)"),
    "the actor": ("ppo", "--actor-model-name-or-path o/actor --output-dir o", "o/actor (--actor-model-name-or-path)"),
    "the critic": (
        "ppo", "--critic-model-name-or-path o/critic --output-dir o", "o/critic (--critic-model-name-or-path)"
    ),
    "the reward model": (
        "ppo", "--reward-model-name-or-path o/actor --output-dir o", "o/actor (--reward-model-name-or-path)"
    ),
    "the cache": ("sft", "--data-output-path out/cache --output-dir out", "out/cache (--data-output-path)"),
    "data as the cache": ("sft", "--data-path rows --data-output-path rows", "rows (--data-path)"),
    "the run in the model": ("sft", "--run-dir out/run --output-dir out", "out/run (--run-dir)"),
    "samples of the run": ("sft", "--data-path r/samples.jsonl --run-dir r", "r/samples.jsonl (--data-path)"),
    "a DeepSpeed JSON": ("sft", "--deepspeed-config out/ds.json --output-dir out", "out/ds.json (--deepspeed-config)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_output_that_is_an_input_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ds.json").write_text("{}")
    (tmp_path / "out" / OURS).write_text("{}")
    stage, words, named = CASES[name]
    (line,) = problems({stage: words})
    assert line == naming(f"write over {named} ... another folder")


@pytest.mark.parametrize("stage", CLASSES)
def test_the_usual_folders_are_apart(tmp_path, monkeypatch, stage):
    monkeypatch.chdir(tmp_path)
    assert problems({stage: ""}) == []


def test_steps_read_what_the_steps_before_write_and_replace_nothing_of_theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual = {"sft": "", "reward": "", "ppo": "--actor-model-name-or-path output/sft"}
    assert problems(usual, named_by_section=True) == []
    (line,) = problems(usual | {"sft": "--model-name-or-path output/actor"}, named_by_section=True)
    assert line == naming("--ppo.output-dir ... output/actor (--sft.model-name-or-path)")
    (line,) = problems(usual | {"reward": "--output-dir output/sft --run-dir x"}, named_by_section=True)
    assert line == naming("--reward.output-dir ... output/sft (--sft.output-dir)")
    lines = problems(usual | {"reward": "--output-dir output/sft/reward --run-dir output/sft/x"}, named_by_section=True)
    assert lines == [
        naming(f"--sft.output-dir ... output/sft/{name} (--reward.{flag}) ... another folder")
        for name, flag in (("reward", "output-dir"), ("x", "run-dir"))
    ]
    (line,) = problems(usual | {"reward": "--run-dir output/runs/sft"}, named_by_section=True)
    assert line == naming("--reward.run-dir ... output/runs/sft (--sft.run-dir)")


def test_a_run_folder_of_another_stage_is_refused_finished_or_not(tmp_path):
    (tmp_path / "env.json").write_text(json.dumps({"stage": "reward", "versions": {PROJECT: "0.9"}}))
    for more in ("", " --overwrite"):
        (line,) = problems({"sft": f"--output-dir {tmp_path / 'sft'} --run-dir {tmp_path}{more}"})
        assert line == naming(f"--run-dir ... {tmp_path} ... a run of reward ... sft ... another folder")


def test_the_model_of_another_run_is_replaced_only_on_request(tmp_path):
    folder = model(tmp_path / "sft")
    words = f"--output-dir {folder} --run-dir {tmp_path / 'other'}"
    (line,) = problems({"sft": words})
    assert line == naming(f"--output-dir ... {folder} ... another run ... another --output-dir ... --overwrite")
    assert problems({"sft": f"{words} --overwrite"}) == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "env.json").write_text(json.dumps({"stage": "sft", "versions": {}}))
    assert problems({"sft": words}) == [], "the run that made it"


@pytest.mark.parametrize(("made", "now"), [("ppo", "dpo"), ("dpo", "ppo")])
def test_the_policy_of_another_method_is_replaced_only_on_request(tmp_path, made, now):
    """Also where both have run in this output folder, so that the run's own folder is known."""
    folder = model(tmp_path / "actor")
    (folder / OURS).write_text(json.dumps({"stage": made, "data": {}}))
    words = f"--output-dir {folder if now == 'dpo' else tmp_path}"
    for name in ("ppo", "dpo"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "env.json").write_text(json.dumps({"stage": name, "versions": {}}))
    (line,) = problems({now: words})
    assert line == naming(
        f"--output-dir ... {folder} ... a model of {made} ... {now} ... another --output-dir ... --overwrite"
    )
    assert problems({now: f"{words} --overwrite"}) == []
    (folder / OURS).write_text(json.dumps({"stage": now, "data": {}}))
    assert problems({now: words}) == []


def test_a_folder_of_other_files_is_refused_by_the_flag_that_names_it(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "thesis.txt").write_text("x")
    (line,) = problems({"ppo": f"--output-dir {tmp_path}"}, named_by_section=True)
    assert line == naming(f"--ppo.output-dir ... {tmp_path / 'actor'} ... (thesis.txt)")


@pytest.mark.parametrize("more", ["", " --overwrite"])
@pytest.mark.parametrize("name", ["config.json", "checkpoints", "samples.jsonl", "thesis.txt"])
def test_a_run_folder_of_other_files_is_refused(tmp_path, name, more):
    """A model's folder, or one of the user's, whose files a run would replace or delete."""
    folder = tmp_path / "mine"
    (folder / name).mkdir(parents=True) if name == "checkpoints" else model(folder)
    (folder / name).touch()
    (line,) = problems({"sft": f"--output-dir {tmp_path / 'sft'} --run-dir {folder}{more}"}, named_by_section=True)
    first = min(path.name for path in folder.iterdir())
    assert line == naming(f"--sft.run-dir ... {folder} ... ({first}) ... no env.json ... new or empty folder")


def test_a_run_folder_is_new_or_empty_or_that_of_a_run(tmp_path, monkeypatch):
    words = {"sft": f"--output-dir {tmp_path / 'sft'} --run-dir {tmp_path / 'run'}"}
    assert problems(words) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".probe-1").touch()
    assert problems(words) == [], "another rank starts at this moment"
    (tmp_path / "run" / "heartbeat").mkdir()
    assert problems(words) == [], "on a host without rank 0, or before that has its lock"
    (tmp_path / "run" / "heartbeat").rmdir()
    (tmp_path / "run" / "outcome").mkdir()
    assert len(problems(words)) == 1
    monkeypatch.setenv(SUPERVISOR, "7@host")
    assert problems(words) == [], "the supervisor has looked, then each of its ranks writes there"
    monkeypatch.delenv(SUPERVISOR)
    with locked(tmp_path / "run"):
        assert problems(words) == []
    assert problems(words) == [], "whatever the run has left"


def test_a_stage_by_hand_leaves_a_model_that_is_named_as_its_run_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = model(tmp_path / "model") / "config.json"
    config.write_text('{"model_type": "opt"}')
    assert sft_main("--model-name-or-path x --data-path y --run-dir model --overwrite".split()) == 2
    assert capsys.readouterr().err == naming("--run-dir: model ... (config.json)")
    assert config.read_text() == '{"model_type": "opt"}'


def test_a_stage_ends_with_2_and_has_written_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "output" / "actor")
    before = sorted(tmp_path.rglob("*"))
    words = "--output-dir output --actor-model-name-or-path output/actor --critic-model-name-or-path x"
    assert ppo_main(words.split()) == 2
    assert "write over output/actor (--actor-model-name-or-path)" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
