"""Where the disk refuses a save, training goes on and what was saved before stays; the end says what is missing."""

import json
import resource
import signal
from functools import partial
from pathlib import Path

import pytest
from saved_runs import make_engine, save
from stage_runs import Story, metrics, run
from support.messages import naming

from pipeline import files
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint_files import find
from pipeline.errors import EnvironmentFault


def limit_files(size: int) -> None:
    """No file of this process may grow beyond `size` bytes: what a full disk looks like, without one."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def model_bytes(folder: Path) -> int:
    return (folder / "base" / "model.safetensors").stat().st_size


FULL_FINE_TUNING = ("--lora-dim", "0", "--keep-best", "false", "--enable-tensorboard", "false")


@pytest.mark.slow
def test_training_goes_on_without_a_checkpoint_and_the_run_is_not_done(folder):
    """AdamW's moments make a checkpoint three times the model, so one fits and the other does not."""
    story = Story("sft", folder, steps=3, more=FULL_FINE_TUNING)
    assert run(story, "roomy") == 0
    # The child's own log is a file as well: the limit leaves room for it.
    assert run(story, "narrow", first=partial(limit_files, 2 * model_bytes(folder))) == 3
    assert not (story.run_dir("narrow") / "done.json").exists()
    log = (story.run_dir("narrow") / "log.txt").read_text()
    assert log.count("not saved, training continues: ") == 2, "after the last step no training goes on"
    assert "step-1" in log and "cannot be written: " in log and "GiB free)" in log
    assert not any((story.run_dir("narrow") / "checkpoints").iterdir()), "no stump stays"
    numbers, expected = (
        [line for line in metrics(story.run_dir(out)) if "skipped_updates" in line] for out in ("narrow", "roomy")
    )
    assert numbers == expected
    model, same = (folder / out / "sft" / "model.safetensors" for out in ("narrow", "roomy"))
    assert model.read_bytes() == same.read_bytes()


def test_a_model_that_cannot_be_saved_at_the_end_is_exit_3(folder):
    story = Story("sft", folder, steps=2, more=FULL_FINE_TUNING)
    assert run(story, "tight", first=partial(limit_files, model_bytes(folder) // 2)) == 3
    outcome = json.loads((story.run_dir("tight") / "outcome" / "rank-0.json").read_text())
    assert outcome["code"] == 3 and "sft: cannot be written: " in outcome["message"]
    assert "Traceback" not in (folder / "tight.sft.log").read_text()
    assert not (folder / "tight" / "sft").exists() and not (story.run_dir("tight") / "done.json").exists()
    # With room again, the same command trains what was not saved and ends well.
    assert run(story, "tight") == 0


def test_room_is_looked_at_before_anything_is_written(tmp_path, monkeypatch):
    engine = make_engine()
    save(tmp_path, engine, 1)
    monkeypatch.setattr(checkpoint, "free_bytes", lambda path: 10)
    with pytest.raises(EnvironmentFault, match=naming("not enough room ... GiB ... GiB free")):
        save(tmp_path, engine, 2)
    assert find(tmp_path, "auto") == tmp_path / "checkpoints" / "step-1"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_a_name_that_is_too_long_is_one_line(folder):
    story = Story("sft", folder, steps=1, more=("--output-dir", str(folder / ("long" * 70))))
    assert run(story, "long") == 2
    log = (folder / "long.sft.log").read_text()
    assert len(log.splitlines()) == 1 and "--output-dir" in log and "Traceback" not in log


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path):
    assert files.free_bytes(tmp_path / "a" / "b") > 0
