"""Rows that are not those of a stage's checkpoint are found before the first stage of a command starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming
from support.saved_state import write_state
from support.tiny_run import write_lines
from transformers import AutoTokenizer

from pipeline.configuration.flags import parse
from pipeline.configuration.stage import Stage
from pipeline.data.cache import data_fingerprint, load_or_build
from pipeline.errors import InputError
from pipeline.preparation import preflight
from pipeline.preparation.preflight import look_before_start
from pipeline.run.data_split import data_of
from pipeline.run.earlier_runs import input_contents
from rlhf.stages import STAGES

FOLDER_SIZES = {"num_train": 8, "num_test": 4, "num_documents": 8}

SFT, REWARD, PPO, DPO = STAGES
STARTS = {
    SFT: "--model-name-or-path base --output-dir out/sft --max-seq-len 96",
    REWARD: "--model-name-or-path base --output-dir out/reward --max-seq-len 96",
    DPO: "--model-name-or-path base --output-dir out/actor --max-seq-len 96",
    PPO: "--actor-model-name-or-path base --critic-model-name-or-path scorer --output-dir out --max-prompt-seq-len 64 "
    "--max-answer-seq-len 32 --unsupervised-data-path text.jsonl",
}


def configuration(stage: Stage, *more: str) -> Any:
    words = f"{STARTS[stage]} --data-path train.jsonl --data-split none --data-output-path cache".split()
    return parse(stage.config, [*words, *more], section=stage.section).config


@pytest.fixture
def begun(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Stage], Any]:
    """Leave what a run's checkpoint says of its data, in a folder with the inputs; return its configuration."""
    for path in folder.iterdir():
        if path.is_dir():
            (tmp_path / path.name).symlink_to(path)
        else:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "is_reachable", lambda: False)

    def begin(stage: Stage) -> Any:
        config, tokenizer = configuration(stage), AutoTokenizer.from_pretrained("base")
        hashes = [data_fingerprint(load_or_build(options, tokenizer).train) for options in data_of(stage, config)]
        state = {"inputs": input_contents(config), "fingerprints": dict(enumerate(hashes))}
        write_state(stage.run_folder(config.run) / "checkpoints/step-3", state)
        return config

    return begin


def change(file: str, **changed: str) -> None:
    """Change the first row of a file, or add columns to it."""
    first, *others = (json.loads(line) for line in Path(file).read_text().splitlines())
    write_lines(Path(file), [first | changed, *others])


@pytest.mark.parametrize("dry_run", [False, True], ids=["start", "dry run"])
@pytest.mark.parametrize("stage", STAGES, ids=[stage.section for stage in STAGES])
def test_changed_rows_of_any_stage_are_found(begun, stage, dry_run):
    config = begun(stage)
    plan = {SFT: configuration(SFT, "--output-dir", "before"), stage: config}

    def look() -> list[str]:
        return look_before_start(plan, dry_run=dry_run, named_by_section=True)

    assert look() == [] and len(list(Path("cache").glob("*-*"))) == len(data_of(stage, config))
    change("train.jsonl", note="Read by nobody.")
    assert look() == [], "the rows are those of the checkpoint"
    change("train.jsonl", prompt="Describe something else.")
    flag, folder = f"--{stage.section}.data-path", stage.run_folder(config.run) / "checkpoints/step-3"
    with pytest.raises(InputError) as error:
        look()
    changed, hint = str(error.value).splitlines()
    assert changed == naming(f"{flag} ... train.jsonl ... checkpoint")
    assert hint == naming(f"{stage.section}: {folder} ... same flags")
    assert hint.endswith(f"; --{stage.section}.force-resume continues anyway")
    for more in (("--force-resume",), ("--overwrite",), ("--resume", "never")):
        plan[stage] = configuration(stage, *more)
        assert look() == []


def test_rows_of_unchanged_sources_are_not_hashed_before_the_start(begun, monkeypatch):
    """A hash reads the whole cache; it is compared when the checkpoint is loaded."""
    plan, hashed = {SFT: begun(SFT)}, list[Any]()
    monkeypatch.setattr("pipeline.preparation.inputs.data_fingerprint", hashed.append)
    assert look_before_start(plan, dry_run=False) == hashed == []
    change("train.jsonl", note="Read by nobody.")
    with pytest.raises(InputError, match=naming("--data-path ... train.jsonl ... checkpoint")):
        look_before_start(plan, dry_run=False)
    assert len(hashed) == 1


def test_changed_text_of_the_ptx_loss_is_found(begun):
    plan = {PPO: begun(PPO)}
    change("text.jsonl", text="Something else.")
    with pytest.raises(InputError, match=naming("--unsupervised-data-path ... text.jsonl ... checkpoint")):
        look_before_start(plan, dry_run=True)


def test_sources_that_a_dry_run_does_not_read_are_not_compared(begun):
    """A hub id in place of a file: whether its rows are the same is found when it is downloaded."""
    begun(SFT)
    plan = {SFT: configuration(SFT, "--data-path", "train.jsonl", "org/rows")}
    assert look_before_start(plan, dry_run=True) == [naming("no network ... org/rows")]
