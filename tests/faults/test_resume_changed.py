"""A run that is started again with something changed goes on, or is refused in one line a change: never silently other.

What docs/why/reliability.md promises of changed settings.
"""

import importlib
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage_runs import Story, metrics, run
from support.marks import slow_but
from support.messages import naming
from support.tiny_run import make_folder

from pipeline.checkpoints.checkpoint_files import manifest_entry, write_manifest

STEPS = 2
SAME = ("--eval-interval", "0", "--keep-checkpoints", "2")
PLAIN = ("--lora-dim", "0", "--lr-scheduler-type", "constant")
SUPERVISED = (*PLAIN, "--keep-best", "false")

EACH_STAGE = pytest.mark.parametrize("stage", slow_but(["sft"], ["sft", "reward", "ppo", "dpo"]))


def story_of(stage: str, folder: Path, steps: int, *changes: object) -> Story:
    own = {"ppo": (), "dpo": PLAIN}.get(stage, SUPERVISED)
    return Story(stage, folder, steps=steps, more=(*SAME, *own, *changes))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a stage, made once: the inputs, and a run of two steps in `run/`."""

    @cache
    def begin(stage: str) -> Path:
        folder = make_folder(tmp_path_factory.mktemp("changed"))
        assert run(story_of(stage, folder, STEPS), "run") == 0
        return folder

    return begin


@pytest.fixture
def stage() -> str:
    """The stage of the tests that are of one alone."""
    return "sft"


@pytest.fixture
def folder(begun: Callable[[str], Path], stage: str, tmp_path: Path) -> Path:
    shutil.copytree(begun(stage), tmp_path / "all")
    return tmp_path / "all"


def go_on(
    folder: Path, *changes: object, stage: str = "sft", first: Callable[[], None] | None = None
) -> tuple[int, str]:
    """(exit code, what it printed) of a run with two steps more."""
    log = folder / f"run.{stage}.log"
    log.unlink(missing_ok=True)
    return run(story_of(stage, folder, 2 * STEPS, *changes), "run", first=first), log.read_text()


def read_no_weights() -> None:
    """In a child: a model under DeepSpeed would be a TypeError."""
    importlib.import_module("pipeline.engine.build").training_engine = None


@pytest.mark.parametrize("changes", [(), ("--keep-checkpoints", 1, "--save-in-background", "true")], ids=str)
def test_what_may_change_changes_nothing(folder, changes):
    code, said = go_on(folder, *changes)
    assert code == 0 and "resuming from" in said and "other settings" not in said
    steps = [line["step"] for line in metrics(folder / "run" / "runs" / "sft") if "skipped_updates" in line]
    assert steps == [1, 2, 3, 4]


def test_another_layout_is_told(folder):
    code, said = go_on(
        folder, "--zero-stage", 0, "--per-device-train-batch-size", 4, "--gradient-accumulation-steps", 1
    )
    assert code == 0 and "resumed with other settings: " in said
    assert "zero_stage 2 -> 0" in said and "train_batch_size 2 -> 4" in said


@pytest.mark.parametrize(
    "changes",
    [
        {
            ("--learning-rate", 2e-3): "error: --learning-rate ... 0.002 ... checkpoint ... 0.001",
            ("--seed", 5): "error: --seed ... 5 ... checkpoint ... 1234",
            ("--dtype", "bf16"): "error: --dtype ... 'bf16' ... checkpoint ... 'fp32'",
        },
        {
            (
                "--per-device-train-batch-size",
                1,
            ): "error: rows of an optimizer step ... 2 ... checkpoint ... 4 (--train-batch-size)"
        },
    ],
    ids=["settings", "rows of a step"],
)
def test_what_decides_what_is_learnt_is_refused(folder, changes):
    """In a line for each."""
    code, said = go_on(folder, *(word for words in changes for word in words))
    assert code == 2 and all(said == naming(line) for line in changes.values()), said
    assert "--force-resume continues anyway" in said and "Traceback" not in said


@EACH_STAGE
def test_changed_data_is_refused_unless_forced(folder, stage):
    rows = (folder / "train.jsonl").read_text().splitlines()
    row = json.loads(rows[0]) | {"prompt": "Describe something else.", "chosen": "It was something else."}
    (folder / "train.jsonl").write_text("\n".join([json.dumps(row), *rows[1:]]) + "\n")
    code, said = go_on(folder, stage=stage, first=read_no_weights)
    kind = "prompts" if stage == "ppo" else "training rows"
    changed = f"--data-path ... {folder / 'train.jsonl'} ... checkpoint"
    assert code == 2 and said == naming(f"error: {changed}") and "found content" not in said, said
    code, said = go_on(folder, "--force-resume", "true", stage=stage)
    assert code == 0 and said == naming(f"resumed nevertheless: {changed}")
    assert f"resumed nevertheless: {kind}: got content " in said


def test_changed_data_of_an_older_checkpoint_is_refused_by_its_rows(folder):
    """It does not say what its sources were."""
    for checkpoint in (folder / "run/runs/sft/checkpoints").iterdir():
        state, manifest = (json.loads((checkpoint / f"{name}.json").read_text()) for name in ("state", "manifest"))
        for name in ("inputs", "total_steps"):
            del state[name]
        (checkpoint / "state.json").write_text(json.dumps(state))
        files = manifest["files"] | {"state.json": manifest_entry(checkpoint / "state.json")}
        write_manifest(checkpoint, state["step"], files)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[1:]))
    code, said = go_on(folder)
    assert code == 2 and "error: training rows: got content " in said, said


def test_fewer_steps_than_before_are_told_of(folder):
    ended = "ends at step 3, before it was to end at 4"
    code, said = go_on(folder)
    assert code == 0 and "before it was to end" not in said
    shutil.rmtree(folder / "run/runs/sft/checkpoints/step-4")
    (folder / "run/runs/sft/done.json").unlink()
    story = story_of("sft", folder, STEPS + 1)
    assert run(story, "run") == 0 and story.log("run").read_text().count(ended) == 1
    (folder / "run/runs/sft/done.json").unlink()
    story = story_of("sft", folder, STEPS)
    assert run(story, "run") == 2 and story.log("run").read_text() == naming("step 3 already ... larger number")


def test_another_start_model_is_refused(folder):
    file = folder / "base" / "model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    weights[name] = weights[name] + torch.ones_like(weights[name])
    save_file(weights, file, metadata={"format": "pt"})
    code, said = go_on(folder)
    assert code == 2 and said == naming(f"error: --model-name-or-path ... {folder / 'base'} ... checkpoint")


def test_data_that_was_only_moved_is_the_same(folder):
    (folder / "elsewhere").mkdir()
    (folder / "train.jsonl").rename(folder / "elsewhere" / "moved.jsonl")
    code, _ = go_on(folder, "--data-path", folder / "elsewhere" / "moved.jsonl")
    assert code == 0


def test_an_end_that_was_cut_off_repeats_nothing(folder):
    """Killed between the last checkpoint and the mark of the end: nothing is trained or evaluated again."""
    run_dir = folder / "run" / "runs" / "sft"
    before = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "done.json").unlink()
    assert run(story_of("sft", folder, STEPS), "run") == 0
    assert (run_dir / "metrics.jsonl").read_text() == before and (run_dir / "done.json").is_file()


@pytest.mark.slow
@EACH_STAGE
def test_an_older_step_is_resumed_by_name(folder, stage):
    """What was newer is kept beside, and not taken for this run; the next start goes on with this one."""
    story = story_of(stage, folder, STEPS)
    run_dir = folder / "run" / "runs" / stage
    checkpoints = run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-1", "step-2"]
    assert run(story, "run", "--resume", checkpoints / "step-1") == 0
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names[1:] == ["step-1", "step-2"] and names[0].startswith("set-aside-")
    steps = [line["step"] for line in metrics(run_dir) if "skipped_updates" in line]
    assert steps == [1, 2]
    code, said = go_on(folder, stage=stage)
    assert code == 0 and "/step-2 " in said


def test_starting_over_and_resuming_by_name_contradict(folder):
    checkpoint = folder / "run" / "runs" / "sft" / "checkpoints" / "step-1"
    code, said = go_on(folder, "--overwrite", "true", "--resume", checkpoint)
    assert code == 2 and said == naming("--overwrite ... --resume auto or never") and checkpoint.is_dir()


def test_a_checkpoint_of_another_stage_is_refused(folder):
    checkpoint = folder / "run" / "runs" / "sft" / "checkpoints" / "step-1"
    story = Story("ppo", folder, steps=1, more=("--force-resume", "true", "--resume", str(checkpoint)))
    assert run(story, "other") == 2
    assert (folder / "other.ppo.log").read_text() == naming("state of model ... actor, critic")


def test_a_best_model_that_is_gone_is_not_taken_for_saved(folder):
    best = (*SAME, *SUPERVISED, "--keep-best", "true", "--eval-interval", "1", "--overwrite", "true")
    story = Story("sft", folder, steps=STEPS, more=best)
    assert run(story, "run") == 0
    shutil.rmtree(folder / "run" / "sft")
    again = Story("sft", folder, steps=STEPS, more=best[:-2])
    assert run(again, "run") == 0 and (folder / "run" / "sft" / "model.safetensors").is_file()
