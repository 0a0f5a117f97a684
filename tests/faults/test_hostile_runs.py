"""A run folder whose own files are hostile: the command that resumes ends in one line, and never waits."""

import json
import os
from typing import Any

import pytest
from input_calls import call, stage_words, stopped_at_the_models
from support.messages import naming

from pipeline.checkpoints.checkpoint_files import find
from pipeline.checkpoints.offline import read_json
from pipeline.configuration.flags import parse
from pipeline.errors import CheckpointError, InputError
from pipeline.heartbeat import read_beat
from pipeline.processes import time_limit
from pipeline.run.earlier_runs import is_finished
from pipeline.run.lock import read_holder
from pipeline.run.outcome import check_nobody_left, ranks_with_outcome, read_outcome, write_outcome
from pipeline.training.metrics import truncate_to_step
from rlhf.stages import stage_of

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
DEEP = "[" * 100_000
DONE: dict[str, Any] = {
    "stage": "sft", "steps": 5, "time": 1.0, "max_steps": 5, "num_train_epochs": 1, "settings": {},
    "inputs": {}, "sizes": {},
}  # fmt: skip


@pytest.mark.parametrize("name", ["done.json", "config.json", "metrics.jsonl", "log.txt", "outcome/rank-0.json", "x"])
def test_a_fifo_is_named_and_not_opened(folder, tmp_path, monkeypatch, name):
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / "env.json").write_text(json.dumps({"stage": "sft", "versions": {}}))
    os.mkfifo(run / name)
    with stopped_at_the_models(monkeypatch), time_limit(20):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out", run_dir=run))
    says = naming(f"error: --run-dir: {run / name} ... neither a file nor a folder ... remove")
    assert ending.code == 2 and ending.errors == [says], ending.stderr


@pytest.mark.parametrize("flag", ["config", "deepspeed_config", "data_path", "reward_function"])
def test_a_fifo_that_a_flag_names_is_not_opened(folder, tmp_path, monkeypatch, flag):
    fifo = tmp_path / f"fifo{'.py' if flag == 'reward_function' else '.jsonl'}"
    os.mkfifo(fifo)
    value = f"{fifo}:score" if flag == "reward_function" else fifo
    with stopped_at_the_models(monkeypatch), time_limit(20):
        ending = call("ppo", stage_words("ppo", folder, tmp_path / "out", **{flag: value}))
    assert ending.code == 2, ending.stderr
    assert ending.errors == [naming(f"error: ... {fifo} ... not a ... file")], ending.stderr


@pytest.mark.parametrize("value", [None, "x", [], 1.5, 10**400])
@pytest.mark.parametrize("name", ["steps", "max_steps", "settings", "inputs", "sizes"])
def test_a_record_of_wrong_types_is_no_record(tmp_path, name, value):
    stage = stage_of("sft")
    config = parse(stage.config, ["--output-dir", str(tmp_path / "sft")], section="sft").config
    (tmp_path / "done.json").write_text(json.dumps(DONE | {name: value}))
    if value == 10**400 and name in ("steps", "max_steps"):  # a number of steps
        return
    assert not is_finished(tmp_path, config, ranks=1)


def test_files_that_are_nested_too_deep(tmp_path):
    for file in ("rank-0.json", "manifest.json", "metrics.jsonl"):
        (tmp_path / file).write_text(DEEP + "\n")
    assert read_beat(tmp_path / "rank-0.json") is None and read_holder(tmp_path / "rank-0.json") is None
    with pytest.raises(CheckpointError, match=r"manifest.json: missing or unreadable"):
        find(tmp_path, str(tmp_path))
    with pytest.raises(InputError, match=r"manifest.json: missing or unreadable"):
        read_json(tmp_path / "manifest.json")
    truncate_to_step(tmp_path / "metrics.jsonl", 5, lambda line: json.loads(line)["step"])
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize("changes", [{"pid": "x"}, {"code": "1"}, {"message": 5}, {"host": []}, {"time": None}])
def test_an_outcome_of_wrong_types_is_none(tmp_path, changes):
    write_outcome(tmp_path, 0, None, "running")
    file = tmp_path / "outcome" / "rank-0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (tmp_path / "outcome" / "rank-x.json").touch()
    assert ranks_with_outcome(tmp_path) == [0] and read_outcome(tmp_path, 0) is None
    check_nobody_left(tmp_path)
