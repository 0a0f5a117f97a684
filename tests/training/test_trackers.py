"""Trackio, SwanLab and MLflow, executed offline: what each one's own storage holds of a run."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.command_run import run_command

pytestmark = pytest.mark.slow

OFFLINE = {"SWANLAB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
PROJECTS = ("TRACKIO_PROJECT", "SWANLAB_PROJ_NAME", "MLFLOW_EXPERIMENT_NAME")


class Logged(NamedTuple):
    """A run as a tracker has stored it; losses: value by step; names: what the user sees of project and run."""

    identity: str
    names: tuple[str, ...]
    settings: dict[str, Any]
    losses: dict[int, float]


def of_trackio(folder: Path) -> list[Logged]:
    (file,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        configs = {name: json.loads(text) for name, text in database.execute("select run_name, config from configs")}
        lines = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    found = []
    for name, config in configs.items():
        losses = {
            step: metrics["loss"]
            for run, step, text in lines
            if run == name and "loss" in (metrics := json.loads(text))
        }
        found.append(Logged(name, (file.stem, name.rpartition("-")[0]), config, losses))
    return found


def of_swanlab(folder: Path) -> list[Logged]:
    """A file for each start, which begins with what a server would make a run of."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found = dict[str, Logged]()
    for file in sorted((folder / "out/runs/sft/swanlab").rglob("*.swanlab")):
        reader, records = DataStoreReader(), list[Any]()
        reader.open(str(file))
        while (payload := reader.scan()) is not None:
            records.append(Record.FromString(payload))
        start = next(one.start for one in records if one.HasField("start"))
        losses = {one.scalar.step: one.scalar.value.number for one in records
                  if one.HasField("scalar") and one.scalar.key == "loss"}  # fmt: skip
        before = found[start.id].losses if start.id in found else {}
        found[start.id] = Logged(start.id, (start.project, start.name), {}, before | losses)
    return [*found.values()]


def of_mlflow(folder: Path) -> list[Logged]:
    from mlflow import MlflowClient

    client, found = MlflowClient(f"file:{folder}/mlruns"), []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            history = client.get_metric_history(run.info.run_id, "loss")
            losses = {one.step: one.value for one in history}
            names = (experiment.name, run.info.run_name)
            assert run.data.tags["group"] == "out" and run.info.status == "FINISHED"
            found.append(Logged(run.info.run_id, names, run.data.params, losses))
    return found


TRACKERS: dict[str, Callable[[Path], list[Logged]]] = {
    "trackio": of_trackio,
    "swanlab": of_swanlab,
    "mlflow": of_mlflow,
}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_resumed_run_continues_and_one_that_starts_over_is_another(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name, reason=f"the {name} package is not installed")
    folder = shutil.copytree(folder, tmp_path / "work")
    places = {"TRACKIO_DIR": f"{folder}/trackio", "MLFLOW_TRACKING_URI": f"file:{folder}/mlruns"}
    for variable, value in (OFFLINE | places).items():
        monkeypatch.setenv(variable, value)
    for variable in PROJECTS:
        monkeypatch.delenv(variable, raising=False)
    for steps in (2, 4):
        train(folder, name, steps)
    (logged,) = TRACKERS[name](folder)
    lines = [json.loads(line) for line in (folder / "out/runs/sft/metrics.jsonl").read_text().splitlines()]
    assert logged.names == ("rlhf-pipeline", "out-sft")
    assert logged.losses == {line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in lines if "loss" in line}
    assert list(logged.losses) == [1, 2, 3, 4]
    if logged.settings:
        assert str(logged.settings["model_name_or_path"]) == "base" and str(logged.settings["max_steps"]) in ("2", "4")
    train(folder, name, 2, "--overwrite", "true")
    both = TRACKERS[name](folder)
    (other,) = (one for one in both if one.identity != logged.identity)
    assert len(both) == 2 and list(other.losses) == [1, 2]


def train(folder: Path, name: str, steps: int, *more: object) -> None:
    words = ["--model-name-or-path", "base", "--data-path", "train.jsonl", "--data-split", "none", "--max-seq-len", 48]
    size = ["--per-device-train-batch-size", 2, "--max-steps", steps, "--lr-scheduler-type", "constant"]
    words += [*size, "--output-dir", "out/sft", "--monitors", name, *more]
    ended = run_command("step1_sft", words, folder=folder)
    assert ended.code == 0 and f"{name}: not available" not in ended.stderr, ended.stderr[-2000:]
    assert "is left out from here on" not in ended.stderr, ended.stderr[-2000:]
