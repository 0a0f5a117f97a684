"""A folder that holds what no run wrote is never replaced; one that a killed start of a run left is taken again."""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.messages import naming

from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import Choice
from pipeline.configuration.stage import Stage
from pipeline.errors import InputError
from pipeline.files import OURS, check_replaceable
from pipeline.run.lock import locked
from pipeline.run.outcome import clear_outcomes, write_outcome
from pipeline.run.output_checks import check_outputs
from pipeline.run.run import run_stage, take_folder
from rlhf.stages import stage_of
from step1_sft.main import main

# What 5748f88 wrote (shortened lists of versions).
OF_BEFORE = {
    "stage": "sft", "python": "3.11.2", "platform": "Linux-6.1",
    "versions": {"rlhf-pipeline": "0.9", "torch": "2.13.0"},
    "device": "cpu", "num_ranks": 1, "cpu_count": 2, "commit": None, "command": ["main.py"],
}  # fmt: skip
MINE = ("config.json", "metrics.jsonl", "samples.jsonl")
FOREIGN_ENVIRONMENTS = {
    "empty object": "{}",
    "variables": '{"PATH": "/bin"}',
    "list": '["stage"]',
    "pairs": '[["stage", "sft"], ["versions", {}]]',
    "stage without versions": '{"stage": "sft"}',
    "versions in words": '{"stage": "sft", "versions": "all"}',
    "stage of another program": '{"stage": "production", "versions": {}}',
    "stage and versions of another program": '{"stage": "production", "versions": {"flask": "3.1"}}',
    "no word for a stage": '{"stage": 1, "versions": {}}',
    "no JSON": "PATH=/bin",
    "nested": "[" * 100_000,
}


def refusal(folder: Path, *more: str) -> list[str]:
    """The lines about a run folder."""
    words = ["--output-dir", str(folder.parent / "sft"), "--run-dir", str(folder), *more]
    try:
        check_outputs({stage_of("sft"): parse(stage_of("sft").config, words, section="sft").config})
    except InputError as error:
        return str(error).splitlines()
    return []


def own_files(folder: Path) -> dict[str, str]:
    """Files of the user's that a run would replace, and their content."""
    for name in MINE:
        (folder / name).write_text(f"mine: {name}")
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("more", [[], ["--overwrite"]], ids=["", "overwrite"])
@pytest.mark.parametrize("name", FOREIGN_ENVIRONMENTS)
def test_an_env_json_that_no_run_wrote_makes_no_folder_ours(tmp_path, monkeypatch, capsys, name, more):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "env.json").write_text(FOREIGN_ENVIRONMENTS[name])
    before = own_files(folder)
    assert main(["--model-name-or-path", "x", "--data-path", "y", "--run-dir", "mine", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == naming("error: --run-dir ... mine ... env.json ... new or empty folder")
    assert "holds a run of" not in line
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


@pytest.mark.parametrize("mark", ["run.lock", "heartbeat"])
@pytest.mark.parametrize("file", [*MINE, "checkpoints", "thesis.txt"])
def test_a_lock_or_a_heartbeat_makes_no_folder_ours(tmp_path, mark, file):
    folder = tmp_path / "mine"
    (folder / mark).mkdir(parents=True)
    assert refusal(folder) == []
    (folder / file).touch()
    (line,) = refusal(folder)
    assert line == naming(f"--run-dir ... {folder} ... ({file}) ... no env.json ... new or empty folder")


@pytest.mark.parametrize("name", ["log", "log.txt", "outcome", "deepspeed"])
def test_a_folder_of_logs_without_lock_or_heartbeat_is_none_of_ours(tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).touch()
    assert f"holds other files ({name})" in refusal(tmp_path / "mine")[0]


def test_the_folder_of_a_run_of_before_stays_ours(tmp_path):
    (tmp_path / "run").mkdir()
    own_files(tmp_path / "run")
    (tmp_path / "run" / "env.json").write_text(json.dumps(OF_BEFORE))
    assert refusal(tmp_path / "run") == []


def test_only_outcomes_and_beats_are_cleared_away(tmp_path):
    write_outcome(tmp_path, 3, 0, "done")
    for name in ("outcome/first-error", "outcome/notes.txt", "heartbeat/rank-1.json", "heartbeat/.rank-0.json.writing"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    clear_outcomes(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["outcome/notes.txt"]


# --- killed at each moment before env.json ----------------------------------------------------------------------------


def begin(folder: Path) -> int:
    """The same command in short: looked at as `enter` does, then begun up to where a run takes its folder."""
    sft = stage_of("sft")
    fields: dict[str, Any] = {name: getattr(sft, name) for name in Stage.__dataclass_fields__}
    stage = Stage(**(fields | {"loop": lambda: lambda run, config: take_folder(run)}))
    words = ["--data-path", "a", "--model-name-or-path", "m", "--output-dir", str(folder / "sft")]
    resolved = parse(stage.config, words, section="sft")
    check_outputs({stage: resolved.config})
    return run_stage(stage, resolved, choose=lambda stage, resolved: Choice({}, "chosen", "", {"step_s": 1.0}))


def begin_killed(folder: Path, at: int) -> None:
    """In a child: `begin`, with SIGKILL ahead of its operation `at` on files of the run; at -1 without."""
    seen = 0

    def watch(event: str, given: tuple[Any, ...]) -> None:
        nonlocal seen
        is_write = event in ("os.mkdir", "os.rename", "os.remove") or event == "open" and given[2] & os.O_CREAT
        if is_write and str(given[0]).startswith(f"{folder}/"):
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    code = 70
    try:
        forks.write_output_to(folder.with_suffix(".log"), folder.with_suffix(".log"))
        sys.addaudithook(watch)
        code = begin(folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.faults
def test_a_start_that_is_killed_at_any_moment_is_followed_by_the_same_command(tmp_path):
    names, at, code = set[str](), 0, -signal.SIGKILL
    while code != 0:
        folder = tmp_path / str(at)
        folder.mkdir()
        code = forks.exit_code([forks.start(begin_killed, folder, at)])
        assert code in (0, -signal.SIGKILL), folder.with_suffix(".log").read_text()
        run_dir = folder / "runs" / "sft"
        names |= {path.name for path in run_dir.glob("*")}
        if not all((run_dir / name).exists() for name in ("env.json", "config.json")):  # else it is a begun run's
            again = forks.exit_code([forks.start(begin_killed, folder, -1)])
            assert again == 0, (at, folder.with_suffix(".log").read_text())
        at += 1
    assert at > 15 and {"run.lock", "heartbeat", "outcome", "log", "log.txt", "env.json", "config.json"} <= names


LEFT = {
    "a supervisor that searched": ["run.lock", "auto_measure/output.txt"],
    "a search of DeepSpeed": ["run.lock", "autotuning/run/x"],
    "ranks that compute a reference": ["run.lock", "heartbeat/rank-0.json", "log.txt", "reference.safetensors"],
    "a rank of another host": [".probe-1", "heartbeat/rank-1.json", "log/rank-1.txt"],
    "monitors of DeepSpeed": ["run.lock", "log/rank-0.txt", "deepspeed/csv/x.csv"],
    "a torn env.json": ["run.lock", "outcome/rank-0.json", ".env.json.writing"],
}


@pytest.mark.parametrize("who", LEFT)
def test_what_a_start_may_leave_is_no_foreign_folder(tmp_path, who):
    for name in LEFT[who]:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).touch()
    assert refusal(tmp_path / "run") == []
    with locked(tmp_path / "run"):
        assert refusal(tmp_path / "run") == []


# --- model folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ['{"lr": 1e-4}', '{"stage": "train", "epochs": 3}', '{"stage": 2, "data": {}}', "[1]", "x", "[" * 100_000],
    ids=["lr", "stage", "number", "list", "text", "nested"],
)
def test_a_foreign_training_config_makes_no_model_folder_ours(tmp_path, text):
    (tmp_path / OURS).write_text(text)
    with pytest.raises(InputError) as refused:
        check_replaceable(tmp_path)
    assert str(refused.value) == naming(f"--output-dir ... {tmp_path} ... {OURS} ... no run wrote ... new or empty")


@pytest.mark.parametrize(
    "content", [{"stage": "sft", "data": {}}, {"converted_from": "x"}, {"quantised_from": "x"}, {}]
)
def test_the_settings_of_our_own_models_make_a_folder_replaceable(tmp_path, content):
    (tmp_path / OURS).write_text(json.dumps(content))
    check_replaceable(tmp_path)
