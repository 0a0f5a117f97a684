"""Wrong variables of the environment: one line that names the variable and what it may be, before data are read."""

import resource
from pathlib import Path
from typing import Any

import pytest
from input_calls import call, stage_words, stopped_at_the_models
from support.messages import naming

from pipeline.errors import EnvironmentFault
from pipeline.launching.scripts import run_script
from pipeline.processes import time_limit
from pipeline.run.run import git_commit

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
RANK_OF_TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# The variables, and what the line says.
WRONG = [
    ({"SLURM_NTASKS": "two"}, "SLURM_NTASKS is 'two' ... 1 to 65535"),
    ({"SLURM_NTASKS": "-4"}, "SLURM_NTASKS is '-4'"),
    ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many' ... 1 to"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
    ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0' ... 1 to"),
    ({"LOCAL_SIZE": "two"}, "LOCAL_SIZE is 'two'"),
    ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '99999999999999999999'"),
    (RANK_OF_TWO | {"RANK": "first"}, "RANK is 'first' ... 0 to"),
    (RANK_OF_TWO | {"RANK": "-1"}, "RANK is '-1'"),
    (RANK_OF_TWO | {"RANK": "2"}, "RANK is 2 of WORLD_SIZE 2"),
    (RANK_OF_TWO | {"LOCAL_RANK": "1.5"}, "LOCAL_RANK is '1.5'"),
    (RANK_OF_TWO | {"LOCAL_RANK": "2"}, "LOCAL_RANK ... 2 of WORLD_SIZE 2"),
    (RANK_OF_TWO | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK ... 1 of LOCAL_WORLD_SIZE 1"),
    (
        RANK_OF_TWO | {"MASTER_PORT": "port"},
        "MASTER_PORT is 'port' ... 0 to 65535",
    ),
    (RANK_OF_TWO | {"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
    ({"WORLD_SIZE": "2"}, "RANK is not set ... WORLD_SIZE ... torchrun"),
    (
        {"DS_ACCELERATOR": "banana"},
        "DS_ACCELERATOR is 'banana' ... cpu or cuda",
    ),
    ({"RANK": "0"}, "WORLD_SIZE is not set ... RANK"),
    ({"RANK": "3"}, "WORLD_SIZE is not set ... RANK"),  # also of a rank whose errors another one would print
    ({"RANK": "\u0663"}, "RANK is '\u0663', expected a number"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set ... RANK, WORLD_SIZE"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_launchers_variable_that_is_no_possible_number(
    number: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is let through waits for the others: here for a second."""
    variables, says = WRONG[number]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = stage_words("sft", folder, tmp_path / "out", process_group_timeout_s=1)
    with stopped_at_the_models(monkeypatch), time_limit(20):
        ending = call("sft", words)
    assert ending.code == 3 and len(ending.errors) == 1, ending.stderr
    assert ending.errors[0] == naming(says)


@pytest.mark.parametrize("command", ["chat", "prompt_eval", "reward_eval"])
def test_a_small_command_looks_at_the_environment_too(command: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "banana")
    ending = call(command, [tmp_path])
    assert ending.code == 3 and ending.errors[0] == naming("DS_ACCELERATOR is 'banana' ... cpu or cuda")


def test_too_few_open_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries end with a traceback, or take a full table of files for a full disk."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (24, 4096))
    with stopped_at_the_models(monkeypatch):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out"))
    assert ending.code == 3 and ending.errors == [naming("24 open files ... 64 or more ... `ulimit -n 1024`")]


def test_open_files_without_a_limit_are_enough(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with stopped_at_the_models(monkeypatch):
        assert call("sft", stage_words("sft", folder, tmp_path / "out")).loaded


def test_without_a_path_a_run_has_no_commit_and_a_launch_script_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert git_commit()
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
    with pytest.raises(EnvironmentFault, match=naming("bash ... No such file ... PATH")):
        run_script(["bash", "launch/single_gpu.sh"], {"PATH": ""})
