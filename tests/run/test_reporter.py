"""When the report's process is started, that there are never two, and that its failure is one warning."""

import os
import time
from pathlib import Path

import pytest
from support.messages import naming
from support.recorded_runs import record

from pipeline.launching.job import Job
from pipeline.run import reporter as reporter_module
from pipeline.run.reporter import EVERY_S, SWITCH, Reporter

PROGRAM = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[-1])
number = len(list(folder.glob("started-*")))
(folder / f"started-{number}").touch()
if (folder / "wait").exists():
    time.sleep(60)
if (folder / "fail").exists():
    sys.exit("Traceback\\nOSError: no space left")
(folder / f"ended-{number}").touch()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose reports are written by a program that leaves a mark, at a clock that stands still."""
    monkeypatch.delenv(SWITCH)
    site = tmp_path / "site" / "pipeline" / "reporting"
    site.mkdir(parents=True)
    (site / "main.py").write_text(PROGRAM)
    for package in (site, site.parent):
        (package / "__init__.py").touch()
    monkeypatch.setattr(
        reporter_module, "python_environment", lambda: os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    )
    monkeypatch.chdir(tmp_path / "site")  # what -m looks into first
    return record(tmp_path / "output", "sft", steps=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(reporter_module.time, "monotonic", lambda: now[0])
    return now


def starts(folder: Path) -> int:
    return len(list(folder.glob("started-*")))


def wait_for(folder: Path, name: str) -> None:
    end = time.time() + 20
    while not (folder / name).exists() and time.time() < end:
        time.sleep(0.01)
    assert (folder / name).exists()


def test_it_starts_once_a_minute_and_not_in_the_first_one(folder, clock):
    reporter = Reporter(folder)
    for seconds, expected in ((0.0, 0), (EVERY_S - 1, 0), (1.5, 1), (1.0, 1), (EVERY_S, 2)):
        clock[0] += seconds
        reporter.poll()
        for number in range(expected):
            wait_for(folder, f"ended-{number}")
        if reporter._process:
            reporter._process.wait()
        reporter.poll()
        assert starts(folder) == expected, seconds


def test_there_are_never_two_at_once(folder, clock):
    (folder / "wait").touch()
    reporter = Reporter(folder)
    for _ in range(4):
        clock[0] += EVERY_S + 1
        reporter.poll()
        wait_for(folder, "started-0")
    assert starts(folder) == 1
    (folder / "wait").unlink()
    first = reporter._process
    assert reporter.finish() == folder / "report.html" and starts(folder) == 2
    assert first is not None and first.poll() is not None and not (folder / "ended-0").exists()


def test_its_end_is_waited_for(folder):
    assert Reporter(folder).finish() == folder / "report.html" and (folder / "ended-0").exists()


def test_its_failure_is_one_warning(folder, clock, capfd):
    (folder / "fail").touch()
    reporter = Reporter(folder)
    for _ in range(3):
        clock[0] += EVERY_S + 1
        reporter.poll()
        if reporter._process:
            reporter._process.wait()
    assert reporter.finish() is None and starts(folder) >= 3
    out, err = capfd.readouterr()
    assert (out, err) == ("", naming(f"warning: no report of {folder} ... no space left"))


@pytest.mark.parametrize("why", ["flag", "variable", "nothing measured"])
def test_it_is_not_started(folder, clock, monkeypatch, why):
    if why == "variable":
        monkeypatch.setenv(SWITCH, "false")
    if why == "nothing measured":
        (folder / "metrics.jsonl").unlink()
    reporter = Reporter(folder, is_on=why != "flag")
    clock[0] += EVERY_S + 1
    reporter.poll()
    assert reporter.finish() is None and starts(folder) == 0


def test_an_output_folder_has_metrics_in_its_runs(folder):
    output = folder.parent.parent
    assert Reporter(output).finish() == output / "report.html" and starts(output) == 1


def test_a_supervisor_looks_after_it_at_each_look_at_the_ranks(monkeypatch):
    job, looks = Job.__new__(Job), []
    verdicts = iter([None, None, "end"])
    monkeypatch.setattr(Job, "poll", lambda self: None)
    monkeypatch.setattr(Job, "ending", lambda self: next(verdicts))
    job._watch = type("Watch", (), {"ranks": {}, "has_failed": lambda self: True})()
    assert job.supervise(lambda: looks.append(1)) == "end" and len(looks) == 3
