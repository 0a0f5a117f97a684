"""Verdicts of evaluations against numpy, the costs of a run, and samples of the evaluation that they are of."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.messages import naming

from pipeline.files import write_json
from pipeline.reporting.tables import number
from pipeline.run.evaluations import (
    MOST_ROWS,
    beside_last,
    compared,
    cost,
    difference_of,
    row_values_line,
    samples,
    standard_error,
    verdict,
)
from pipeline.run.layout import meaning_file, row_values_file
from pipeline.training.progress import readable

METRICS = {
    "eval_perplexity": {"title": "held-out perplexity", "better": -1},
    "accuracy": {"title": "accuracy", "better": 1},
    "objective/scores": {"title": "score", "better": 1},
}


def make_run(
    folder: Path, name: str, values: list[Any], *, rows: list[dict[str, Any]] | None = None, **flags: Any
) -> Path:
    """A run with an evaluation of one metric every ten steps; of each the values of rows, if any, and `eval_rows`."""
    folder.mkdir(exist_ok=True)
    lines = [{"step": 10 * n, name: value, "eval_rows": 16} for n, value in enumerate(values)]
    if rows:
        content = [row_values_line(10 * n, columns, "data") for n, columns in enumerate(rows)]
        row_values_file(folder).write_text("".join(content))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    meaning = {"titles": {name: f"held-out {name}"}, "metrics": METRICS, "rows": "prompts", "compared": [name]}
    write_json(meaning_file(folder), meaning)
    write_json(folder / "config.json", {flag: {"value": value} for flag, value in flags.items()})
    return folder


def of(column: np.ndarray) -> dict[str, list[float]]:
    return {"eval_objective/scores": column.tolist()}


def rows_in(column: np.ndarray, weights: Any = None, data: str = "data") -> Any:
    weights = np.ones(len(column)) if weights is None else weights
    pairs = enumerate(zip(column, weights, strict=True))
    return {(data, n): (float(x), float(weight)) for n, (x, weight) in pairs if x == x}


def test_the_error_of_a_difference_is_paired_where_rows_are_the_same():
    draw = np.random.default_rng(0)
    before, noise = draw.normal(size=40), 0.1 * draw.normal(size=40)
    after = before + noise + 0.01
    difference, error = difference_of(rows_in(before), rows_in(after))
    pairs = after - before
    assert difference == pytest.approx(pairs.mean(), rel=1e-4)
    assert error == pytest.approx(pairs.std(ddof=1) / math.sqrt(40), rel=1e-4)
    difference, apart = difference_of(rows_in(before), rows_in(after, data="other"))
    assert difference == pytest.approx(pairs.mean(), rel=1e-4)
    assert apart == pytest.approx(math.hypot(*(one.std(ddof=1) / math.sqrt(40) for one in (before, after))), rel=0.02)
    assert apart > 5 * error


def test_the_error_of_means_over_tokens_is_that_of_the_bootstrap():
    """Rows have weights, and not each has a value at both ends: resampled rows tell how far the difference varies."""
    draw = np.random.default_rng(1)
    weights, before = draw.integers(1, 30, size=200), draw.normal(size=200)
    after = before + draw.normal(0.2, 0.5, size=200)
    after[draw.random(200) < 0.2] = math.nan
    difference, error = difference_of(rows_in(before, weights), rows_in(after, weights))

    def mean(values, chosen):
        has = chosen[~np.isnan(values[chosen])]
        return (values[has] * weights[has]).sum() / weights[has].sum()

    whole = np.arange(200)
    assert difference == pytest.approx(mean(after, whole) - mean(before, whole), rel=1e-4)
    picks = [draw.integers(200, size=200) for _ in range(4000)]
    spread = np.std([mean(after, pick) - mean(before, pick) for pick in picks])
    assert error == pytest.approx(spread, rel=0.1)


def test_a_difference_below_its_error_is_none(tmp_path):
    """-0.1337 to -0.1339 on 16 responses was told as WORSE, and 13 responses after two steps as better."""
    draw = np.random.default_rng(2)
    before, moved = draw.normal(-0.1337, 0.3, size=16), draw.normal(0.0, 0.02, size=16)
    moved += -0.0002 - moved.mean()
    found = {}
    for name, by in (("same", 0.0), ("better", 0.05), ("worse", -0.05)):
        after = before + moved + by
        run = make_run(
            tmp_path / name, "eval_objective/scores", [before.mean(), after.mean()], rows=[of(before), of(after)]
        )
        found[name] = verdict(run)
    assert {name: one.kind for name, one in found.items()} == {name: name for name in found}
    assert found["same"].words == naming("no difference ... 16 rows") and found["same"].worse == ""
    assert found["better"].words == "better than at the start"
    assert found["worse"].words == naming("WORSE ... held-out eval_objective/scores")
    first, last = before.mean(), before.mean() - 0.0002
    assert found["same"].figures == f"held-out eval_objective/scores {first:.4g} -> {last:.4g} (16 responses)"


@pytest.mark.parametrize("errors", [-2.1, -1.9, 1.9, 2.1])
@pytest.mark.parametrize("stored", ["same rows", "other rows"])
def test_a_difference_of_more_than_two_standard_errors_is_shown(tmp_path, stored, errors):
    """The error is that of the paired difference, or of two means over other rows."""
    signs = np.resize([1.0, -1.0], 16)
    name, (before, after) = "eval_objective/scores", (signs, (2.0 if stored == "same rows" else -1.0) * signs)
    parts = [after - before] if stored == "same rows" else [before, after]
    error = math.hypot(*(one.std(ddof=1) / math.sqrt(16) for one in parts))
    run = make_run(tmp_path, name, [0.0, errors * error])
    rows = ["data", "data" if stored == "same rows" else "other"]
    columns = zip((before, after + errors * error), rows, strict=True)
    row_values_file(run).write_text(
        "".join(row_values_line(10 * n, of(one), data) for n, (one, data) in enumerate(columns))
    )
    expected = "same" if abs(errors) < 2 else "better" if errors > 0 else "worse"
    assert verdict(run).kind == expected


def test_few_rows_that_all_move_alike_show_nothing(tmp_path):
    """DPO's pairs are ties at first: two of them that are won are two tosses of a coin."""
    for number_of_rows, kind in ((5, "same"), (6, "better")):
        rows = [{"eval_accuracy": [value] * number_of_rows} for value in (0.5, 1.0)]
        assert verdict(make_run(tmp_path / kind, "eval_accuracy", [0.5, 1.0], rows=rows)).kind == kind


def test_few_rows_that_move_nearly_alike_show_nothing(tmp_path):
    """Two losses of a run of two steps: their difference is 3 times its error."""
    for number_of_rows, kind in ((1, "same"), (2, "same"), (5, "same"), (6, "better")):
        after = [2.9849, 2.9922, 2.985, 2.992, 2.985, 2.992][:number_of_rows]
        rows = [{"eval_loss": one, "weight": [1] * number_of_rows} for one in ([3.0] * number_of_rows, after)]
        perplexities = [math.exp(np.mean(one["eval_loss"])) for one in rows]
        run = make_run(tmp_path / str(number_of_rows), "eval_perplexity", perplexities, rows=rows)
        assert verdict(run).kind == kind


def test_rows_without_a_weight_are_no_rows(tmp_path):
    """Six rows would show the difference, five do not: the sixth has no trained token."""
    for weight, kind in ((0, "same"), (1, "better")):
        rows = [{"eval_loss": [loss] * 6, "weight": [1] * 5 + [weight]} for loss in (3.0, 2.9)]
        run = make_run(tmp_path / kind, "eval_perplexity", [math.exp(3.0), math.exp(2.9)], rows=rows)
        assert verdict(run).kind == kind


def test_the_perplexity_is_judged_by_the_losses_of_rows(tmp_path):
    draw = np.random.default_rng(3)
    before, weights = draw.normal(3.0, 0.5, size=30), draw.integers(1, 9, size=30)
    losses = [before, before - 0.1 + draw.normal(0, 0.05, size=30)]
    rows = [{"eval_loss": one.tolist(), "weight": weights.tolist()} for one in losses]
    perplexities = [math.exp(np.average(one, weights=weights)) for one in losses]
    run = make_run(tmp_path, "eval_perplexity", perplexities, rows=rows)
    assert verdict(run).kind == "better"
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert standard_error(run, line, "eval_perplexity") / perplexities[1] == pytest.approx(
        difference_of({}, rows_in(losses[1], weights))[1], rel=1e-4
    )


def test_a_run_without_the_values_of_its_rows_is_not_judged(tmp_path):
    """Also where the samples have them, or the accuracy has a binomial error."""
    for end in (0.75, 1.0, 0.0):
        assert verdict(make_run(tmp_path / f"{end}", "eval_accuracy", [0.5, end])).kind == "unknown"
    unknown = verdict(make_run(tmp_path / "x", "eval_objective/scores", [0.5, 0.25]))
    assert unknown.kind == "unknown" and unknown.words.startswith("unknown whether better or worse")
    for step, scores in ((0, range(16)), (10, range(100, 116))):
        with (tmp_path / "x" / "samples.jsonl").open("a") as file:
            lines = [{"step": step, "prompt": f"p{n}", "score": score} for n, score in enumerate(scores)]
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    assert verdict(make_run(tmp_path / "x", "eval_objective/scores", [7.5, 107.5])).kind == "unknown"


def test_an_evaluation_of_one_row_without_stored_values_shows_nothing(tmp_path):
    lines = [{"step": step, "eval_objective/scores": score, "eval_rows": 1} for step, score in ((0, 0.5), (10, 0.25))]
    run = make_run(tmp_path, "eval_objective/scores", [])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"step": line["step"], "prompt": "p", "score": line["eval_objective/scores"]} for line in lines]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verdict(run).kind == "unknown"


def test_what_is_no_number_or_stands_alone(tmp_path):
    ended = verdict(make_run(tmp_path / "a", "eval_perplexity", [3.0, None]))
    assert (ended.kind, ended.figures) == ("worse", "held-out eval_perplexity 3 -> nan (16 responses)")
    began = verdict(make_run(tmp_path / "c", "eval_perplexity", [None, 3.0]))
    assert (began.kind, began.figures) == ("", "held-out eval_perplexity nan -> 3 (16 responses)")
    alone = verdict(make_run(tmp_path / "b", "eval_perplexity", [3.0]))
    assert (alone.kind, alone.words, alone.figures) == ("", "", "held-out eval_perplexity 3 (16 responses)")
    assert verdict(tmp_path).figures == "", "no run"


@pytest.mark.parametrize(
    ("masked", "rows"), [((0, 0), "16 responses"), ((3, 0), "16 responses"), ((1, 3), "13 of 16 responses")]
)
def test_the_last_line_counts_the_rows_with_a_value(tmp_path, masked, rows):
    """A reward function gave some responses of the last evaluation no value; those of the first do not count."""
    run = make_run(tmp_path, "eval_objective/scores", [0.25, 0.5])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"eval_rows_masked": count} for line, count in zip(lines, masked, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verdict(run).figures == f"held-out eval_objective/scores 0.25 -> 0.5 ({rows})"


def test_a_run_that_keeps_its_best_model_is_judged_by_that(tmp_path):
    values = [0.5, 1.0, 0.9375, 0.25]
    # Other rows win at the end: the difference is that of two means of 16 tosses.
    won = [[float(n < value * 16) for n in range(16)] for value in values[:3]] + [[float(n >= 12) for n in range(16)]]
    rows = [{"eval_accuracy": one} for one in won]
    (kept,) = compared(make_run(tmp_path / "a", "eval_accuracy", values, rows=rows, keep_best=True), ["eval_accuracy"])
    assert (kept.first, kept.last, kept.verdict) == (0.5, 1.0, "better")
    (last,) = compared(make_run(tmp_path / "b", "eval_accuracy", values, rows=rows), ["eval_accuracy"])
    assert (last.first, last.last, last.verdict) == (0.5, 0.25, "same")
    assert beside_last(tmp_path / "a", "eval_accuracy", 10) == naming("by more than ... rows can show")
    make_run(tmp_path / "a", "eval_accuracy", values[:3], rows=rows[:3], keep_best=True)
    assert beside_last(tmp_path / "a", "eval_accuracy", 10) == naming("by no more than ... rows can show")
    assert beside_last(tmp_path / "a", "eval_accuracy", 20) == "", "it is the last one"


def test_so_many_rows_are_kept_at_most(tmp_path):
    line = json.loads(row_values_line(0, {"eval_accuracy": [float(n) for n in range(2 * MOST_ROWS + 1)]}, "data"))
    assert line["every"] == 3 and line["eval_accuracy"] == [float(n) for n in range(0, 2 * MOST_ROWS + 1, 3)]


def test_the_cost_is_that_of_all_starts_and_ranks(tmp_path):
    """Two ranks for 90 minutes, behind a pause four ranks for 30, and a third start without a step so far."""
    assert cost(tmp_path) == ""
    times = {0: 1000.0, 5: 6400.0, 6: 90_700.0, 9: 91_800.0}
    lines = [{"step": step, "time": time, "num_tokens": 1e6 * step} for step, time in times.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(meaning_file(tmp_path), {"starts": [[-1, 2, 1000.0], [5, 4, 90_000.0], [9, 8, 95_000.0]]})
    assert cost(tmp_path) == "5 GPU hours, 9M tokens"
    write_json(tmp_path / "env.json", {"device": "cpu"})
    assert cost(tmp_path) == "5 hours of CPU ranks, 9M tokens"
    write_json(meaning_file(tmp_path), {"starts": "x"})
    assert cost(tmp_path) == "9M tokens"


def test_a_number_of_more_than_six_digits_is_short():
    assert [readable(value) for value in (12345.6, 999_999.0, 1.23456e53)] == ["12,346", "999,999", "1.235e+53"]
    assert [number(value) for value in (12345.6, 999_999.0, 1.23456e53)] == ["12,346", "999,999", "1.235e+53"]


def test_the_samples_of_an_earlier_model_are_those_of_its_last_evaluation(tmp_path):
    """A checkpoint that is exported, or the best model that is kept, is older than the last evaluation."""
    rows = [{"step": step, "prompt": f"p{n}", "response": f"{step}-{n}"} for step in (0, 4, 8) for n in range(2)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, found in ((8, 8), (7, 4), (4, 4), (3, 0)):
        assert [row["response"] for row in samples(tmp_path, step)] == [f"{found}-0", f"{found}-1"]


def test_a_number_has_the_rows_of_the_evaluation_that_it_is_of(tmp_path):
    lines = [{"step": 0, "eval_loss": 2.0, "eval_rows": 7.0}, {"step": 4, "eval_loss": 1.0, "eval_rows": 7.0},
             {"step": 8, "eval_bleu": 3.0, "eval_rows": 9.0}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = compared(tmp_path, ["eval_loss"])
    assert (found.first, found.last, found.num_rows) == (2.0, 1.0, 7.0)
