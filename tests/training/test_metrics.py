"""Metrics and progress: names, numbers that are not finite, resuming, sinks that fail."""

import csv
import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from pipeline.configuration.groups import RunConfig
from pipeline.dist import World
from pipeline.training import metrics
from pipeline.training.metrics import DEFINITIONS, MetricsWriter, check_name, finite
from pipeline.training.recorder import Progress, Recorder, duration


@pytest.fixture(autouse=True)
def files_in_the_order_of_their_names(monkeypatch):
    """TensorBoard's files of one second and process are told apart by a count, which sorts as text: 9 after 10."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def writer(folder, *, start_step=-1, tensorboard=False, csv_file=False, wandb=False) -> MetricsWriter:
    return MetricsWriter(
        folder, stage="sft", tensorboard=tensorboard, csv_file=csv_file, wandb=wandb, start_step=start_step
    )


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_stage_step_time_and_values(tmp_path):
    writer(tmp_path).write(3, {"loss": 1.5, "eval_accuracy": 1})
    (line,) = lines(tmp_path)
    assert line.pop("time") > 1e9
    assert line == {"stage": "sft", "step": 3, "loss": 1.5, "eval_accuracy": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_becomes_null_everywhere(tmp_path, value):
    out = writer(tmp_path, tensorboard=True)
    out.write(1, {"loss": value, "grad_norm": 2.0})
    assert lines(tmp_path)[0]["loss"] is None and finite(value) is None
    assert scalars(tmp_path, "grad_norm") == [(1, 2.0)] and scalars(tmp_path, "loss") == []


def test_a_name_must_be_defined(tmp_path):
    with pytest.raises(KeyError, match="losss"):
        writer(tmp_path).write(1, {"losss": 1.0})
    assert lines(tmp_path) == []
    check_name("eval_objective/kl")
    assert all(meaning for meaning in DEFINITIONS.values())


def test_a_resumed_run_continues_behind_its_checkpoint(tmp_path):
    first = writer(tmp_path, csv_file=True)
    for step in (0, 1, 2, 3, 4):
        first.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "st')  # the machine died here
    second = writer(tmp_path, start_step=2, csv_file=True)
    second.write(3, {"loss": 30.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    rows = list(csv.reader((tmp_path / "metrics.csv").open()))
    assert rows == [["0", "loss", "0.0"], ["1", "loss", "1.0"], ["2", "loss", "2.0"], ["3", "loss", "30.0"]]


def test_lines_that_hold_other_ends_of_lines_are_kept_whole(tmp_path):
    """A prompt or a sampled response may hold U+2028 or U+0085, which str.splitlines takes for the end of a line."""
    text = json.dumps({"step": 1, "response": "a\u2028b\u0085c\u2029"}, ensure_ascii=False)
    (tmp_path / "samples.jsonl").write_text(f'{text}\n{{"step": 2}}\nbroken\n', encoding="utf-8")
    writer(tmp_path, start_step=1)
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8") == f"{text}\n"


def test_an_evaluation_before_the_first_step_stays_where_a_run_goes_on_from_there(tmp_path):
    writer(tmp_path).write(0, {"eval_loss": 1.0})
    writer(tmp_path, start_step=0)
    assert [line["step"] for line in lines(tmp_path)] == [0]


def test_a_disk_that_is_full_ends_nothing(tmp_path, caplog):
    out = writer(tmp_path)
    out._jsonl = Path("/dev/full").open("w")  # noqa: SIM115
    for step in (1, 2):
        out.write(step, {"loss": 1.0})
    assert caplog.text.count("metrics cannot be written, training goes on: No space left on device") == 1


def test_a_run_that_starts_again_leaves_nothing_of_the_last_try(tmp_path):
    for loss in (1.0, 2.0):
        out = writer(tmp_path, csv_file=True, tensorboard=True)
        for step in (0, 1) if loss == 2.0 else (0, 1, 2):
            out.write(step, {"loss": loss})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(0, 2), (1, 2)]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2
    assert scalars(tmp_path, "loss") == [(0, 2.0), (1, 2.0)]


def scalars(folder, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(name)] if name in events.Tags()["scalars"] else []


def test_a_tensorboard_step_never_goes_back(tmp_path):
    first = writer(tmp_path, tensorboard=True)
    for step in (1, 2, 3, 4, 5):
        first.write(step, {"loss": float(step)})
    second = writer(tmp_path, tensorboard=True, start_step=3)
    for step in (4, 5, 6):
        second.write(step, {"loss": 10.0 * step})
    assert scalars(tmp_path, "loss") == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    calls = []

    def breaks(step, values):
        calls.append(step)
        raise OSError("disk full")

    monkeypatch.setattr(metrics, "tensorboard_sink", lambda folder, start_step: breaks)
    out = writer(tmp_path, tensorboard=True)
    with caplog.at_level(logging.WARNING):
        out.write(1, {"loss": 1.0})
        out.write(2, {"loss": 2.0})
    assert calls == [1] and "disk full" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_sink_that_cannot_be_made_is_left_out(tmp_path, monkeypatch, caplog):
    def missing(stage, run_dir):
        raise ImportError("no wandb here")

    monkeypatch.setattr(metrics, "wandb_sink", missing)
    with caplog.at_level(logging.WARNING):
        writer(tmp_path, wandb=True).write(1, {"loss": 1.0})
    assert "wandb: not available" in caplog.text and len(lines(tmp_path)) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress("sft", total_steps=5, start_step=0, every=2, stream=stream)
    for step in range(1, 6):
        progress.update(step, {"loss": 0.123456})
    progress.note("[sft] step 5: eval_loss 1")
    shown = stream.getvalue().splitlines()
    assert [line.split()[1] for line in shown] == ["2/5", "4/5", "5/5", "step"]
    assert "loss 0.1235" in shown[0] and "left" in shown[0]
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_progress_on_a_terminal_rewrites_one_line():
    stream = Terminal()
    progress = Progress("sft", total_steps=2, start_step=0, every=1, stream=stream)
    progress.update(1, {"loss": 1.0})
    progress.update(2, {"loss": 1.0})
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().count("\r") == 2


def test_durations_are_readable():
    assert [duration(s) for s in (59.9, 60, 3661, 90061)] == ["59s", "1m 00s", "1h 01m", "25h 01m"]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_records(tmp_path, rank, capsys):
    world = World(rank=rank, size=2, local_rank=rank, device=torch.device("cpu"))
    run = SimpleNamespace(world=world, folder=tmp_path, stage="sft")
    recorder = Recorder(run, RunConfig(enable_tensorboard=False), start_step=0, total_steps=4)
    recorder.write(0, {"eval_loss": 2.0})
    recorder.write_training(1, {"loss": 3.0}, seconds=2.0, num_tokens=100, num_rows=8)
    assert (tmp_path / "metrics.jsonl").exists() == (rank == 0)
    if rank == 0:
        first, second = lines(tmp_path)
        assert first["eval_loss"] == 2.0
        assert (second["tokens_per_s"], second["samples_per_s"], second["step_s"]) == (50.0, 4.0, 2.0)
        assert "[sft] 1/4  loss 3" in capsys.readouterr().err
