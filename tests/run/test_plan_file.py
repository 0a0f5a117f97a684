"""The plan by which a run chose its flags, kept in its folder for the report."""

import json
from pathlib import Path

import torch

from pipeline.configuration.flags import parse
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.rank_rules import Choice
from pipeline.configuration.stage import Stage
from pipeline.dist import World
from pipeline.run.run import Run, begin, take_folder
from pipeline.run.stop_request import StopRequest
from rlhf.stages import stage_of

PLAN = {"target": "1 x H100", "step_s": 0.5, "memory_gib": {"train": {"allocated": 3.5, "reserved": [4.0, 5.0]}}}


def run_with(choice: Choice, folder: Path, *more: str) -> None:
    """Begin a run for which this was chosen, up to where it takes its folder."""
    sft = stage_of("sft")
    fields = {name: getattr(sft, name) for name in Stage.__dataclass_fields__}
    stage = Stage(**(fields | {"loop": lambda: lambda run, config: take_folder(run)}))
    resolved = parse(stage.config, ["--data-path", "a.jsonl", "--model-name-or-path", "m", *more], section="sft")
    run = Run(World(0, 1, torch.device("cpu")), folder, stage, resolved, StopRequest())
    begin(run, lambda stage, resolved: choice)


def test_it_is_that_of_the_choice_and_gone_where_a_run_starts_afresh_without_one(tmp_path: Path) -> None:
    run_with(Choice({}, Origin(Kind.PLAN, "1 x H100"), "", PLAN), tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text()) == PLAN
    run_with(Choice(), tmp_path)
    assert (tmp_path / "plan.json").is_file(), "a run that goes on has the choice of before, and its plan"
    run_with(Choice(), tmp_path, "--overwrite")
    assert not (tmp_path / "plan.json").exists() and (tmp_path / "config.json").is_file()
