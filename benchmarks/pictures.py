"""Pictures of the pages docs/why/speed.md, plan.md and reliability.md, from the pages' tables and the raw numbers.

    python -m benchmarks.pictures --output docs/pictures

Each picture is 7 inches wide, so that its text of 14 points stays readable at 700 pixels. Colours are those of Okabe
and Ito, which colour-blind readers can tell apart.
"""

import argparse
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.plan_runs import MEASURED, peaks_in, read_peaks, verdict
from benchmarks.speed.run_list import RUNS
from pipeline.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs/why"
PLANNED = MEASURED.with_name("memory_plans_h200_202611.jsonl.bz2")
WIDTH, DPI, POINTS, NUM_COLOURS = 7.0, 140, 14, 32  # inches, pixels per inch, size of the text, colours of a file
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
# Other programs, as the page names them: the colours of their bars, and the headings above these.
PROGRAMS = {
    "DeepSpeed-Chat's loop": (BLUE, "beside DeepSpeed-Chat's loop"),
    "vLLM": (ORANGE, "beside vLLM"),
    "Trainer, TRL": (GREEN, "beside Trainer or TRL, the faster one"),
    "Trainer": (PURPLE, "beside Trainer"),
    "TRL with vLLM": (GREEN, "beside TRL's GRPO with vLLM"),
    "TRL with Liger": (GREEN, "beside TRL's DPO and SFT with Liger"),
}
NUMBER = r"\d[\d,]*(?:\.\d+)?"
# Tests of the page on reliability whose rows say how many cases there were, and their names in the picture.
RESUMED = {
    "test_fifty_random_moments": "kill -9",
    "test_stopped_at_twenty_random_moments": "SIGTERM",
    "test_two_ranks": "kill -9, 2 ranks",
    "test_cuda_resume": "interrupted on a GPU",
}
HANDLED = {
    "test_input_corpus": "malformed files, rows",
    "test_power_lost_at_any_moment": "power lost in a save",
    "test_damage_is_found_before_anything_is_read": "damaged checkpoint",
    "test_input_configs": "wrong configuration",
    "test_security_names": "hostile name",
    "test_security_artifacts": "malicious file",
    "test_faults_of_one_rank": "rank killed or hanging",
    "test_a_checkpoint_remains_wherever_a_save_is_killed": "killed in a save",
    "test_stops_at_random_times_of_step_3": "SIGTERM, SIGINT, 2 ranks",
    "test_bad_numbers": "NaN or infinity",
}

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A measurement beside another program: what was run, by which model and GPU, the other program, here / other."""

    what: str
    model: str
    gpu: str
    program: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Peak:
    """A phase's peak in GiB, planned and measured; kind: known, held out, missed, or planned again and not counted."""

    planned: float
    measured: float
    kind: str


@dataclass(frozen=True, slots=True)
class Cases:
    """A fault that tests cause: its name, how many cases there were, how many of them passed, its part of the page."""

    name: str
    cases: int
    passed: int
    resumed: bool


def rows_of(page: str, *columns: str) -> list[Row]:
    """Return the rows of the tables that begin with these columns. Raises InputError if there are none."""
    rows, head = list[Row](), list[str]()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and not head:
            head = cells
        elif cells and not set(cells[0]) <= set("-:") and tuple(head[: len(columns)]) == columns:
            rows.append(dict(zip(head, cells, strict=True)))
        head = head if cells else []
    if not rows:
        raise InputError(f"no table begins with the columns {', '.join(columns)}")
    return rows


def number_of(text: str) -> float:
    return float(text.replace(",", ""))


def ratios(page: str) -> list[Ratio]:
    """Return the ratios of the page on speed that have another program beside them, one for each number of a row.

    "The same" is what the row above has, and a number alone is of the program above.
    """
    found, above = list[Ratio](), Row()
    program = ""
    for row in rows_of(page, "what", "models", "GPU"):
        above = {name: above[name] if cell == "the same" else cell for name, cell in row.items()}
        names = re.findall(rf"([A-Za-z][^\d]*?) {NUMBER}", above["other"])
        program = ", ".join(names) if names else program if above["other"] else ""
        if program in PROGRAMS:
            values = re.split(", ", above["ratio"])
            for what, ratio in zip(each_of(above["what"], len(values)), values, strict=True):
                model = re.split("[,;]", above["models"])[0]
                found.append(Ratio(what, model, above["GPU"], program, float(ratio)))
    return found


def each_of(text: str, count: int) -> list[str]:
    """Return a text for each of the things that it lists: "ZeRO-2 and ZeRO-3" are two, "64, 128, 256 rows" three."""
    item = r"[\w-]*\d+"
    listed = re.search(rf"{item}(?:(?:, | and ){item}){{{count - 1}}}", text) if count > 1 else None
    if listed is None:
        return [text] * count
    items = re.split(", | and ", listed.group())
    return [text.replace(listed.group(), one) for one in items]


def peaks(planned: dict[str, Any], measured: dict[str, Any]) -> list[Peak]:
    """Return each measured phase with its first plan, that before its run."""
    held_out = {run.name: run.held_out for run in RUNS}
    found = []
    for run, figures in measured.items():
        for phase, gib in peaks_in(figures).items():
            expected, first = planned[run][phase], planned[run].get(f"{phase}_at_first")
            kind = "held out" if held_out[run] else "known"
            kind = "again" if first is not None else kind if verdict(expected, gib) == "yes" else "missed"
            found.append(Peak(expected if first is None else first, gib, kind))
    return found


def cases(page: str) -> list[Cases]:
    """Return the faults of the page on reliability with their numbers of cases, most first in each of its two parts.

    Raises InputError if the page has no number for a test of RESUMED or HANDLED.
    """
    found = dict[str, Cases]()
    names = RESUMED | HANDLED
    for row in rows_of(page, "what was done", "result", "test"):
        for place, test in enumerate(re.findall("`([^`]+)`", row["test"])):
            key = re.split("[/:]", test)[-1].removesuffix(".py")
            counts = counts_of(row, place) if key in names and key not in found else None
            if counts:
                found[key] = Cases(names[key], *counts, resumed=key in RESUMED)
    if missing := names.keys() - found.keys():
        raise InputError(f"the page has no number of cases for {', '.join(sorted(missing))}")
    return sorted(found.values(), key=lambda one: (not one.resumed, -one.cases))


def counts_of(row: Row, place: int) -> tuple[int, int] | None:
    """Return how many cases a row had and how many passed; place: which of the row's numbers, if each test has one."""
    if shares := re.search(rf"({NUMBER}) of ({NUMBER})", row["result"]):
        passed, count = map(number_of, shares.groups())
        return int(count), int(passed)
    every = re.findall(rf"\ball ({NUMBER})", row["result"]) or re.findall(NUMBER, row["what was done"])[place:]
    return (int(number_of(every[0])),) * 2 if every else None


def new_figure(height: float) -> tuple[Any, Any]:
    """Return an empty figure and its axes, without lines above and on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=POINTS)
    return figure, axes


def draw_speed(found: list[Ratio]) -> Any:
    """Draw a bar for each ratio below the text that says what it is of, and a heading for each other program."""
    headings = dict.fromkeys(one.program for one in found)
    height = 0.55 * len(found) + 0.5 * len(headings)
    figure, axes = new_figure(height + 0.7)
    text: dict[str, Any] = {"fontsize": POINTS, "zorder": 4}  # above the line at 1, which is not seen behind it
    text["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    top = 0.0  # inches from the upper edge
    for program in headings:
        colour, heading = PROGRAMS[program]
        axes.text(0, top + 0.42, heading, weight="bold", **text)
        top += 0.5
        for one in (one for one in found if one.program == program):
            axes.text(0, top + 0.2, f"{one.what}: {one.model}, {one.gpu}", **text)
            axes.barh(top + 0.4, one.ratio, height=0.22, color=colour)
            axes.text(one.ratio + 0.03, top + 0.41, f"{one.ratio:g}", fontsize=POINTS, va="center", weight="bold")
            top += 0.55
    axes.axvline(1, color="black", linewidth=1.5, zorder=3)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, max(one.ratio for one in found) + 0.3), ylim=(height + 0.05, 0.2), yticks=[])
    axes.set_xticks([0, 1, 2, 3], ["0", "1: equal", "2", "3"])
    axes.set_xlabel("speed here / speed of the other program", fontsize=POINTS)
    return figure


def draw_plan(found: list[Peak]) -> Any:
    """Draw planned against measured peaks on logarithmic axes, with the diagonal and the band of 5 % or 1 GiB."""
    figure, axes = new_figure(6.7)
    low, high = 5.5, 150.0
    line = [low * (high / low) ** (n / 200) for n in range(201)]
    room = [max(1.0, 0.05 * gib) for gib in line]
    lower, upper = ([gib + sign * more for gib, more in zip(line, room, strict=True)] for sign in (-1, 1))
    axes.fill_between(line, lower, upper, color="0.88", label="within 5 % or 1 GiB")
    axes.plot(line, line, color="black", linewidth=1)
    looks = {"known": ("o", BLUE, "not held out"), "held out": ("^", ORANGE, "held out"),
             "missed": ("s", RED, "missed"), "again": ("x", "black", "first plan, later planned again")}  # fmt: skip
    for kind, (marker, colour, label) in looks.items():
        points = [one for one in found if one.kind == kind]
        edge = {} if marker == "x" else {"edgecolors": "black", "linewidths": 0.5}
        axes.scatter([one.measured for one in points], [one.planned for one in points], marker=marker, color=colour,
                     s=36, label=f"{label} ({len(points)})", zorder=3, **edge)  # fmt: skip
    ticks = [8, 16, 32, 64, 128]
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log")
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set_xlabel("measured peak, GiB", fontsize=POINTS)
    axes.set_ylabel("planned peak, GiB", fontsize=POINTS)
    axes.legend(fontsize=POINTS, loc="upper left", frameon=False)
    return figure


def draw_reliability(found: list[Cases]) -> Any:
    """Draw a bar for each fault, as long as the number of its cases, on a logarithmic axis."""
    figure, axes = new_figure(0.4 * len(found) + 1.6)
    for resumed, colour, label in ((True, BLUE, "resumed, equal to the last bit"),
                                   (False, ORANGE, "survived, found or refused")):  # fmt: skip
        places = [place for place, one in enumerate(found) if one.resumed is resumed]
        axes.barh(places, [found[place].cases for place in places], height=0.65, color=colour, label=label)
    for place, one in enumerate(found):
        text = f"{one.cases}" if one.passed == one.cases else f"{one.passed} of {one.cases}"
        axes.text(one.cases * 1.06, place, text, fontsize=POINTS, va="center", weight="bold")
    axes.set_yticks(range(len(found)), [one.name for one in found])
    axes.set_xscale("log")
    axes.set(xlim=(1, 1000), ylim=(len(found) - 0.5, -0.5))
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    passed = "all passed" if all(one.passed == one.cases for one in found) else "passed of all"
    axes.set_xlabel(f"cases, {passed} (logarithmic)", fontsize=POINTS)
    figure.legend(fontsize=POINTS, loc="outside upper left", frameon=False)
    return figure


def collected() -> dict[str, Sequence[Ratio | Peak | Cases]]:
    """Return what the pictures show, by their names."""
    speed, reliability = ((PAGES / f"{name}.md").read_text(encoding="utf-8") for name in ("speed", "reliability"))
    plan = peaks(read_peaks(PLANNED), read_peaks(MEASURED))
    return {"speed": ratios(speed), "plan": plan, "reliability": cases(reliability)}


def numbers_of(found: Sequence[Ratio | Peak | Cases]) -> str:
    """Return what a picture shows as a line of JSON."""
    return json.dumps([astuple(one) for one in found])


DRAWN: dict[str, Callable[[Any], Any]] = {"speed": draw_speed, "plan": draw_plan, "reliability": draw_reliability}


def main() -> None:
    """Write the pictures as PNG files; the same numbers are the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/pictures", help="the folder of the pictures")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    for name, found in collected().items():
        write(DRAWN[name](found), numbers_of(found), output / f"{name}.png")


def write(figure: Any, numbers: str, file: Path) -> None:
    """Write a figure as a PNG file of few colours, which is a third as large, with its numbers in its metadata."""
    from PIL import Image, PngImagePlugin

    content, info = io.BytesIO(), PngImagePlugin.PngInfo()
    info.add_text("numbers", numbers, zip=True)
    figure.savefig(content, format="png", dpi=DPI)
    Image.open(content).convert("RGB").quantize(NUM_COLOURS).save(file, optimize=True, pnginfo=info)


if __name__ == "__main__":
    main()
