"""What TensorBoard shows of a run beside its scalars: charts by group, and samples of evaluations as text."""

import json
from pathlib import Path

from support.recorded_runs import HOSTILE, METRICS, samples_at
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from pipeline.training.metrics import SAMPLES_SHOWN, MetricsWriter


def writer(folder: Path, *, stage: str = "ppo", start_step: int = -1) -> MetricsWriter:
    metrics = METRICS[stage]
    return MetricsWriter(folder, stage=stage, metrics=metrics, monitors=["tensorboard"], start_step=start_step)


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    return found


def layout_of(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Group -> title of a chart -> names of its numbers."""
    (event,) = read(folder).Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    return {one.title: {chart.title: list(chart.multiline.tag) for chart in one.chart} for one in layout.category}


def texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    found = read(folder)
    tags = [tag for tag in found.Tags()["tensors"] if tag.startswith("samples/")]
    values = {tag: [(one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors(tag)] for tag in tags}
    return {tag.removesuffix("/text_summary"): value for tag, value in values.items()}


def test_charts_are_laid_out_by_group_with_training_and_held_out_rows_in_one(tmp_path):
    writer(tmp_path).write(1, {"objective/kl": 1.0})
    layout = layout_of(tmp_path)
    assert layout["objective"]["KL to the reference"] == ["objective/kl", "eval_objective/kl"]
    assert layout["policy"]["clipped tokens"] == ["policy/clipfrac", "eval_policy/clipfrac"]
    shown = {tag for charts in layout.values() for tags in charts.values() for tag in tags}
    assert METRICS["ppo"].keys() <= shown | {f"eval_{name}" for name in shown}


def test_a_held_out_number_without_a_twin_has_a_chart(tmp_path):
    writer(tmp_path, stage="sft").write(1, {"loss": 1.0})
    layout = layout_of(tmp_path)
    assert "eval_perplexity" in layout["objective"]["held-out perplexity"]
    assert layout["objective"]["training loss"] == ["loss", "eval_loss"] and "held-out loss" not in layout["objective"]


def test_samples_of_each_evaluation_are_text(tmp_path):
    out = writer(tmp_path)
    for step in (0, 5):
        with (tmp_path / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(samples_at(step, ["kind", HOSTILE, *["calm"] * 20]))
        out.write(step, {"eval_objective/kl": 1.0})
        out.write(step + 1, {"objective/kl": 1.0})
    found = texts(tmp_path)
    assert list(found) == [f"samples/{n + 1}" for n in range(SAMPLES_SHOWN)]
    assert [step for step, _ in found["samples/1"]] == [0, 5]
    assert "It was kind at 5." in found["samples/1"][1][1] and "score 2.5, KL 0.5" in found["samples/1"][1][1]
    assert all(line.startswith("    ") for line in found["samples/2"][0][1].split("\n")), "as code, in Markdown"


def test_a_resumed_run_shows_no_sample_twice(tmp_path):
    first = writer(tmp_path)
    (tmp_path / "samples.jsonl").write_text(samples_at(0, ["kind"]))
    first.write(0, {"eval_objective/kl": 1.0})
    second = writer(tmp_path, start_step=3)
    second.write(4, {"eval_objective/kl": 1.0})
    assert [step for step, _ in texts(tmp_path)["samples/1"]] == [0]
    assert len([json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]) == 1
