"""The pictures of the pages on speed, plans and reliability show the numbers of these pages."""

import re
from pathlib import Path
from typing import Any

import pytest
from support.source_tree import ROOT

from benchmarks import pictures
from benchmarks.speed.plan_runs import read_peaks
from pipeline.errors import InputError

MAX_BYTES = 60_000
PAGES = {name: (ROOT / f"docs/why/{name}.md").read_text(encoding="utf-8") for name in pictures.DRAWN}
PLANNED, MEASURED = read_peaks(pictures.PLANNED), read_peaks(pictures.MEASURED)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?", text)]


def rows_beside_another_program(page: str) -> list[list[str]]:
    """The cells of the rows of the table of speed that compare this project with another one."""
    lines = page.partition("| what | models |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[4] and "by hand" not in row[4]]


def test_the_bars_of_speed_are_the_ratios_of_the_page():
    rows = rows_beside_another_program(PAGES["speed"])
    found = pictures.ratios(PAGES["speed"])
    assert [one.ratio for one in found] == [ratio for row in rows for ratio in numbers(row[5])]
    assert len(found) >= 11 and {one.program for one in found} == pictures.PROGRAMS.keys()
    assert all(one.what and "the same" not in one.what + one.model for one in found)


def test_a_ratio_of_the_page_is_that_of_its_two_speeds():
    for row in rows_beside_another_program(PAGES["speed"]):
        here, other, shown = map(numbers, row[3:6])
        others = other if len(shown) == len(other) else [max(other)]  # of two programs the faster one
        for one, two, ratio in zip(here, others, re.findall(r"[\d.]+", row[5]), strict=True):
            digits = len(ratio.partition(".")[2])
            assert one / two == pytest.approx(float(ratio), abs=1.01 * 10**-digits), row


def test_another_number_of_the_page_is_another_bar():
    page = PAGES["speed"]
    (changed,) = set(pictures.ratios(page.replace("| 2.55 |", "| 2.54 |"))) - set(pictures.ratios(page))
    assert changed == pictures.Ratio("PPO step, default settings", "OPT-1.3B", "H100", "DeepSpeed-Chat's loop", 2.54)


def test_what_a_row_lists_is_a_bar_each():
    assert pictures.each_of("rollout of 64, 128 responses", 2) == [
        "rollout of 64 responses",
        "rollout of 128 responses",
    ]
    assert pictures.each_of("SFT, ZeRO-2 and ZeRO-3", 2) == ["SFT, ZeRO-2", "SFT, ZeRO-3"]
    assert pictures.each_of("SFT of 8 rows", 1) == ["SFT of 8 rows"]


def test_the_points_of_plans_are_the_phases_that_the_page_counts():
    found = pictures.peaks(PLANNED, MEASURED)
    kinds = [one.kind for one in found]
    right, counted = len(found) - kinds.count("missed") - kinds.count("again"), len(found) - kinds.count("again")
    assert f"| {right} of {counted} phases right |" in PAGES["plan"] and "Four further phases" in PAGES["plan"]
    assert kinds.count("again") == 4 and kinds.count("held out") > kinds.count("known") > 0
    misses = PAGES["plan"].partition("The three missed phases: ")[2].partition("\n- ")[0]
    shown = {tuple(numbers(miss)[-2:]) for miss in misses.split(";")}
    assert shown == {(round(one.planned, 1), round(one.measured, 1)) for one in found if one.kind == "missed"}


def test_a_phase_far_from_its_plan_is_a_miss():
    run, figures = next(iter(MEASURED.items()))
    phase, gib = next(iter(figures.items()))
    found = pictures.peaks(PLANNED | {run: PLANNED[run] | {phase: gib + 3}}, {run: figures})
    assert found == [pictures.Peak(gib + 3, gib, "missed")]


def test_the_bars_of_reliability_are_the_cases_of_the_page():
    found = pictures.cases(PAGES["reliability"])
    assert len(found) == len(pictures.RESUMED | pictures.HANDLED) and all(one.passed == one.cases for one in found)
    of_the_page = numbers(re.sub(r"`tests/[^`]*`", "", PAGES["reliability"]))
    assert {one.cases for one in found} <= set(of_the_page)
    shown = {one.name: one.cases for one in found}
    expected = {"kill -9": 200, "kill -9, 2 ranks": 20, "damaged checkpoint": 255, "malicious file": 39}
    assert expected.items() <= shown.items() and shown["hostile name"] == 47


@pytest.mark.parametrize(
    ("old", "new", "bar"),
    [
        ("200 of 200", "198 of 200", ("kill -9", 200, 198)),
        ("all 255", "all 254", ("damaged checkpoint", 254, 254)),
        ("47 hostile", "48 hostile", ("hostile name", 48, 48)),
    ],
)
def test_another_number_of_cases_is_another_bar(old: str, new: str, bar: tuple[Any, ...]):
    page = PAGES["reliability"]
    (changed,) = set(pictures.cases(page.replace(old, new))) - set(pictures.cases(page))
    assert (changed.name, changed.cases, changed.passed) == bar


def test_a_fault_that_the_page_does_not_count_is_an_error():
    page = "\n".join(line for line in PAGES["reliability"].splitlines() if "test_two_ranks" not in line)
    with pytest.raises(InputError, match="no number of cases for test_two_ranks"):
        pictures.cases(page)
    with pytest.raises(InputError, match="no table begins with the columns what, models"):
        pictures.ratios(page)


@pytest.mark.parametrize("name", PAGES)
def test_a_picture_is_below_the_table_of_its_page_and_of_its_numbers(name: str):
    """Where it fails: python -m benchmarks.pictures."""
    image = pytest.importorskip("PIL.Image")
    file = ROOT / f"docs/pictures/{name}.png"
    assert re.search(rf"\|\n\n!\[[^\]]{{40,}}\]\(\.\./pictures/{name}\.png\)\n", PAGES[name])
    assert file.stat().st_size <= MAX_BYTES
    with image.open(file) as picture:
        assert picture.text["numbers"] == pictures.numbers_of(pictures.collected()[name])


@pytest.mark.parametrize("name", PAGES)
def test_a_picture_is_drawn_of_what_was_collected(name: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    found = pictures.collected()[name]
    figure = pictures.DRAWN[name](found)
    axes = figure.axes[0]
    if name == "plan":
        drawn = sorted(tuple(point) for marks in axes.collections[1:] for point in marks.get_offsets().tolist())
        assert drawn == sorted((one.measured, one.planned) for one in found)
    else:
        lengths = [one.ratio if name == "speed" else one.cases for one in found]
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(lengths)
    pictures.write(figure, "[]", tmp_path / "picture.png")
    assert 0 < (tmp_path / "picture.png").stat().st_size <= MAX_BYTES
