"""Curves of metrics and pictures of samples: SVG for the page, whose style sheet has the colours, and PNG files.

This is the only module that imports matplotlib; it runs in the report's own process.
"""

import functools
import io
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.files import write_bytes
from pipeline.reporting.records import Point, RunRecord
from pipeline.run.evaluations import is_number

matplotlib.use("Agg")
HIDDEN_GROUPS = ("memory", "progress")  # shown as numbers, not as curves
HIDDEN_UNITS = ("s", "rows/s")  # seconds are shown as shares of the time; rows/s follow from tokens/s
GROUPS = {
    "objective": "Objective", "policy": "Policy", "value": "Critic", "completions": "Responses",
    "optimizer": "Optimizer", "speed": "Speed",
}  # fmt: skip
MOST_POINTS = 300  # points of a curve in the page; more are not visible
SMOOTHED_FROM = 20  # points from which on a noisy curve is smoothed
NOISE = 0.1  # share of points above or below both neighbours, from which on a curve is smoothed
FLAT = 1e-3  # range of a curve, as a share of its values, below which it is drawn flat
LOG_FACTOR = 30.0  # ratio of the largest to the median value from which on an axis is logarithmic
# Colours of text, of grid lines, and of the runs; in the page they are replaced by those of its style sheet.
ON_PAPER = ("#1b1f24", "#d9dde3", ("#2563eb", "#d9480f", "#0f8a5f", "#9333ea", "#b7791f", "#0891b2"))
IN_PAGE = ("#010101", "#020202", ("#030101", "#030102", "#030103", "#030104", "#030105", "#030106"))
VARIABLES = dict(zip((*IN_PAGE[:2], *IN_PAGE[2]), ("ink", "grid", *(f"series-{n}" for n in range(1, 7))), strict=True))
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9.0, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.titlelocation": "left", "axes.titlesize": 9.5, "axes.titleweight": "bold",
    "legend.frameon": False, "legend.fontsize": 8.0, "figure.dpi": 110.0, "axes.formatter.useoffset": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of the runs of a chapter; `draw` takes its axes and the colours of the runs."""

    group: str
    name: str
    title: str
    draw: Callable[[Axes, Sequence[str]], None]


def panels_of(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return the curves of all metrics with a name in words, training and held-out rows in one, by group."""
    declared = {name: metric for run in runs for name, metric in run.metrics.items()}
    panels = [panel for name, metric in declared.items() for panel in curve_of(runs, name, metric, declared)]
    order = list(GROUPS)
    panels.sort(key=lambda panel: order.index(panel.group) if panel.group in order else len(order))
    return panels + list(sample_panels(runs))


def curve_of(
    runs: Sequence[RunRecord], name: str, metric: Mapping[str, Any], declared: Mapping[str, Any]
) -> Iterator[Panel]:
    """Yield the panel of a metric, if it is shown as a curve and has a point."""
    group, is_twin = str(metric.get("group")), name.startswith("eval_") and name.removeprefix("eval_") in declared
    if not metric.get("title") or group in HIDDEN_GROUPS or metric.get("unit") in HIDDEN_UNITS or is_twin:
        return
    points = [(run.points(name), run.points(f"eval_{name}")) for run in runs]
    if not any(training or held_out for training, held_out in points):
        return
    if name.startswith("eval_"):
        points = [([], held_out) for held_out, _ in points]
    labels = [run.label for run in runs] if len(runs) > 1 else []

    def draw(axes: Axes, colours: Sequence[str]) -> None:
        draw_curves(axes, points, colours, labels)
        axes.set_xlabel("step")

    yield Panel(group, name, with_unit(metric), draw)


def with_unit(metric: Mapping[str, Any]) -> str:
    """Return the title of a metric with its unit, where it has one that the title does not say."""
    title, unit = str(metric["title"]), str(metric.get("unit", "number"))
    return title if unit.replace("/s", " per second") in ("number", "", title) else f"{title} ({unit})"


def draw_curves(
    axes: Axes, points: Sequence[tuple[list[Point], list[Point]]], colours: Sequence[str], labels: Sequence[str]
) -> None:
    """Draw training points raw and smoothed, held-out ones with marks; of several runs one colour for each."""
    for number, (training, held_out) in enumerate(points):
        colour, label = colours[number % len(colours)], labels[number] if labels else ""
        if training:
            is_smoothed, mark = is_noisy(training), "o" if len(training) < SMOOTHED_FROM else ""
            raw = {"lw": 0.9, "alpha": 0.35} if is_smoothed else {"lw": 1.7, "label": label or "training"}
            draw_line(axes, training, c=colour, marker=mark, ms=3.5, **raw)
            if is_smoothed:
                draw_line(axes, smoothed(training), c=colour, lw=1.7, label=label or "training, smoothed")
        if held_out:
            shade, name = (colour, "" if training else label) if labels else (colours[1], "held out")
            line = ":" if len(held_out) > 2 else ""
            draw_line(axes, held_out, c=shade, marker="D", ms=4.5, ls=line, lw=1.1, label=name)
    values = [value for pair in points for part in pair for _, value in part]
    if min(values) > 0 and max(values) > LOG_FACTOR * statistics.median(values):
        axes.set_yscale("log")
    elif max(values) - min(values) < FLAT * max(map(abs, values)):
        axes.set_ylim(*sorted((0.9 * values[0], 1.1 * values[0])))  # a line, not the rounding of its last digits
    if len([line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]) > 1:
        axes.legend()


def draw_line(axes: Axes, points: Sequence[Point], **look: Any) -> None:
    """Draw points as a line, with at most as many as are visible."""
    shown = thinned(points)
    axes.plot([step for step, _ in shown], [value for _, value in shown], **look)


def is_noisy(points: Sequence[Point]) -> bool:
    """Return True if a curve is so noisy that an average shows more; a schedule is not noisy."""
    values = [value for _, value in points]
    moves = [after - before for before, after in pairwise(values)]
    return len(points) >= SMOOTHED_FROM and sum(a * b < 0 for a, b in pairwise(moves)) > NOISE * len(moves)


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return centred moving averages over about a tenth of the points, so that they do not lag."""
    half = max(1, len(points) // 20)
    sums = list(accumulate((value for _, value in points), initial=0.0))
    reach = [min(half, n, len(points) - 1 - n) for n in range(len(points))]  # to both sides alike, also at the ends
    return [(points[n][0], (sums[n + r + 1] - sums[n - r]) / (2 * r + 1)) for n, r in enumerate(reach)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most as many points as are visible: the lowest and the highest of each stretch of a long curve."""
    size = math.ceil(2 * len(points) / MOST_POINTS)
    if size < 3:
        return list(points)
    extremes = set[Point]()
    for start in range(0, len(points), size):
        part = points[start : start + size]
        extremes |= {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
    return sorted({points[0], *extremes, points[-1]})


def sample_panels(runs: Sequence[RunRecord]) -> Iterator[Panel]:
    """Yield pictures of the scores in the first and last evaluation of one run: alone, by length, and by KL."""
    if len(runs) > 1 or not runs[0].samples:
        return
    samples = [one for one in runs[0].samples if is_number(one.get("score"))]
    steps = sorted({one["step"] for one in samples})
    parts = {
        f"step {step}": [one for one in samples if one["step"] == step] for step in steps[:: max(1, len(steps) - 1)]
    }
    if not parts:
        return

    def histogram(axes: Axes, colours: Sequence[str]) -> None:
        scores = [[one["score"] for one in part] for part in parts.values()]
        axes.hist(scores, bins=24, histtype="stepfilled", alpha=0.5, color=colours[: len(scores)], label=list(parts))
        axes.set(xlabel="score", ylabel="responses")
        axes.legend()

    def against(other: str, title: str) -> Callable[[Axes, Sequence[str]], None]:
        def scatter(axes: Axes, colours: Sequence[str]) -> None:
            for (label, part), colour in zip(parts.items(), colours, strict=False):
                pairs = [(one[other], one["score"]) for one in part if is_number(one.get(other))][:MOST_POINTS]
                axes.plot(
                    *(zip(*pairs, strict=True) if pairs else ((), ())), "o", ms=3, alpha=0.5, c=colour, label=label
                )
            axes.set(xlabel=title, ylabel="score")
            axes.legend()

        return scatter

    yield Panel("samples", "scores", "Scores of the held-out responses", histogram)
    yield Panel("samples", "score_length", "Score against length", against("tokens", "response length (tokens)"))
    if any("kl" in one for one in samples):
        yield Panel("samples", "score_kl", "Score against KL", against("kl", "KL to the reference (nats)"))


def style(axes: Axes, ink: str, grid: str) -> None:
    """Colour the parts of a picture that are not data."""
    axes.grid(color=grid, lw=0.6)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", nbins=6)
    if axes.get_yscale() == "linear":
        axes.locator_params(axis="y", nbins=5)
    axes.tick_params(which="both", colors=ink, length=0)
    for spine in axes.spines.values():
        spine.set_color(grid)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(ink)
    for text in legend.get_texts() if (legend := axes.get_legend()) else ():
        text.set_color(ink)


@functools.cache  # a report draws each panel once to see whether it works, and once for the page
def svg(panel: Panel, salt: str) -> str:
    """Return a panel as an SVG element that takes its colours from the page. salt: its name in the page."""
    ink, grid, colours = IN_PAGE
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(4.2, 2.5))
        axes = figure.subplots(gridspec_kw={"left": 0.14, "right": 0.99, "bottom": 0.17, "top": 0.93})
        panel.draw(axes, colours)
        style(axes, ink, grid)
        figure.patch.set_visible(False)
        axes.patch.set_visible(False)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = content.getvalue()
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])  # an element of HTML needs none
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return re.sub(r"<svg [^>]*viewBox", '<svg role="img" viewBox', text, count=1)


def write_png(file: Path, panels: Sequence[Panel]) -> None:
    """Write the panels of a group as one picture."""
    ink, grid, colours = ON_PAPER
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        width, height = 4.2 * columns, 2.8 * rows
        figure = Figure(figsize=(width, height))
        edges = {"left": 0.6 / width, "right": 1 - 0.1 / width, "bottom": 0.5 / height, "top": 1 - 0.3 / height}
        edges |= {"wspace": 0.2, "hspace": 0.4}
        grid_of_axes = list(figure.subplots(rows, columns, squeeze=False, gridspec_kw=edges).flat)
        for axes, panel in zip(grid_of_axes, panels, strict=False):
            panel.draw(axes, colours)
            axes.set_title(panel.title)
            style(axes, ink, grid)
        for axes in grid_of_axes[len(panels) :]:
            axes.remove()
        content = io.BytesIO()
        figure.savefig(content, format="png")
    write_bytes(file, content.getvalue())
