"""Curves: what is drawn, seen in the pixels of the pictures."""

import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from support.recorded_runs import record

from pipeline.reporting.curves import ON_PAPER, Panel, is_noisy, panels_of, smoothed, svg, thinned, write_png
from pipeline.reporting.records import RunRecord


def panels(folder: Path, *more: Path) -> dict[str, Panel]:
    return {panel.name: panel for panel in panels_of([RunRecord(one, one.parent.name) for one in (folder, *more)])}


def marked(file: Path, colour: str) -> int:
    """The number of pixels of a picture that have a colour, or a mixture of it with white."""
    pixels = matplotlib.image.imread(file)[..., :3]
    wanted = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    return int((np.abs(pixels - wanted).max(-1) < 0.12).sum())


def axes_of(panel: Panel):
    axes = Figure().subplots()
    panel.draw(axes, ON_PAPER[2])
    return axes


def test_a_metric_with_a_name_in_words_is_a_panel_with_its_held_out_twin(tmp_path):
    found = panels(record(tmp_path, "ppo"))
    assert found["objective/scores"].title == "score" and found["objective/kl"].title == "KL to the reference (nats)"
    assert found["tokens_per_s"].title == "tokens per second"
    assert not {"step_s", "host_memory_gib", "eval_objective/kl", "time/train_s", "eval_rows"} & set(found)
    groups = [panel.group for panel in found.values()]
    assert groups == sorted(groups, key="objective policy value completions optimizer speed samples".split().index)
    assert len(axes_of(found["objective/kl"]).get_lines()) == 2, "training and held out"


def test_perplexity_which_is_only_held_out_has_a_panel(tmp_path):
    (line,) = axes_of(panels(record(tmp_path, "sft"))["eval_perplexity"]).get_lines()
    assert list(line.get_xdata()) == [0, 3, 6] and line.get_ydata()[0] == pytest.approx(12.3456789)


@pytest.mark.parametrize(("steps", "name"), [(1, "grad_norm"), (1, "eval_perplexity"), (40, "tokens_per_s")])
def test_a_single_point_and_a_long_curve_leave_marks(tmp_path, steps, name):
    """Of numbers without a twin: there is no legend, whose marks would count too."""
    folder = record(tmp_path, "sft", steps=steps, interval=100)
    write_png(tmp_path / "one.png", [panels(folder)[name]])
    assert marked(tmp_path / "one.png", ON_PAPER[2][1 if "eval" in name else 0]) > 15


def test_a_value_of_0_is_drawn(tmp_path):
    panel = panels(record(tmp_path, "ppo"))["policy/clipfrac"]
    axes = axes_of(panel)
    assert list(axes.get_lines()[0].get_ydata()) == [0.0] * 6
    assert axes.get_ylim()[0] < 0 < axes.get_ylim()[1], "the line is inside, not on the frame"
    write_png(tmp_path / "zero.png", [panel])
    assert marked(tmp_path / "zero.png", ON_PAPER[2][0]) > 100


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1000.0, 3.0, 2.0, 2.0], "log"), ([3.0, 2.0, 1.0], "linear"), ([1000.0, 1.0, 1.0, 0.0], "linear")],
)
def test_an_axis_is_logarithmic_where_one_value_dwarfs_the_others_and_all_are_positive(tmp_path, values, scale):
    folder = record(tmp_path, "sft", steps=1, interval=9)
    text = "".join(f'{{"step": {n}, "loss": {value}}}\n' for n, value in enumerate(values))
    (folder / "metrics.jsonl").write_text(text)
    assert axes_of(panels(folder)["loss"]).get_yscale() == scale


def test_several_runs_have_a_colour_each_and_their_names(tmp_path):
    one, two = record(tmp_path / "a", "sft"), record(tmp_path / "b", "sft", steps=30)
    panel = panels(one, two)["loss"]
    axes = axes_of(panel)
    assert {line.get_color() for line in axes.get_lines()} == set(ON_PAPER[2][:2])
    assert len([text.get_text() for text in axes.get_legend().get_texts()]) == 2


def test_a_noisy_curve_is_smoothed_around_its_points_and_a_schedule_is_not():
    noisy = [(n, float(n % 2)) for n in range(100)]
    line = [(n, 2.0 * n) for n in range(100)]
    assert is_noisy(noisy) and not is_noisy(line) and not is_noisy(noisy[:10])
    assert [value for _, value in smoothed(line)] == pytest.approx([value for _, value in line]), "centred: no lag"
    assert max(abs(value - 0.5) for _, value in smoothed(noisy)[5:-5]) < 0.1


def test_a_long_curve_keeps_its_ends_and_its_peaks():
    points = [(n, 0.0) for n in range(100_000)]
    points[54_321] = (54_321, 9.0)
    found = thinned(points)
    assert len(found) <= 310 and {points[0], points[-1], points[54_321]} <= set(found) and found == sorted(found)
    assert thinned(points[:200]) == points[:200]


def test_samples_are_drawn_before_and_after(tmp_path):
    found = panels(record(tmp_path, "ppo"))
    legend = axes_of(found["scores"]).get_legend()
    assert legend and sorted(text.get_text() for text in legend.get_texts()) == ["step 0", "step 6"]
    lines = {line.get_label(): line for line in axes_of(found["score_length"]).get_lines()}
    assert list(lines["step 0"].get_ydata()) == [0.0, 1.0, 2.0] and list(lines["step 6"].get_ydata()) == [3.0, 4.0, 5.0]
    assert list(axes_of(found["score_kl"]).get_lines()[1].get_xdata()) == [0.6, 0.6, 0.6]


def test_an_element_for_the_page_has_its_colours_from_the_style_sheet_and_names_of_its_own(tmp_path):
    panel = panels(record(tmp_path, "ppo"))["objective/kl"]
    one, two = svg(panel, "first"), svg(panel, "second")
    assert one.startswith("<svg") and "http" not in one and "var(--series-1)" in one and "var(--ink)" in one
    assert not re.search(r"#0[123]010[1-6]", one)
    names = [set(re.findall(r'id="([pm][0-9a-f]{8,})"', text)) for text in (one, two)]
    assert names[0] and not names[0] & names[1]
