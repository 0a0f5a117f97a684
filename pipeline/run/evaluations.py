"""Read back evaluations, samples, costs and flags of a run, for its last line, model card, report and for plans.

The module imports no torch.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.configuration.origins import Origin
from pipeline.errors import counted
from pipeline.files import parse_json, read_object
from pipeline.run.layout import environment_file, meaning_file, row_values_file

TRUNCATED = "eval_completions/truncated_fraction"
TINY = 1e-6  # a smaller difference of two sums is rounding, and shown as 0
MANY_TRUNCATED = 0.5  # share of truncated answers from which the limit is too short for the start model; chosen by hand
ERRORS = 2.0  # standard errors that a difference must exceed to be shown
ALIKE = 6  # rows that can show a difference: that many coin tosses agree once in 32 times
MOST_ROWS = 1_000  # values that are stored of an evaluation; of more rows only every second, third, ...
WEIGHT = "weight"  # key in a line of row values: weight of each row in a mean, its tokens or its responses with a value
EXPONENTIALS = {"eval_perplexity": "eval_loss"}  # metrics that are exp of a mean over rows
# Metrics of an evaluation that are means of a field of its samples.
OF_SAMPLES = {"eval_objective/kl": "kl", "eval_completions/mean_length": "tokens"}
PHRASES = {
    "worse": "WORSE than at the start: {worse}",
    "better": "better than at the start",
    "same": "no difference that {rows} can show",
    "unknown": "unknown whether better or worse: the values of its rows were not stored",
}
Settings = dict[str, tuple[Any, Origin]]  # value and origin of each flag of a run
Rows = Mapping[tuple[str, int], tuple[float, float]]  # a held-out row -> its value, and the weight of that


@dataclass(frozen=True, slots=True)
class Change:
    """A number of the evaluations of a run, before and after.

    name: name of the metric.
    title: the name in words.
    unit: unit of the number.
    first: the number at the first evaluation; NaN if it was not finite.
    last: the number at the last one, or with `--keep-best` at the best one; None with one evaluation alone.
    num_rows: held-out rows of the last one.
    verdict: a key of PHRASES, by what the rows can show; "" if the number has no direction or was not compared.
    """

    name: str
    title: str
    unit: str
    first: float
    last: float | None
    num_rows: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a run by its evaluations.

    kind: a key of PHRASES, the first that any of its numbers has; "" if none was compared.
    words: the kind for people.
    figures: the numbers at both ends for people.
    worse: the numbers that are worse, for people.
    """

    kind: str
    words: str
    figures: str
    worse: str


def verdict(run_dir: Path, *, step: float = math.inf) -> Verdict:
    """Return the verdict on a run by its evaluations up to `step`.

    Its last line, report and model card print it, and the proposed next command
    depends on it. The figures are `held-out
    perplexity 15.4 -> 5.1 (25 sequences)`.
    """
    meaning, ends = read_object(meaning_file(run_dir)), comparable(evaluations(run_dir, step))
    titles: dict[str, str] = meaning.get("titles", {})
    changes = compared(run_dir, [*titles], step=step)
    worse = [titles[one.name] for one in changes if one.verdict == "worse"]
    if ends and ends[-1].get(TRUNCATED) == 1.0 and not number_of(ends[0].get(TRUNCATED)) >= MANY_TRUNCATED:
        worse.append("every answer is truncated at --max-answer-seq-len")
    kinds = ["worse"] * len(worse) + [one.verdict for one in changes]
    kind = next((one for one in PHRASES if one in kinds), "")
    numbers = [[f"{without_rounding(x):.4g}" for x in (one.first, one.last) if x is not None] for one in changes]
    figures = ", ".join(f"{titles[one.name]} {' -> '.join(both)}" for one, both in zip(changes, numbers, strict=True))
    num_rows = number_of(ends[-1].get("eval_rows")) if ends else math.nan
    if figures and num_rows == num_rows:
        masked = number_of(ends[-1].get("eval_rows_masked", 0))
        rows = str(meaning.get("rows", "rows")).replace("prompts", "responses")  # of which a prompt may have several
        figures += f" ({f'{num_rows - masked:g} of ' if masked else ''}{num_rows:g} {rows})"
    shown = counted(int(num_rows), "row") if num_rows == num_rows else "its rows"
    words = PHRASES.get(kind, "").format(worse=", ".join(worse), rows=shown)
    return Verdict(kind, words, figures, ", ".join(worse))


def compared(run_dir: Path, names: Sequence[str], *, step: float = math.inf) -> list[Change]:
    """Return these numbers at the first and the last evaluation of the same rows, up to `step`."""
    meaning, lines, changes = read_object(meaning_file(run_dir)), evaluations(run_dir, step), list[Change]()
    keeps_best = run_flags(run_dir).get("keep_best")
    for name in names:
        if ends := comparable([line for line in lines if name in line]):
            metric, values, last = described(meaning, name), [number_of(line[name]) for line in ends], ends[-1]
            if keeps_best and metric["better"]:
                last = ends[-max((metric["better"] * x, -n) for n, x in enumerate(values) if n == 0 or x == x)[1]]
            is_comparable = metric["better"] and last is not ends[0] and values[0] == values[0]
            kind = verdict_on(run_dir, name, ends[0], last, better=metric["better"]) if is_comparable else ""
            after, num_rows = number_of(last[name]) if len(ends) > 1 else None, last.get("eval_rows")
            changes.append(Change(name, metric["title"], metric["unit"], values[0], after, num_rows, kind))
    return changes


def beside_last(run_dir: Path, name: str, step: int) -> str:
    """Return in words whether the last evaluation differs from that of `step` by more than the rows can show."""
    lines = comparable([line for line in evaluations(run_dir) if name in line])
    for line in (line for line in lines[:-1] if line["step"] == step):
        kind = verdict_on(run_dir, name, line, lines[-1], better=1)
        said = {"same": "differs by no more", "unknown": "may differ by no more"}.get(kind, "differs by more")
        return f"; the last one {said} than the held-out rows can show"
    return ""


def verdict_on(run_dir: Path, name: str, first: dict[str, Any], last: dict[str, Any], *, better: int) -> str:
    """Return how a number of an evaluation differs from that of another, as a key of PHRASES.

    Two standard errors of the paired difference count; where a number has no stored values of rows, they are unknown.
    Fewer than ALIKE rows show no difference.
    """
    if (after := number_of(last[name])) != after:
        return "worse"
    before, now = (rows_of(run_dir, line, name) for line in (first, last))
    if not (before and now):
        return "unknown"
    difference, error = difference_of(before, now)
    # The error of a single row is NaN, which nothing exceeds; `max` returns a NaN that stands first.
    is_shown = abs(difference) > max(ERRORS * error, TINY) and min(len(before), len(now)) >= ALIKE
    return "same" if not is_shown else "better" if better * difference > 0 else "worse"


def difference_of(before: Rows, after: Rows) -> tuple[float, float]:
    """Return the difference of two weighted means over rows, and its standard error; NaN for one row alone.

    The error is the root of the summed squares of each row's contribution to the difference. With the same rows it is
    that of the paired difference, without common rows that of two means. It is also right in between.
    """
    added, difference = defaultdict[tuple[str, int], float](float), 0.0
    for sign, rows in ((-1, before), (1, after)):
        total = sum(weight for _, weight in rows.values()) or 1.0
        mean = sum(value * weight for value, weight in rows.values()) / total
        difference += sign * mean
        for row, (value, weight) in rows.items():
            added[row] += sign * weight * (value - mean) / total
    count = min(len(rows) for rows in (before, after) if rows)
    return difference, math.sqrt(sum(x * x for x in added.values()) * count / (count - 1)) if count > 1 else math.nan


def standard_error(run_dir: Path, line: dict[str, Any], name: str) -> float:
    """Return the standard error of a number of an evaluation; NaN if the run has not stored what it depends on.

    Without values of rows, that of a mean comes from the samples, if each has another prompt.
    """
    num_rows, value = number_of(line.get("eval_rows")), number_of(line[name])
    if rows := rows_of(run_dir, line, name):
        return difference_of({}, rows)[1] * (value if name in EXPONENTIALS else 1.0)
    answers = samples(run_dir, line["step"]) if name in OF_SAMPLES else []
    values = [row[OF_SAMPLES[name]] for row in answers if row[OF_SAMPLES[name]] is not None]
    is_whole = len(answers) == len(values) == num_rows == len({row["prompt"] for row in answers})
    return statistics.stdev(values) / math.sqrt(num_rows) if is_whole and num_rows > 1 else math.nan


def row_values_line(step: int, values: Mapping[str, Sequence[float]], rows: str) -> str:
    """Return the line of `row_values_file` of an evaluation.

    Args:
        values: metric -> its value for each held-out row in order, NaN without one; WEIGHT -> the rows' weights.
        rows: hash that identifies these rows.
    """
    every = math.ceil(max(map(len, values.values())) / MOST_ROWS)
    sampled = {name: column[::every] for name, column in values.items()}
    short = {name: [float(f"{x:.6g}") if is_number(x) else None for x in column] for name, column in sampled.items()}
    return json.dumps({"step": step, "rows": rows, "every": every, **short}, separators=(",", ":")) + "\n"


def rows_of(run_dir: Path, line: Mapping[str, Any], name: str) -> Rows:
    """Return the held-out rows that have a value of a metric in an evaluation; {} if values were not stored."""
    *_, record = {}, *json_lines(row_values_file(run_dir), having=f'{{"step":{line.get("step")},'.encode())
    columns = (record.get(key) for key in (EXPONENTIALS.get(name, name), WEIGHT))
    values, weights = (column if isinstance(column, list) else [] for column in columns)
    pairs = enumerate(zip(map(number_of, values), map(number_of, weights or [1] * len(values)), strict=False))
    source = f"{record.get('rows')}/{record.get('every')}"
    return {(source, n): (value, weight) for n, (value, weight) in pairs if value == value and weight > 0}


def described(meaning: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return title, unit and direction of a metric, also of `eval_` ones; the title is the name if none is declared."""
    declared = metrics if isinstance(metrics := meaning.get("metrics"), dict) else {}
    metric = declared.get(name) or declared.get(name.removeprefix("eval_")) or {}
    return {"title": metric.get("title") or name, "unit": metric.get("unit", ""), "better": metric.get("better", 0)}


def evaluations(run_dir: Path, step: float = math.inf) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that hold an evaluation, up to `step`; null where a number was not finite."""
    # Most lines are of training steps: they are not parsed.
    return [line for line in metrics_of(run_dir, having=b'"eval_') if number_of(line.get("step", 0)) <= step]


def comparable(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the evaluations of as many held-out rows as the last one: others, before other flags, are of other rows.

    An evaluation without a number counts as one of these.
    """
    num_rows = lines[-1].get("eval_rows") if lines else None
    return [line for line in lines if line.get("eval_rows", num_rows) == num_rows]


def cost(run_dir: Path) -> str:
    """Return `1.5 GPU hours, 12.3M tokens` of a run so far, without lost steps; "" if its files do not tell.

    Hours are those of all ranks, from the start of their processes to their last line of metrics.
    """
    starts, lines = read_object(meaning_file(run_dir)).get("starts", []), list(metrics_of(run_dir))
    hours, tokens = 0.0, max((number_of(line.get("num_tokens", 0)) for line in lines), default=0.0)
    with suppress(TypeError, ValueError, KeyError):  # a file that `write_meaning` has not written
        for (step, ranks, began), (end, *_) in zip(starts, [*starts[1:], [math.inf]], strict=True):
            hours += ranks * max((line["time"] - began for line in lines if step < line["step"] <= end), default=0)
    device = "hours of CPU ranks" if read_object(environment_file(run_dir)).get("device") == "cpu" else "GPU hours"
    parts = [f"{hours / 3600:.2g} {device}" if hours else "", f"{tokens / 1e6:.3g}M tokens" if tokens else ""]
    return ", ".join(filter(None, parts))


def without_rounding(value: float) -> float:
    """Return 0 for a value within the rounding of a sum, such as the KL of a policy to itself."""
    return 0.0 if abs(value) < TINY else value


def number_of(value: Any) -> float:
    """Return a finite number, NaN for anything else that a file may hold."""
    return float(value) if is_number(value) else math.nan


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def json_lines(file: Path, *, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; broken lines, such as an incomplete last one, are left out.

    having: bytes that a line must contain to be read.
    """
    with suppress(OSError):
        # Not splitlines: it also splits at other characters, which a sample may contain.
        for line in file.read_bytes().split(b"\n") if file.is_file() else ():
            with suppress(ValueError):
                if having in line and isinstance(value := parse_json(line), dict):
                    yield value


def metrics_of(run_dir: Path, *, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl, like `json_lines`."""
    return json_lines(run_dir / "metrics.jsonl", having=having)


def all_samples(run_dir: Path) -> list[dict[str, Any]]:
    """Return the samples of all evaluations, in order; [] if the stage writes none."""
    return list(json_lines(run_dir / "samples.jsonl"))


def samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of the last evaluation up to `step`, in order; [] if the stage writes none."""
    rows = [row for row in all_samples(run_dir) if row["step"] <= step]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def recorded_seconds(run_dir: Path) -> float:
    """Return the seconds from the first to the last metrics of the last run in a folder; 0 without a run."""
    times = [line["time"] for line in metrics_of(run_dir, having=b'"time"')]
    return float(times[-1] - times[0]) if times else 0.0


def memory_peaks(run_dir: Path) -> dict[str, float]:
    """Return the memory peaks of a run in GiB: of each phase on a GPU, and `host_memory` of a process."""
    peaks: dict[str, float] = {}
    for line in metrics_of(run_dir, having=b"_gib"):
        for name, value in line.items():
            if name.startswith(("memory/", "host_memory")) and value is not None:
                phase = name.removeprefix("memory/").removesuffix("_gib")
                peaks[phase] = max(value, peaks.get(phase, 0.0))
    return peaks


def unfinished_answers(run_dir: Path) -> str:
    """Return in words how many answers of the last run's first rollout reached its limit."""
    name, limit = TRUNCATED.removeprefix("eval_"), run_flags(run_dir).get("max_answer_seq_len")
    shares = (line[name] for line in metrics_of(run_dir, having=f'"{name}": '.encode()))
    texts = (f"{one:.0%} of the last run's first ones reached its limit, {limit}" for one in shares if one is not None)
    return next(texts, "the first rollout logs how many reach that")


def run_settings(run_dir: Path) -> Settings:
    """Return value and origin of each flag of the last run in a folder; {} where there is none."""
    content = read_object(run_dir / "config.json").items()
    flags = {name: flag for name, flag in content if isinstance(flag, dict) and "value" in flag}
    return {name: (flag["value"], Origin.of_entry(flag)) for name, flag in flags.items()}


def run_flags(run_dir: Path) -> dict[str, Any]:
    """Return the flags of the last run in a folder; {} where there is none."""
    return {name: value for name, (value, _) in run_settings(run_dir).items()}
