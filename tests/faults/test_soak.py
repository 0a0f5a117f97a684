"""A thousand steps of each stage: memory and open files stay what they were, and nothing temporary is left (R15)."""

import os
import tempfile
import time
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import pytest
from stage_runs import Story, metrics, start
from support.forks import PACKAGES, exit_code

STEPS = 1000
WARM_UP = 200  # caches, allocator pools and lazily imported modules are there by then


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def put_temporary_files(folder: Path) -> None:
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)


def steps_done(story: Story, out: str) -> int:
    file = story.run_dir(out) / "metrics.jsonl"
    return file.read_text().count('"skipped_updates"') if file.is_file() else 0


def watch(story: Story, out: str, child: BaseProcess) -> list[tuple[int, int, int]]:
    """(steps, resident bytes, open files) about five times a second while the run lasts."""
    seen = []
    while child.is_alive() and child.pid is not None:
        with suppress(FileNotFoundError):  # it ended at this moment
            seen.append((steps_done(story, out), resident_bytes(child.pid), len(os.listdir(f"/proc/{child.pid}/fd"))))
        time.sleep(0.2)
    return seen


@pytest.mark.faults
@pytest.mark.parametrize("stage", list(PACKAGES))
def test_a_thousand_steps(folder, stage):
    temporary = folder / f"temporary-{stage}"
    temporary.mkdir()
    more = ("--save-steps", 100, "--eval-interval", 0)
    story = Story(stage, folder, steps=STEPS, more=more)
    (child,) = start(story, "soak", first=partial(put_temporary_files, temporary))
    seen = [line for line in watch(story, "soak", child) if line[0] >= WARM_UP]
    assert exit_code([child]) == 0
    assert len([line for line in metrics(story.run_dir("soak")) if "skipped_updates" in line]) == STEPS
    early = median(memory for steps, memory, _ in seen if steps < 2 * WARM_UP)
    late = median(memory for steps, memory, _ in seen if steps >= STEPS - WARM_UP)
    print(f"{stage}: {early / 2**20:.0f} MiB by step {2 * WARM_UP}, {late / 2**20:.0f} MiB in the last {WARM_UP}")
    assert late < 1.02 * early
    assert len([count for _, _, count in seen if count]) > len(seen) - 5, "a process that is ending has none"
    files = [count for steps, _, count in seen if steps < STEPS]  # then it closes one after the other
    assert max(files) - min(files) <= 8, "a save has a few files open"
    assert files[-1] <= files[0] + 2
    left = [path for path in (folder / "soak").rglob("*") if path.name.endswith((".writing", ".old", ".partial"))]
    assert not left
    assert os.listdir(temporary) == []
