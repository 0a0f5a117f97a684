"""The starter of the report's own process: a run starts it at intervals, and once more when it has ended."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from pipeline.errors import say
from pipeline.processes import python_environment
from pipeline.run.layout import stages_folder

EVERY_S = 60.0  # between two starts, and before the first one: a shorter run only writes the last report
SWITCH = "RLHF_REPORT"  # variable: `false` turns all reports off, also with --report
LONGEST_S = 300.0  # limit for the last report


class Reporter:
    """A starter of the process that writes the report of a folder, never two at once. A failure is logged once.

    Without metrics nothing is written. `all_stages`: report on all stages of the output folder, see `stages_folder`.
    `is_on` False: do nothing.
    """

    def __init__(self, run_dir: Path, *, all_stages: bool = False, is_on: bool = True) -> None:
        self.folder = stages_folder(run_dir) if all_stages else run_dir
        self._is_on = is_on and os.environ.get(SWITCH) != "false"
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._began = time.monotonic()  # when the last one was started
        self._has_warned = False

    def poll(self) -> None:
        """Collect a process that has ended; start the next one after EVERY_S."""
        if self._process is not None and self._process.poll() is not None:
            self._collect()
        if self._process is None and time.monotonic() - self._began >= EVERY_S:
            self._start()

    def stop(self) -> None:
        """Kill a process that is running; the report stays as it was before."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def finish(self) -> Path | None:
        """Write the report of a run that has ended, and wait for it; return the page if it was written."""
        self.stop()
        self._start()
        if self._process is None:
            return None
        try:
            self._process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self.folder / "report.html" if self._collect() else None

    def _start(self) -> None:
        """Start the process, if it is on and there are metrics."""
        self._began = time.monotonic()
        has_metrics = (self.folder / "metrics.jsonl").is_file() or any(self.folder.glob("runs/*/metrics.jsonl"))
        if not (self._is_on and has_metrics):
            return
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lasts as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.reporting.main", str(self.folder)],
            env=python_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C must reach the run only
        )

    def _collect(self) -> bool:
        """Wait for the process, and warn of its failure once; return True if it did not fail."""
        process, errors, self._process = self._process, self._errors, None
        if process is None or errors is None:
            return False
        with errors:
            if process.wait() == 0:
                return True
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
        if not self._has_warned:
            self._has_warned = True
            reason = lines[-1].removeprefix("error: ") if lines else f"its process ended with {process.returncode}"
            say(f"warning: no report of {self.folder} was written: {reason}")
        return False
