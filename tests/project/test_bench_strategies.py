"""The benchmark's row of strategies: equal work on two ranks, kept runs, one table and one picture."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.speed import run
from benchmarks.speed.jobs import Jobs

ROOT = Path(__file__).resolve().parents[2]


def test_a_row_that_is_cut_off_keeps_the_runs_that_ended(tmp_path, monkeypatch):
    def row(jobs, figures):
        jobs.worker("first", "benchmarks.speed.roofline", [])
        assert json.loads(file.read_text().splitlines()[-1])["runs"]["first"]["number"] == 7
        raise KeyboardInterrupt

    file = tmp_path / "found.jsonl"
    file.write_text('{"row": "earlier"}\n')
    monkeypatch.setattr(Jobs, "run", lambda self, name, command, site="": '{"number": 7}')
    monkeypatch.setitem(run.ROWS, "cut", row)
    with pytest.raises(KeyboardInterrupt):
        run.main(["cut", "--work", str(tmp_path), "--json", str(file)])
    earlier, found = map(json.loads, file.read_text().splitlines())
    assert earlier == {"row": "earlier"}
    assert set(found["runs"]) == {"device", "first"}


def found(*runs: tuple[str, dict[str, object]]) -> str:
    return json.dumps({"runs": dict(runs)}) + "\n"


@pytest.mark.slow
def test_table_and_picture_are_made_from_several_files(tmp_path):
    first = found(
        ("device", {"name": "x"}),
        ("zero-3, step 1, 1 GPU", {"samples_per_s": 1.0, "peak_gib": 2.0, "host_gib": 3.0}),
        ("zero-3, Trainer, 1 GPU", {"error": "no memory", "host_gib": 9.0}),
        ("plain, Trainer, 1 GPU", {"samples_per_s": 4.0, "peak_gib": 5.0, "host_gib": 6.0}),
    )
    again = found(("zero-3, step 1, 1 GPU", {"samples_per_s": 7.0, "peak_gib": 2.0, "host_gib": 3.0}))
    for name, text in (("one", first), ("two", again)):
        (tmp_path / name).write_text(text)
    words = [str(tmp_path / "one"), str(tmp_path / "two"), "--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.strategies", *words], capture_output=True, text=True, check=True
    )
    plain, zero_3 = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert plain == ["1 GPU", "plain", "-", "4.0", "-", "5.0", "-", "6.0"]
    assert zero_3 == ["1 GPU", "zero-3", "7.0", "failed", "2.0", "failed", "3.0", "failed"]
    if find_spec("matplotlib"):
        assert (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"
    else:
        assert "pip install matplotlib" in done.stderr


@pytest.mark.slow
def test_two_ranks_do_equal_work_by_step_1_and_by_the_trainer(tmp_path):
    sizes = "--actor gpt2-tiny --batch 2 --micro-batch 2 --seq-len 32 --warm-up 1 --steps 3 --dtype fp32 --gpus 2"
    rest = ["--copy-mib", "8", "--matrix", "128", "--work", str(tmp_path), "--strategies", "plain", "ddp", "zero-2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed", "strategies", *sizes.split(), *rest],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    names = [f"{strategy}, {by}, 2 GPU" for strategy in ("ddp", "zero-2") for by in ("step 1", "Trainer")]
    assert set(runs) == {"device", *names}, "a plain run is one process"
    for name in names:
        assert runs[name]["tokens_per_step"] == pytest.approx(2 * 2 * 32)
        assert runs[name]["samples_per_s"] == pytest.approx(2 * 2 / runs[name]["step_s"])  # the median of three
        assert runs[name]["host_gib"] >= 0.0
