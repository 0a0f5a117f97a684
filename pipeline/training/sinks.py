"""The monitors of a run, to which `--monitors` sends its metrics besides metrics.jsonl.

A new monitor is a function here, its name in `SINKS`, and that name in the flag's type (configuration/run_flags.py).
"""

import csv
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.files import tolerated, write_text

MLFLOW_CHARS = 6000  # most characters of a parameter that MLflow takes


def nothing(*_: Any) -> None:
    """Do nothing; most sinks do this at a checkpoint and at the end of a run."""


@dataclass(frozen=True, slots=True)
class Sink:
    """A destination of a run's metrics. After its first error it is no longer used, and the run continues.

    write: takes the step and its values; None stands for a number that is not finite.
    close: takes the run's exit code.
    sync: flushes everything to the disk before a checkpoint.
    declare: takes the charts to draw: group -> title -> names of metrics.
    show: takes the step and samples of an evaluation (lines of samples.jsonl).
    """

    write: Callable[[int, Mapping[str, float | None]], None]
    close: Callable[[int], None] = nothing
    sync: Callable[[], None] = nothing
    declare: Callable[[Mapping[str, Mapping[str, list[str]]]], None] = nothing
    show: Callable[[int, Sequence[Mapping[str, Any]]], None] = nothing


def csv_file(run_dir: Path, stage: str, start_step: int) -> Sink:
    """Append to metrics.csv, one metric a line: steps have different metrics, and a header cannot grow."""
    file = (run_dir / "metrics.csv").open("a", encoding="utf-8", newline="")

    def write(step: int, values: Mapping[str, float | None]) -> None:
        with tolerated("metrics"):
            csv.writer(file).writerows([step, name, value] for name, value in values.items())
            file.flush()

    return Sink(write, sync=lambda: os.fsync(file.fileno()))


def tensorboard(run_dir: Path, stage: str, start_step: int) -> Sink:
    """Write to TensorBoard the steps after `start_step`."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what an interrupted run wrote past the checkpoint, so that a curve never goes back.
    writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1)

    def write(step: int, values: Mapping[str, float | None]) -> None:
        for name, value in finite_only(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def declare(charts: Mapping[str, Mapping[str, list[str]]]) -> None:
        multiline = {
            title: {name: ["Multiline", tags] for name, tags in names.items()} for title, names in charts.items()
        }
        writer.add_custom_scalars(multiline)

    def show(step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for number, sample in enumerate(samples):
            # TensorBoard reads texts as Markdown; a text indented by four spaces is shown as it is.
            numbers = ", ".join(f"{name} {sample[name.lower()]}" for name in ("score", "KL") if name.lower() in sample)
            said = f"{sample['prompt']}\n\u2192 {sample['response']}\n({numbers})"
            writer.add_text(f"samples/{number + 1}", "    " + said.replace("\n", "\n    "), step)
        writer.flush()

    return Sink(write, declare=declare, show=show)


def wandb(run_dir: Path, stage: str, start_step: int) -> Sink:
    """Log to Weights & Biases: one run for each run folder, in the group of its output. A resumed run continues it."""
    import wandb

    run = wandb.init(
        **description(run_dir, stage, "WANDB_PROJECT"),
        id=run_id(run_dir / "wandb_id", start_step),
        resume="allow",
        dir=str(run_dir),
        settings=wandb.Settings(console="off"),  # the run folder has the log
    )
    # Ranks end without exit handlers, so `finish` must wait for W&B's process to write everything.
    return sink_of(run, lambda exit_code: run.finish(exit_code=exit_code))


def trackio(run_dir: Path, stage: str, start_step: int) -> Sink:
    """Log to Trackio, as `wandb` does. It knows a run by its name, which therefore has the id."""
    import trackio

    how, number = description(run_dir, stage, "TRACKIO_PROJECT"), run_id(run_dir / "trackio_id", start_step)
    run = trackio.init(**how | {"name": f"{how['name']}-{number}"}, resume="allow")
    return sink_of(run, lambda _: run.finish())


def swanlab(run_dir: Path, stage: str, start_step: int) -> Sink:
    """Log to SwanLab, as `wandb` does."""
    import swanlab

    run = swanlab.init(
        **description(run_dir, stage, "SWANLAB_PROJ_NAME"),
        id=run_id(run_dir / "swanlab_id", start_step),
        resume="allow",
        log_dir=str(run_dir / "swanlab"),
        settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),  # the run folder has the log
    )
    return sink_of(run, lambda exit_code: run.finish("crashed" if exit_code else "success"))


def mlflow(run_dir: Path, stage: str, start_step: int) -> Sink:
    """Log to MLflow, as `wandb` does. The server gives a run its id."""
    import mlflow

    how, id_file = description(run_dir, stage, "MLFLOW_EXPERIMENT_NAME"), run_dir / "mlflow_id"
    mlflow.set_experiment(how["project"])
    if is_new := start_step < 0 or not id_file.is_file():
        id_file.unlink(missing_ok=True)
    number = None if is_new else id_file.read_text(encoding="utf-8")
    run = mlflow.start_run(run_id=number, run_name=how["name"], tags={"group": how["group"]})
    if is_new:  # the parameters of a run cannot change
        write_text(id_file, run.info.run_id)
        mlflow.log_params({name: str(value)[:MLFLOW_CHARS] for name, value in how["config"].items()})

    def write(step: int, values: Mapping[str, float | None]) -> None:
        mlflow.log_metrics(finite_only(values), step=step)

    return Sink(write, lambda exit_code: mlflow.end_run("FAILED" if exit_code else "FINISHED"))


def sink_of(run: Any, close: Callable[[int], None]) -> Sink:
    """Return the sink of a run of W&B, or of a tracker that logs as it does."""
    return Sink(lambda step, values: run.log(finite_only(values), step=step), close)


def description(run_dir: Path, stage: str, project_variable: str) -> dict[str, Any]:
    """Return how trackers show a run: project, group, name and settings."""
    output = run_dir.resolve().parent.parent.name
    settings = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    return {
        "project": os.environ.get(project_variable, "rlhf-pipeline"),
        "group": output,
        "name": f"{output}-{stage}",
        "config": {name: setting["value"] for name, setting in settings.items()},
    }


def run_id(file: Path, start_step: int) -> str:
    """Return the id of a run by which a tracker knows it again; a run that starts afresh gets another one."""
    if start_step < 0 or not file.is_file():
        write_text(file, uuid.uuid4().hex[:12])
    return file.read_text(encoding="utf-8")


def finite_only(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values without those that are not finite."""
    return {name: value for name, value in values.items() if value is not None}


# Name in --monitors -> function that creates the sink from a run's folder, its stage, and the step that it resumes from
# (-1: none).
SINKS: dict[str, Callable[[Path, str, int], Sink]] = {
    "tensorboard": tensorboard,
    "csv": csv_file,
    "wandb": wandb,
    "trackio": trackio,
    "swanlab": swanlab,
    "mlflow": mlflow,
}
