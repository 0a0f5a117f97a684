"""Metrics and progress: names, numbers that are not finite, resuming, sinks that fail."""

import csv
import io
import json
import logging
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pyte
import pytest
import torch
from support.messages import naming
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import RunConfig
from pipeline.console import fitted
from pipeline.dist import World
from pipeline.run.layout import row_values_file
from pipeline.run.logs import StderrHandler
from pipeline.training.metrics import MetricGroup, MetricsWriter, Unit, finite, metric_of, title_of
from pipeline.training.progress import Progress, Terminal, duration, readable
from pipeline.training.recorder import Recorder
from pipeline.training.sinks import SINKS, Sink
from rlhf.stages import STAGES
from step1_sft.config import SFTConfig
from step1_sft.metrics import METRICS
from step1_sft.stage import STAGE
from step2_reward import metrics as reward_metrics
from step3_dpo import metrics as dpo_metrics
from step3_ppo import metrics as ppo_metrics


@pytest.fixture(autouse=True)
def files_in_the_order_of_their_names(monkeypatch):
    """TensorBoard's files of one second and process are told apart by a count, which sorts as text: 9 after 10."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def writer(folder, *monitors, start_step=-1) -> MetricsWriter:
    return MetricsWriter(folder, stage="sft", metrics=METRICS, monitors=monitors, start_step=start_step)


def run_of(folder, world: World) -> SimpleNamespace:
    return SimpleNamespace(world=world, folder=folder, stage=STAGE, resolved=Resolved(SFTConfig(), {}))


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_stage_step_time_and_values(tmp_path):
    writer(tmp_path).write(3, {"loss": 1.5, "eval_grad_norm": 1})
    (line,) = lines(tmp_path)
    assert line.pop("time") > 1e9
    assert line == {"stage": "sft", "step": 3, "loss": 1.5, "eval_grad_norm": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_becomes_null_everywhere(tmp_path, value):
    out = writer(tmp_path, "tensorboard")
    out.write(1, {"loss": value, "grad_norm": 2.0})
    assert lines(tmp_path)[0]["loss"] is None and finite(value) is None
    assert scalars(tmp_path, "grad_norm") == [(1, 2.0)] and scalars(tmp_path, "loss") == []


def test_a_name_must_be_defined(tmp_path):
    with pytest.raises(KeyError, match="losss"):
        writer(tmp_path).write(1, {"losss": 1.0})
    assert lines(tmp_path) == []
    assert metric_of("eval_objective/kl", ppo_metrics.METRICS) is ppo_metrics.METRICS["objective/kl"]
    with pytest.raises(KeyError, match="objective/kl"):
        metric_of("eval_objective/kl", METRICS)


STAGE_METRICS = {
    "sft": METRICS, "reward": reward_metrics.METRICS, "ppo": ppo_metrics.METRICS, "dpo": dpo_metrics.METRICS,
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGE_METRICS)
def test_every_metric_says_its_unit_its_group_and_which_way_is_better(stage):
    """Names say the unit where they end in one."""
    for name, metric in STAGE_METRICS[stage].items():
        assert metric.meaning and metric.unit in get_args(Unit) and metric.group in get_args(MetricGroup), name
        assert metric.better in (-1, 0, 1), name
        ends = {"_gib": "GiB", "tokens_per_s": "tokens/s", "samples_per_s": "rows/s", "_s": "s"}
        assert metric.unit == next((unit for end, unit in ends.items() if name.endswith(end)), metric.unit), name


def test_what_a_stage_has_reached_is_told_by_its_own_metrics():
    for stage in STAGES:
        assert [metric_of(name, STAGE_METRICS[stage.section]) for name in stage.reached]


def test_a_progress_line_shows_declared_metrics_only(tmp_path):
    run = run_of(tmp_path, World(1, 2, torch.device("cpu")))
    with pytest.raises(KeyError, match="objective/scores"):
        Recorder(run, RunConfig(), start_step=0, total_steps=4, metrics=METRICS, shown=ppo_metrics.SHOWN)
    Recorder(run, RunConfig(), start_step=0, total_steps=4, metrics=ppo_metrics.METRICS, shown=ppo_metrics.SHOWN)


def test_a_resumed_run_continues_behind_its_checkpoint(tmp_path):
    first = writer(tmp_path, "csv")
    for step in (0, 1, 2, 3, 4):
        first.write(step, {"loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "sft", "st')  # the machine died here
    second = writer(tmp_path, "csv", start_step=2)
    second.write(3, {"loss": 30.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    rows = list(csv.reader((tmp_path / "metrics.csv").open()))
    assert rows == [["0", "loss", "0.0"], ["1", "loss", "1.0"], ["2", "loss", "2.0"], ["3", "loss", "30.0"]]


def test_values_of_rows_behind_the_checkpoint_are_written_again(tmp_path):
    first = writer(tmp_path)
    for step in (0, 2, 4):
        first.write_rows(step, {"eval_loss": [1.0, float("nan"), 2.0 + step]}, "data")
    writer(tmp_path, start_step=2).write_rows(3, {"eval_loss": [1 / 3]}, "data")
    found = [json.loads(line) for line in row_values_file(tmp_path).read_text().splitlines()]
    assert [line["step"] for line in found] == [0, 2, 3]
    assert found[0] == {"step": 0, "rows": "data", "every": 1, "eval_loss": [1.0, None, 2.0]}
    assert found[2]["eval_loss"] == [0.333333]


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
    assert caplog.text.count("No space left on device") == 1 and caplog.text == naming("metrics cannot be written")


def test_a_run_that_starts_again_leaves_nothing_of_the_last_try(tmp_path):
    for loss in (1.0, 2.0):
        out = writer(tmp_path, "csv", "tensorboard")
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
    first = writer(tmp_path, "tensorboard")
    for step in (1, 2, 3, 4, 5):
        first.write(step, {"loss": float(step)})
    second = writer(tmp_path, "tensorboard", start_step=3)
    for step in (4, 5, 6):
        second.write(step, {"loss": 10.0 * step})
    assert scalars(tmp_path, "loss") == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    calls = []

    def breaks(step, values):
        calls.append(step)
        raise OSError("disk full")

    monkeypatch.setitem(SINKS, "tensorboard", lambda run_dir, stage, start_step: Sink(breaks))
    out = writer(tmp_path, "tensorboard")
    with caplog.at_level(logging.WARNING):
        out.write(1, {"loss": 1.0})
        out.write(2, {"loss": 2.0})
    assert calls == [1] and "disk full" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_a_sink_that_cannot_be_made_is_left_out(tmp_path, monkeypatch, caplog):
    def missing(run_dir, stage, start_step):
        raise ImportError("no wandb here")

    monkeypatch.setitem(SINKS, "wandb", missing)
    with caplog.at_level(logging.WARNING):
        writer(tmp_path, "wandb").write(1, {"loss": 1.0})
    assert "wandb: not available" in caplog.text and len(lines(tmp_path)) == 1


@pytest.fixture
def info(caplog):
    caplog.set_level(logging.INFO, logger="pipeline.training")
    return caplog


def test_progress_is_a_plain_line_every_so_many_steps(info, capsys):
    progress = Progress("sft", total_steps=5, start_step=0, every=2)
    for step in range(1, 6):
        progress.update(step, {"loss": 0.123456})
    progress.end()
    assert [line.split()[1] for line in info.messages] == ["2/5", "4/5", "5/5"]
    assert "loss 0.1235" in info.messages[0] and "left" in info.messages[0]
    assert capsys.readouterr() == ("", ""), "no bar where there is no terminal"


def test_rate_and_time_left_are_those_of_the_last_steps(info):
    now = 0.0
    console = Terminal(stderr=True, get_time=lambda: now)
    progress = Progress("sft", total_steps=200, start_step=0, every=1, console=console)
    for step in range(1, 121):
        now += 10.0 if step <= 100 else 100.0
        progress.update(step, {})
    progress.end()
    # The first 100 steps took 10 s each, the last 20 took 100 s each: 600 s are 6 of these.
    assert info.messages[99] == "[sft] 100/200  0.1 steps/s  16m 40s left"
    assert info.messages[119] == "[sft] 120/200  0.01 steps/s  2h 13m left"


def logged_times(info, *, seconds: list[float], total: int, every: int, terminal: bool = False) -> list[float]:
    """Let steps of these seconds end; return the times at which a line was logged."""
    now, times = 0.0, []
    console = Terminal(file=io.StringIO(), force_terminal=terminal, get_time=lambda: now)
    progress = Progress("sft", total_steps=total, start_step=0, every=every, console=console)
    for step, took in enumerate(seconds, 1):
        now += took
        before = len(info.messages)
        progress.update(step, {})
        times += [now] * (len(info.messages) - before)
    progress.end()
    return times


def advance(total_steps: int, seconds: Iterable[float]) -> None:
    """Log the progress of a run, a line a step, whose first steps take so many seconds each."""
    now, console = 0.0, Terminal(stderr=True, get_time=lambda: now)
    progress = Progress("sft", total_steps=total_steps, start_step=0, every=1, console=console)
    for step, took in enumerate(seconds, 1):
        now += took
        progress.update(step, {})
    progress.end()


def test_a_slow_first_step_is_not_in_the_rate_for_long(info):
    """After a first step of 100 s, steps of 2 s: the rate of the last 20 is theirs, and 40 s are left of the run."""
    advance(60, [2.0, 100.0, *[2.0] * 38])
    assert info.messages[0] == "[sft] 1/60", "one step says nothing of the next ones"
    assert info.messages[39] == "[sft] 40/60  0.5 steps/s  40s left"


def test_short_steps_have_the_rate_of_half_a_minute(info):
    """Of steps of 0.1 s, 20 would be 2 s, in which one pause of a second is half of the time."""
    advance(1000, [*[0.1] * 394, 1.1, *[0.1] * 5])
    (rate,) = re.findall(r"  ([\d.]+) steps/s", info.messages[399])
    assert float(rate) == pytest.approx(290 / 30, rel=0.02)


def test_a_log_that_nobody_watches_gets_few_lines(info):
    """First and last step; in between 30 s apart at first, five minutes at most, whatever the steps take."""
    times = logged_times(info, seconds=[1.0] * 20_000, total=20_000, every=0)
    assert times[0] == 1.0 and times[-1] == 20_000
    apart = [after - before for before, after in pairwise(times)][:-1]
    assert min(apart) >= 29 and max(apart) <= 300 and apart == sorted(apart) and apart[-1] == 300
    assert len(times) < 120
    assert logged_times(info, seconds=[200.0] * 50, total=50, every=0) == [200.0 * n for n in range(1, 51)]
    assert logged_times(info, seconds=[0.1] * 100, total=100, every=0) == pytest.approx([0.1, 10.0])
    resumed = Progress("sft", total_steps=9, start_step=4, every=0)
    resumed.update(5, {})
    assert info.messages[-1].startswith("[sft] 5/9")


def test_a_flag_given_by_hand_gets_a_line_a_step_and_a_terminal_those_of_a_log(info):
    short = {"seconds": [0.1] * 10, "total": 10}
    assert len(logged_times(info, **short, every=1)) == 10
    assert len(logged_times(info, **short, terminal=True, every=1)) == 10
    assert len(logged_times(info, **short, terminal=True, every=0)) == 2, "its bar has the numbers of each step"


def test_lines_stay_above_the_bar_of_a_terminal(monkeypatch):
    """Reference: a terminal emulator. No line is joined to another, none is lost, and the bar is as wide as fits."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler, logger = StderrHandler(), logging.getLogger("pipeline")
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handlers", [handler])
    progress = Progress(
        "sft", total_steps=3, start_step=0, every=2, console=Terminal(stderr=True, force_terminal=True, width=50)
    )
    screen = pyte.Screen(50, 20)
    shown = []
    for step in range(1, 4):
        progress.update(step, {"loss": 1.0})
        logger.info("checkpoint step-%d", step)
        screen.reset()
        pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
        shown.append([line.rstrip() for line in screen.display if line.strip()])
    progress.end()
    assert shown[0][0] == "checkpoint step-1" and len(shown[0]) == 2 and "1/3" in shown[0][1]
    kept = [line.split("  ")[0] for line in shown[2][:-1]]
    assert kept == ["checkpoint step-1", "[sft] 2/3", "checkpoint step-2", "[sft] 3/3", "checkpoint step-3"]
    assert shown[2][-1].startswith("[sft] ########## 3/3  loss 1  0s left")
    screen.reset()
    pyte.Stream(screen).feed(stream.getvalue().replace("\n", "\r\n"))
    assert [line.split("  ")[0] for line in screen.display if line.strip()] == kept, "the bar goes at the end"
    assert "\x1b[?25l" not in stream.getvalue(), "the cursor stays visible: a killed run could not show it again"


def test_the_bar_says_what_matters_most_on_a_narrow_terminal_and_the_time_of_the_pipeline(info, monkeypatch):
    """Widths by hand: the head has 32 columns, each part two more than its letters."""
    monkeypatch.setenv("RLHF_PIPELINE", "2/3 600")
    shown = {width: bar_at(width) for width in (40, 60, 80, 120, 200)}
    head = "[2/3 reward] ####------ 412/900"
    assert shown == {
        40: head,
        60: f"{head}  training loss 0.41",
        80: f"{head}  training loss 0.41  4m 04s left  accuracy 0.71",
        120: f"{head}  training loss 0.41  4m 04s left  accuracy 0.71  2 steps/s  pipeline 14m 04s left",
        200: f"{head}  training loss 0.41  4m 04s left  accuracy 0.71  2 steps/s  pipeline 14m 04s left"
        "  peak 31 of 80 GiB  sampling 9%",
    }
    assert info.messages[0] == "[reward] 411/900  training loss 0.41  accuracy 0.71  peak 31 of 80 GiB  sampling 9%"


def bar_at(width: int) -> str:
    """The bar of a terminal so wide after two steps of half a second."""
    clock = iter([0.0, 0.5, 1.0])
    console = Terminal(file=io.StringIO(), force_terminal=True, width=width, get_time=lambda: next(clock))
    progress = Progress("reward", total_steps=900, start_step=410, every=0, console=console)
    for step in (411, 412):
        progress.update(step, {"training loss": 0.41, "accuracy": 0.71}, peak="31 of 80 GiB", split="sampling 9%")
    screen = pyte.Screen(width, 5)
    pyte.Stream(screen).feed(console.file.getvalue().replace("\n", "\r\n"))
    (line,) = [line.rstrip() for line in screen.display if line.strip()]
    return line


def test_the_numbers_of_an_evaluation_are_one_line_which_a_terminal_gets_cut_between_two_of_them(
    tmp_path, info, monkeypatch
):
    run = run_of(tmp_path, World(0, 1, torch.device("cpu")))
    values = {f"eval_{name}": index / 7 for index, name in enumerate(list(METRICS)[:20])}
    Recorder(run, RunConfig(monitors=[]), start_step=0, total_steps=4, metrics=METRICS).write_evaluation(2, values)
    (text,) = info.messages
    titles = [title_of(name, METRICS) for name in values if title_of(name, METRICS) != name]
    begin = "[sft] step 2, held out: "
    assert titles and text.startswith(begin) and "\n" not in text and fitted(text) == text, "as a pipe gets it"
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setenv("COLUMNS", "80")
    lines = fitted(text).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) > 2
    parts = [part for line in lines for part in line.removeprefix(begin).strip().split("  ")]
    for part, whole in zip(parts, titles, strict=True):  # all that have a name in words, in their order
        title, _, number = part.rpartition(" ")
        assert title == whole.removeprefix("held-out ") and float(number) >= 0


def test_numbers_and_durations_are_readable():
    assert [readable(x) for x in (1e-5, -2.185e-08, 0.41234567, 999.96, 13456.7, -2e6)] == [
        "1e-05", "0", "0.4123", "1000", "13,457", "-2e+06",
    ]  # fmt: skip
    assert [duration(s) for s in (59.9, 60, 3661, 90061)] == ["59s", "1m 00s", "1h 01m", "25h 01m"]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_records(tmp_path, rank, info):
    world = World(rank=rank, size=2, device=torch.device("cpu"))
    run = run_of(tmp_path, world)
    recorder = Recorder(run, RunConfig(monitors=[]), start_step=0, total_steps=4, metrics=METRICS)
    recorder.write_evaluation(0, {"eval_loss": 2.0})
    recorder.write_training(1, {"loss": 3.0}, seconds=2.0, num_tokens=100, num_rows=8)
    assert (tmp_path / "metrics.jsonl").exists() == (rank == 0)
    if rank == 0:
        first, second = lines(tmp_path)
        assert first["eval_loss"] == 2.0
        assert (second["tokens_per_s"], second["samples_per_s"], second["step_s"]) == (50.0, 4.0, 2.0)
        assert "[sft] 1/4  training loss 3" in info.messages[-1]
