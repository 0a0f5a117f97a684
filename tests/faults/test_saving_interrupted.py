"""A save that ends at any point leaves a checkpoint that can be read (goals R2 and R16), and damage is found (R5)."""

import json
import os
import random
import shutil
import signal
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from saved_runs import FINGERPRINT, count_operations, make_engine, make_run, operations_watched, save, save_killed
from support.messages import naming

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint_files import find, problem_with, with_checksum
from pipeline.errors import CheckpointError
from pipeline.run.layout import candidates


@pytest.fixture(scope="module")
def engine() -> Any:
    return make_engine()


def step_of(folder: Path | None) -> int:
    assert folder is not None
    return json.loads((folder / "state.json").read_text())["step"]


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("half", [False, True])
def test_a_checkpoint_remains_wherever_a_save_is_killed(tmp_path, engine, half):
    names = count_operations(tmp_path / "counted", engine)
    assert len(names) > 20 and {"fsync", "rename", "unlink", "save_file", "write_fragments", "write_bytes"} <= set(
        names
    )
    found = []
    for at in range(len(names)):
        folder = tmp_path / f"killed-{at}"
        save(folder, engine, 1)
        assert save_killed(folder, at, half=half) == -signal.SIGKILL
        found.append(step_of(find(folder, "auto")))
        # The next save clears away what was left.
        save(folder, engine, 3)
        left = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert left == ["step-3"], f"after a kill ahead of {names[at]} ({at})"
    assert found == sorted(found) and set(found) == {1, 2}, "the old one counts until the new one does"


@pytest.mark.slow
def test_saving_a_step_again_never_leaves_nothing(tmp_path, engine):
    """A run that is resumed and stopped at once writes the same step twice."""
    save(tmp_path / "counted", engine, 2)
    seen: list[str] = []
    with operations_watched(lambda name, given: seen.append(name)):
        save(tmp_path / "counted", engine, 2)
    for at in range(len(seen)):
        folder = tmp_path / f"again-{at}"
        save(folder, engine, 2)
        assert save_killed(folder, at, half=False) == -signal.SIGKILL
        assert step_of(find(folder, "auto")) == 2
        # What is left, maybe under another name, stays until a newer one is whole.
        assert save_killed(folder, 16, half=False) == -signal.SIGKILL
        assert step_of(find(folder, "auto")) == 2


# --- power lost: what was not flushed may be cut short, renames stay in their order -----------------------------------


class Journal:
    """The states of a folder tree before each operation of a save, and what had been flushed by then."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self.folder = folder
        self.states: list[dict[str, bytes]] = []
        self.flushed: list[set[bytes]] = []
        save(folder, engine, 1)
        flushed = set(self.snapshot().values())

        def before(name: str, given: tuple[Any, ...]) -> None:
            self.states.append(self.snapshot())
            if name == "fsync":
                target = Path(os.readlink(f"/proc/self/fd/{given[0]}"))
                if target.is_file():
                    flushed.add(target.read_bytes())
            self.flushed.append(set(flushed))

        with operations_watched(before):
            save(folder, engine, 2)
        self.states.append(self.snapshot())
        self.flushed.append(set(flushed))

    def snapshot(self) -> dict[str, bytes]:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def journal(tmp_path_factory, engine) -> Journal:
    return Journal(tmp_path_factory.mktemp("journal") / "run", engine)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_power_lost_at_any_moment(journal, tmp_path_factory, data):
    moment = data.draw(st.integers(0, len(journal.states) - 1))
    target = tmp_path_factory.mktemp("lost")
    for name, content in journal.states[moment].items():
        if content not in journal.flushed[moment]:
            content = content[: data.draw(st.integers(0, len(content)), label=name)]
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    assert step_of(find(target, "auto")) in (1, 2)


# --- damaged ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory, engine) -> Path:
    """A run's folder with the checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save(folder, engine, step, keep=2)
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_is_found_before_anything_is_read(two, damage):
    draw, newest = random.Random(5), candidates(two / "checkpoints")[0]
    assert newest.name == "step-2" and problem_with(newest) is None
    files = files_of(newest)
    assert len(files) == 5
    count = {"flip": 200, "cut": 50, "missing": len(files)}[damage]
    for number in range(count):
        path = files[number % len(files)]
        whole = path.read_bytes()
        if damage == "flip":
            changed, bit = bytearray(whole), draw.randrange(8 * len(whole))
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
        elif damage == "cut":
            path.write_bytes(whole[: draw.randrange(len(whole))])
        else:
            path.unlink()
        problem = problem_with(newest)
        assert problem is not None and path.name in problem, (path.name, number)
        assert step_of(find(two, "auto")) == 1, "the one before is used"
        path.write_bytes(whole)
    assert problem_with(newest) is None


def test_no_whole_checkpoint_is_exit_5_and_names_the_file(two, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    for folder in candidates(tmp_path / "run" / "checkpoints"):
        (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=naming("step-2/state.json ... missing, cut short or changed")) as caught:
        find(tmp_path / "run", "auto")
    assert caught.value.code == 5


def test_a_file_of_another_tool_is_not_taken_for_a_checkpoint(two, tmp_path):
    """DeepSpeed's `latest` is neither read nor written; unknown folders are left alone."""
    shutil.copytree(two, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for text in ("", "garbage", "step-9"):
        (checkpoints / "latest").write_text(text)
        (checkpoints / "step-x").mkdir(exist_ok=True)
        assert step_of(find(tmp_path / "run", "auto")) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda files: files["state.json"].pop("bytes"),
        lambda files: files.update({"../../outside": files["state.json"]}),
        lambda files: files.clear(),
        lambda files: files.update({"n" * 300: files["state.json"]}),
    ],
    ids=["a field is missing", "a file elsewhere", "nothing is listed", "a name that no file can have"],
)
def test_a_manifest_that_was_made_up_is_passed_over(two, tmp_path, spoil):
    """Sealed anew, as somebody who wants to be read would do."""
    shutil.copytree(two, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["sha256"]
    spoil(manifest["files"])
    file.write_text(json.dumps(with_checksum(manifest)))
    assert step_of(find(tmp_path / "run", "auto")) == 1


def test_a_file_that_is_not_in_the_manifest_is_never_read(two, tmp_path):
    shutil.copytree(two, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-2"
    shutil.copy(newest / "model.rank-0.safetensors", newest / "model.rank-1.safetensors")
    problem = problem_with(newest)
    assert problem == naming("model.rank-1.safetensors ... missing ... manifest")
    assert step_of(find(tmp_path / "run", "auto")) == 1


# --- in the background ------------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, engine, monkeypatch):
    """`save` comes back before the files are there; what they hold is the state as it was then."""
    may_write, write = Event(), checkpoint.write_rank_files

    def held_back(*given: Any) -> Any:
        may_write.wait()
        return write(*given)

    monkeypatch.setattr(checkpoint, "write_rank_files", held_back)
    saver = checkpoint.Saver(make_run(tmp_path), FINGERPRINT, keep=1, background=True)
    before = engine.module.weight.detach().clone()
    saver.save(checkpoint.Content(state={}, engines={"model": engine}), step=1)
    saver.poll()
    assert find(tmp_path, "auto") is None, "nothing is written yet, and nobody waited"
    with torch.no_grad():
        engine.module.weight.add_(1.0)
    may_write.set()
    saver.finish()
    written = load_file(tmp_path / "checkpoints" / "step-1" / "model.rank-0.safetensors")
    assert written["weights/weight"].equal(before.flatten())
