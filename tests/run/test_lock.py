"""One run in a folder at a time."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from input_calls import call, make_inputs, stage_words, stopped_at_the_models
from support.messages import naming

from pipeline.errors import EnvironmentFault
from pipeline.processes import time_limit
from pipeline.run.layout import outcome_file
from pipeline.run.lock import locked
from pipeline.run.outcome import check_nobody_left, write_outcome

HOST = socket.gethostname()
HOLD = """
import sys
from pathlib import Path
from pipeline.run.lock import locked
with locked(Path(sys.argv[1]), map(Path, sys.argv[2:])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path, *outputs: Path) -> subprocess.Popen[str]:
    """Another process that holds `folder`, and the model folders `outputs`, until its input ends."""
    command = [sys.executable, "-c", HOLD, str(folder), *map(str, outputs)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path):
    """Who opens a FIFO to read waits for a writer."""
    os.mkfifo(tmp_path / "run.lock")
    with (
        time_limit(5),
        pytest.raises(EnvironmentFault, match=naming("run.lock ... not a file")),
        locked(tmp_path),
    ):
        pass


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    with hold(tmp_path / "run") as holder:
        said = naming(f"pid {holder.pid} on {HOST}")
        with pytest.raises(EnvironmentFault, match=said), locked(tmp_path / "run"):
            pass
        holder.communicate()
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / "run.lock").read_text()) == {"pid": os.getpid(), "host": HOST}
    assert (tmp_path / "run" / "run.lock").read_text() == ""


def test_one_run_at_a_time_writes_a_model_folder_whatever_its_run_folder(tmp_path):
    """Also by way of a link; the file is beside the model's folder, which saving replaces."""
    (tmp_path / "link").symlink_to(tmp_path / "actor")
    with hold(tmp_path / "one", tmp_path / "critic", tmp_path / "actor") as holder:
        for name in ("critic", "actor", "link"):
            said = naming(f"{tmp_path / name}: pid {holder.pid} on {HOST} ... another --output-dir")
            with pytest.raises(EnvironmentFault, match=said), locked(tmp_path / "two", [tmp_path / name]):
                pass
        with locked(tmp_path / "two", [tmp_path / "other"]):
            pass
        holder.communicate()
    with locked(tmp_path / "two", [tmp_path / "critic", tmp_path / "actor"]):
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["one", "two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "one", "two"], "no file is left beside models"


@pytest.mark.parametrize(("stage", "model"), [("sft", "model"), ("ppo", "model/critic")])
def test_a_stage_without_a_launcher_is_refused_the_models_of_another_run(tmp_path, monkeypatch, stage, model):
    folder, out = make_inputs(tmp_path), tmp_path / "out"
    with hold(tmp_path / "one", out / model) as holder, stopped_at_the_models(monkeypatch):
        ending = call(stage, stage_words(stage, folder, out, run_dir=tmp_path / "two"))
        holder.communicate()
    assert ending.code == 3 and not ending.loaded and len(ending.errors) == 1, ending.stderr
    assert ending.errors[0] == naming(f"{out / model}: pid {holder.pid} on {HOST}")


def test_a_dead_runs_lock_is_taken_over_in_one_line(tmp_path, capfd):
    with hold(tmp_path, tmp_path / "sft") as holder:
        holder.kill()
    with locked(tmp_path, [tmp_path / "sft"]):
        pass
    assert capfd.readouterr().err == naming(f"{tmp_path} ... pid {holder.pid} on {HOST} ... gone")
    with locked(tmp_path):
        pass
    assert capfd.readouterr().err == "", "a run that ended by itself leaves nothing to take over"


def test_an_error_releases_it(tmp_path):
    with pytest.raises(ValueError), locked(tmp_path):
        raise ValueError
    assert (tmp_path / "run.lock").read_text() == ""


@pytest.mark.parametrize(
    ("host", "alive", "free"), [(HOST, True, False), (HOST, False, True), ("elsewhere", False, False)]
)
def test_a_file_system_without_locks(tmp_path, monkeypatch, host, alive, free):
    """Then the text decides: only a process of this machine is known to have died."""

    def unsupported(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    pid = os.getppid() if alive else 2**22 + 1
    (tmp_path / "run.lock").write_text(json.dumps({"pid": pid, "host": host}))
    if free:
        with locked(tmp_path):
            pass
        return
    with pytest.raises(EnvironmentFault, match=f"pid {pid} on {host}"), locked(tmp_path):
        pass


def test_text_that_is_no_holder(tmp_path):
    (tmp_path / "run.lock").write_text("half a li")
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(EnvironmentFault, match=naming("cannot write ... Not a directory")),
        locked(tmp_path / "file" / "x"),
    ):
        pass


@pytest.mark.parametrize(
    ("code", "age_s", "refused"),
    [(None, 0.0, True), (0, 0.0, False), (None, -60.0, False)],
    ids=["it still works", "it has ended", "its number was given to another process"],
)
def test_ranks_that_outlived_their_supervisor_are_not_disturbed(tmp_path, code, age_s, refused):
    """A supervisor that was killed frees the folder while its ranks save: their files must not be cleared away."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        time.sleep(0.1)
        write_outcome(tmp_path, 1, code, "running")
        file = outcome_file(tmp_path, 1)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": process.pid}))
        os.utime(file, (time.time() + age_s, time.time() + age_s))
        with pytest.raises(EnvironmentFault, match=f"rank 1 of .* process {process.pid}") if refused else nullcontext():
            check_nobody_left(tmp_path)
    finally:
        process.kill()
        process.wait()
    check_nobody_left(tmp_path)
