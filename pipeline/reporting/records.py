"""Records of a run, read from the files in its folder. A missing or truncated file is read as far as possible."""

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_STOPPED
from pipeline.files import read_object
from pipeline.run.evaluations import Settings, cost, described, is_number, json_lines, metrics_of, run_settings
from pipeline.run.layout import beat_file, done_file, environment_file, meaning_file, outcome_file, plan_file, rows_file
from pipeline.run.outcome import Outcome, has_process, ranks_with_outcome, read_outcome

SIGN_OF_LIFE_S = 300.0  # a run of another machine without a heartbeat for so long counts as dead
LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (\w+) \S+ (.*)")
RESUMED = re.compile(r"resuming from \S*step-(\d+)")
Point = tuple[int, float]
# Names in a run's meaning.json -> their types; values of another type are ignored.
MEANING = {"number": int, "began": float, "outputs": list, "metrics": dict, "steps": int, "compared": list}


@dataclass(frozen=True)
class RunRecord:
    """A run, read from its folder; `label` is its name in a comparison."""

    folder: Path
    label: str

    @cached_property
    def meaning(self) -> dict[str, Any]:
        """Description of the run and of its metrics; see `pipeline.training.metrics.write_meaning`."""
        content = read_object(meaning_file(self.folder))
        return {name: value for name, value in content.items() if isinstance(value, MEANING.get(name, object))}

    @property
    def stage(self) -> str:
        """The short name of its stage, such as "sft"; if it is unknown, the name of its folder."""
        named = self.meaning.get("stage") or read_object(environment_file(self.folder)).get("stage")
        return str(named or self.folder.name)

    @property
    def kind(self) -> str:
        """The number and name of its stage; if they are unknown, the name of its folder."""
        if "number" in self.meaning:
            return f"Stage {self.meaning['number']}: {self.meaning.get('title')}"
        return f"Run {self.folder.resolve().name}"

    @property
    def title(self) -> str:
        """The kind, and the name of its folder if that is its label and not the name of its stage."""
        name = self.folder.resolve().name
        return f"{self.kind} ({name})" if name == self.label and name != self.stage else self.kind

    @property
    def metrics(self) -> Mapping[str, Mapping[str, Any]]:
        """Meaning of each metric by name: the fields of a `Metric`."""
        return {name: one for name, one in self.meaning.get("metrics", {}).items() if isinstance(one, dict)}

    def metric(self, name: str) -> Mapping[str, Any]:
        """Return the meaning of a metric; `eval_NAME` is NAME on held-out rows, an undeclared one has only its name."""
        return described(self.meaning, name)

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [line for line in metrics_of(self.folder) if isinstance(line.get("step"), int)]

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The lines of samples.jsonl."""
        lines = json_lines(self.folder / "samples.jsonl")
        return [line for line in lines if isinstance(line.get("step"), int) and "prompt" in line]

    def points(self, name: str) -> list[Point]:
        """Return step and value of a metric wherever it is a finite number."""
        return [(line["step"], line[name]) for line in self.lines if is_number(line.get(name))]

    @cached_property
    def cost(self) -> str:
        """GPU hours and tokens of the run so far, as text; "" if they are unknown."""
        return cost(self.folder)

    @cached_property
    def settings(self) -> Settings:
        """Value and origin of each flag."""
        return run_settings(self.folder)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, hardware and command."""
        return read_object(environment_file(self.folder))

    @property
    def rows(self) -> dict[str, Any]:
        """Counts and lengths of its rows, and examples."""
        return read_object(rows_file(self.folder))

    @property
    def plan(self) -> dict[str, Any]:
        """Expected figures of the plan that chose the run's flags; {} without such a plan."""
        return read_object(plan_file(self.folder))

    @cached_property
    def log(self) -> list[tuple[str, str]]:
        """Level and text of the lines of log.txt since the run began; earlier runs in the folder are skipped."""
        began, lines = self.meaning.get("began", 0.0), list[tuple[str, str]]()
        with suppress(OSError):
            file = self.folder / "log.txt"
            text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
            for line in text.split("\n"):
                if match := LOG_LINE.match(line):
                    moment, level, text = match.groups()
                    if datetime.strptime(moment, "%Y-%m-%d %H:%M:%S").timestamp() >= began - 1.0:
                        lines.append((level, text))
        return lines

    @property
    def warnings(self) -> dict[str, int]:
        """The texts of the WARNING and ERROR lines of its log, each with its count."""
        return dict(Counter(text for level, text in self.log if level in ("WARNING", "ERROR")))

    @property
    def resumed(self) -> list[int]:
        """The steps from which it was resumed."""
        return [int(match[1]) for _, text in self.log if (match := RESUMED.search(text))]

    @property
    def ending(self) -> tuple[str, str]:
        """State of the run (finished, running, stopped, failed, died, unknown), and a sentence about it."""
        ranks = ranks_with_outcome(self.folder)
        outcomes = [outcome for rank in ranks if (outcome := read_outcome(self.folder, rank))]
        last = max((line["step"] for line in self.lines), default=0)
        at = f"step {last}" + (f" of {total}" if (total := self.meaning.get("steps")) else "")
        if failed := sorted((one for one in outcomes if one.has_failed), key=lambda one: (one.secondary, one.time)):
            return "failed", f"failed at {at} with exit code {failed[0].code}: {failed[0].message}"
        if unended := [one for one in outcomes if one.code is None]:
            if all(is_running(self.folder, one) for one in unended):
                return "running", f"running, at {at}"
            return "died", f"died at {at} without an error: it was killed, or its machine is gone"
        if any(one.code == EXIT_STOPPED for one in outcomes):
            return "stopped", f"stopped on request at {at}; the same command resumes"
        if is_number(steps := read_object(done_file(self.folder)).get("steps")):
            return "finished", f"finished after {steps} steps"
        return "unknown", f"unknown end at {at}"


def is_running(folder: Path, outcome: Outcome) -> bool:
    """Return True if a rank that has not ended is alive: by its process on this machine, by its heartbeat elsewhere."""
    if outcome.is_local:
        return has_process(folder, outcome)
    files = (outcome_file(folder, outcome.rank), beat_file(folder, outcome.rank))
    signs = [one.stat().st_mtime for one in files if one.is_file()]
    return time.time() - max(signs, default=0.0) < SIGN_OF_LIFE_S


def is_run(folder: Path) -> bool:
    """Return True if a folder is a run's."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "env.json", "log.txt"))


def runs_of(folder: Path, *, label: str = "") -> list[RunRecord]:
    """Return the run of a run's folder, or those of all stages below an output folder in the order of their stages."""
    folders = [folder] if is_run(folder) else [one for one in folder.glob("runs/*") if is_run(one)]
    runs = [RunRecord(one, label or one.resolve().name) for one in folders]
    if label and folders != [folder]:  # a folder that is not named as its stage may be a second run of it
        others = {run: f"{label} ({run.folder.name})" for run in runs if run.folder.name != run.stage}
        runs = [replace(run, label=others.get(run, label)) for run in runs]
    runs.sort(key=lambda run: (run.meaning.get("number", 99), run.meaning.get("began", 0.0), run.label))
    return [run for run in runs if not is_replaced(run, runs)]


def is_replaced(run: RunRecord, others: Iterable[RunRecord]) -> bool:
    """Return True if a later run has finished and replaced this run's model (`--overwrite`)."""
    model, began = run.meaning.get("outputs", [])[:1], run.meaning.get("began", 0.0)
    later = [one for one in others if one.meaning.get("began", 0.0) > began and done_file(one.folder).is_file()]
    return bool(model) and any(one.meaning.get("outputs", [])[:1] == model for one in later)


def labels_of(folders: list[Path]) -> list[str]:
    """Return labels that distinguish folders: their paths without the common beginning."""
    paths = [str(folder) for folder in folders]
    common = (
        os.path.commonpath(paths) if len(paths) > 1 and len({Path(path).is_absolute() for path in paths}) == 1 else ""
    )
    return [os.path.relpath(path, common) if common else path for path in paths]
