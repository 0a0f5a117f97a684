"""The tables and sentences of a report: verdict, before and after, time, memory, flags, and answers."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.files import has_config, read_object
from pipeline.reporting.records import RunRecord
from pipeline.run import evaluations
from pipeline.run.evaluations import Change, Settings, is_number, without_rounding
from pipeline.run.layout import task_file

ANSWERS_FILE = "prompt_eval.json"  # what `rlhf compare --output FOLDER/` writes into FOLDER
SHOWN_PROMPTS, SHOWN_STEPS = 6, 4  # numbers of prompts and of evaluations in the table of samples
# Kind of a verdict -> its colour and headline. With several runs the first kind here that one of them has decides.
HEADLINES = {
    "worse": ("bad", "Worse than at the start"),
    "same": ("open", "No difference that the held-out rows can show"),
    "better": ("good", "Better than at the start"),
    "unknown": (
        "open",
        "Finished; evaluations without values of single rows cannot say if it is better than at the start",
    ),
}


def compared(run: RunRecord) -> list[Change]:
    """Return the metrics of evaluations whose first and last values the report compares."""
    return evaluations.compared(run.folder, [str(name) for name in run.meaning.get("compared", [])])


def verdict(runs: Sequence[RunRecord]) -> tuple[str, str, list[str]]:
    """Return the colour (good, bad or open), a headline, and the figures for it."""
    endings = [(kind, f"{name_of(run)}: {words.splitlines()[0]}") for run in runs for kind, words in [run.ending]]
    if broken := [words for kind, words in endings if kind in ("failed", "died")]:
        return "bad", "Broken off", broken
    if unfinished := [words for kind, words in endings if kind != "finished"]:
        return "open", "Not finished", unfinished
    rated = [(name_of(run), evaluations.verdict(run.folder)) for run in runs]
    for kind, (colour, headline) in HEADLINES.items():
        if any(one.kind == kind for _, one in rated):
            return colour, headline, [f"{name}: {one.figures}: {one.words}" for name, one in rated if one.kind == kind]
    return "open", "Finished; no evaluation says whether it is better than at the start", []


def name_of(run: RunRecord) -> str:
    """Return the name of a run in a line: its label, and its stage if that is another."""
    return run.label if run.label == run.stage else f"{run.label}, {run.stage}"


def number(value: Any) -> str:
    """Return a number with four significant digits, or whole from 10,000 to 1,000,000; a dash for what is no number."""
    if not is_number(value):
        return "\N{EN DASH}"
    if 10_000 <= abs(value) < 1_000_000:
        return f"{value:,.0f}"
    return f"{without_rounding(value):.4g}"


def duration(seconds: float) -> str:
    """Return `41 s`, `12 min` or `3.4 h`."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


def times(run: RunRecord) -> list[tuple[str, float]]:
    """Return where the time of a run's loop went, in seconds: the phases of its steps, and the time between steps."""
    steps = run.points("step_s")
    total = sum(value for _, value in steps)
    names = [name for name, metric in run.metrics.items() if name.startswith("time/") and metric.get("unit") == "s"]
    phases = [(run.metric(name)["title"], sum(value for _, value in run.points(name))) for name in names]
    rest = total - sum(seconds for _, seconds in phases)
    parts = [*phases, ("the rest of the steps" if any(seconds for _, seconds in phases) else "steps", rest)]
    return [part for part in [*parts, ("evaluations and saving", between_steps(run))] if part[1] > 0.005]


def between_steps(run: RunRecord) -> float:
    """Return the seconds between lines of metrics.jsonl outside steps and restarts."""
    restarts, total = set(run.resumed), 0.0
    for before, line in zip(run.lines, run.lines[1:], strict=False):
        if before["step"] not in restarts and is_number(line.get("time")) and is_number(before.get("time")):
            step_s = line.get("step_s")
            total += max(0.0, line["time"] - before["time"] - (step_s if is_number(step_s) else 0.0))
    return total


def memory(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return rows of peak memory: what takes it, GiB by the plan, GiB as measured."""

    def measured(name: str) -> str:
        values = [value for _, value in run.points(name)]
        return f"{max(values):.3g}" if values else "\N{EN DASH}"

    phases, rows = run.plan.get("memory_gib", {}), list[tuple[str, str, str]]()
    for name, planned in phases.items():
        rows.append((f"tensors, {name}", f"{planned['allocated']:.3g}", measured(f"memory/{name}_gib")))
    if rows:
        reserved = [max(planned["reserved"][i] for planned in phases.values()) for i in (0, 1)]
        rows.append(("a whole GPU", f"{reserved[0]:.3g} to {reserved[1]:.3g}", measured("gpu_reserved_gib")))
    names = [name for name in ("gpu_memory_gib", "host_memory_gib") if run.points(name)]
    return rows + [(run.metric(name)["title"], "", measured(name)) for name in names]


def why_no_plan(run: RunRecord) -> str:
    """Return why there is no plan to compare memory with; "" if there is one."""
    if run.plan:
        return ""
    if run.environment.get("device") == "cpu":
        return "There is no plan: plans choose flags on GPUs alone."
    return "There is no plan, since every flag that a plan chooses was given (--dry-run prints one)."


def given_flags(run: RunRecord) -> Settings:
    """Return value and origin of the flags whose value comes from elsewhere than the default."""
    return {name: (value, origin) for name, (value, origin) in run.settings.items() if not origin.is_default}


def differing_flags(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the values of each flag that differs among the runs, in their order; None for a run without the flag."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name, (None, ""))[0] for run in runs] for name in names}
    return {name: column for name, column in values.items() if any(value != column[0] for value in column)}


def sample_rows(run: RunRecord) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield the first held-out prompts, each with its responses at evaluations from the first to the last."""
    steps = sorted({sample["step"] for sample in run.samples})
    places = {round(n * (len(steps) - 1) / max(1, SHOWN_STEPS - 1)) for n in range(SHOWN_STEPS)}
    shown = [steps[index] for index in sorted(places)] if steps else []
    by_prompt: dict[str, dict[int, Mapping[str, Any]]] = {}
    for sample in run.samples:
        by_prompt.setdefault(str(sample["prompt"]), {}).setdefault(sample["step"], sample)
    for prompt in list(by_prompt)[:SHOWN_PROMPTS]:
        yield prompt, [by_prompt[prompt][step] for step in shown if step in by_prompt[prompt]]


def answers(folder: Path) -> dict[str, Any]:
    """Return the comparison that `rlhf compare` wrote into a folder; {} if there is none or it is unreadable."""
    content = read_object(folder / ANSWERS_FILE)
    return content if isinstance(content.get("models"), list) and isinstance(content.get("prompts"), list) else {}


def task(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return title and rows of the trial that `rlhf reward --model` wrote into a folder; no rows if there is none."""
    content = read_object(task_file(folder))
    rows = content.get("rows")
    pairs = [tuple(map(str, row)) for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
    return str(content.get("title", "")), [(row[0], row[1]) for row in pairs if len(row) == 2]


def answers_command(runs: Sequence[RunRecord], folder: Path) -> str:
    """Return the command that compares these runs' models, and writes its file into the folder; "" for too few."""
    answering = [run.meaning for run in runs if run.meaning.get("answers")]
    outputs = [Path(str(folders[0])) for one in answering if (folders := one.get("outputs"))]
    models = [*(str(one["start"]) for one in answering[:1]), *(str(path) for path in outputs if has_config(path))]
    judges = [Path(str(run.meaning["outputs"][0])) for run in runs if run.meaning.get("answers") is False]
    if len(models := list(dict.fromkeys(models))) < 2:
        return ""
    scored = [word for path in judges[-1:] if has_config(path) for word in ("--reward-model", str(path))]
    return shlex.join(["python", "-m", "rlhf", "compare", *models, *scored, "--output", f"{folder}/"])
