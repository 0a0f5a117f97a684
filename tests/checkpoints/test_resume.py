"""A run that was interrupted goes on to the very weights and numbers of one that was not: steps 1, 2 and 3."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_run import Ended, run_command, run_until
from support.marks import slow_but
from support.messages import naming
from support.model_folders import assert_same_folder
from support.run_words import run_words, start_flags
from support.tiny_run import make_folder, read_metrics

from pipeline.checkpoints.checkpoint_files import manifest_entry, write_manifest
from pipeline.errors import EXIT_DONE, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_NO_CHECKPOINT
from rlhf.models import export
from step3_ppo.models import saving

NOT_REPEATABLE = ("time", "_s", "_per_s", "_gib")
PACKAGES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo"}
FOLDERS = {"sft": ("sft",), "reward": ("reward",), "ppo": ("actor", "critic", "actor_ema")}
# The first run ends here, a second one is interrupted after STOP_AFTER, a third one goes to the end.
FIRST_END, STOP_AFTER, END = 8, 12, 60
PPO_END = 32
PRETRAINING = {
    "learning_rate": 1e-3, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "zero_stage": 2,
    "lora_dim": 4, "save_steps": 0,
}  # fmt: skip
# EMA, ptx, an adaptive KL coefficient, and two epochs of two updates on each rollout.
PPO = {
    "unsup_coef": 0.5, "actor_learning_rate": 1e-4, "critic_learning_rate": 1e-4,
    "per_device_generation_batch_size": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "ppo_epochs": 2, "kl_target": 0.5, "kl_horizon": 100, "enable_ema": "true", "actor_zero_stage": 2,
    "critic_zero_stage": 3,
}  # fmt: skip


def words(stage: str, folder: Path, out: str, steps: int) -> list[str]:
    flags = start_flags(stage, folder) | {
        "lr_scheduler_type": "constant", "num_train_epochs": 100, "max_steps": steps,
        "output_dir": out if stage == "ppo" else f"{out}/{stage}", "save_steps": FIRST_END // 2,
        "keep_checkpoints": 2, "enable_tensorboard": "false",
    }  # fmt: skip
    if stage == "ppo":
        return run_words(folder, **flags | PPO, unsupervised_data_path=folder / "text.jsonl")
    return run_words(folder, **flags | PRETRAINING)


@dataclass(frozen=True)
class Story:
    """One run in one go in `whole/`, and one in three parts in `parts/`."""

    stage: str
    folder: Path
    ended: dict[str, Ended]
    end: int

    def run_dir(self, out: str) -> Path:
        return self.folder / out / "runs" / self.stage

    def command(self, out: str, steps: int, *further: object) -> Ended:
        argv = [*words(self.stage, self.folder, out, steps), *further]
        return run_command(PACKAGES[self.stage], argv, folder=self.folder)


def tell(stage: str, folder: Path) -> Story:
    make_folder(folder)
    end = PPO_END if stage == "ppo" else END
    story = Story(stage, folder, {}, end)
    story.ended["whole"] = story.command("whole", end)
    story.ended["first"] = story.command("parts", FIRST_END)
    metrics = story.run_dir("parts") / "metrics.jsonl"
    argv = words(stage, folder, "parts", end)
    story.ended["stopped"] = run_until(PACKAGES[stage], argv, folder=folder, metrics=metrics, step=STOP_AFTER)
    story.ended["last"] = story.command("parts", end)
    return story


@pytest.fixture(scope="module", params=slow_but(["ppo"], ["sft", "reward", "ppo"]))
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return tell(request.param, tmp_path_factory.mktemp(f"resume-{request.param}"))


@pytest.mark.slow
def test_exit_codes(story: Story) -> None:
    codes = {name: ended.code for name, ended in story.ended.items()}
    assert codes == {"whole": 0, "first": 0, "stopped": 75, "last": 0}, story.ended


def test_a_stopped_run_says_so_in_one_line(story: Story) -> None:
    last = story.ended["stopped"].stderr.splitlines()[-1]
    assert "the same command resumes" in last
    assert "Traceback" not in story.ended["stopped"].stderr


def numbers(run: Path) -> list[dict[str, float]]:
    """The lines of metrics without what depends on the clock and the machine, in the order of steps."""
    kept = [
        {name: value for name, value in line.items() if not name.endswith(NOT_REPEATABLE)} for line in read_metrics(run)
    ]
    return [line for line in kept if any(name.startswith(("loss", "policy")) for name in line)]


def test_all_logged_numbers_are_equal(story: Story) -> None:
    whole, parts = numbers(story.run_dir("whole")), numbers(story.run_dir("parts"))
    assert [line["step"] for line in parts] == list(range(1, story.end + 1))
    for mine, theirs in zip(parts, whole, strict=True):
        assert mine == theirs


def test_final_weights_are_equal_bit_for_bit(story: Story) -> None:
    for name in FOLDERS[story.stage]:
        mine, theirs = (load_file(story.folder / out / name / "model.safetensors") for out in ("parts", "whole"))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine), name


def test_an_exported_checkpoint_is_the_finished_model(story: Story, tmp_path: Path) -> None:
    """All its files, byte for byte, but for the folder and the data type that its settings name."""
    assert export.main([str(story.run_dir("whole")), "--output", f"{tmp_path}/out"]) == EXIT_DONE
    for name in FOLDERS[story.stage]:
        mine = tmp_path / "out" / ("" if story.stage != "ppo" else name)
        assert_same_folder(mine, story.folder / "whole" / name)


def test_an_export_that_was_stopped_between_two_models_goes_on(
    story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if story.stage != "ppo":
        pytest.skip("a single folder is there as a whole or not at all")
    command = [str(story.run_dir("whole")), "--output", f"{tmp_path}/out"]
    (tmp_path / "out" / "actor").mkdir(parents=True)
    assert export.main(command) == EXIT_INPUT and capsys.readouterr().err == naming("actor exists ... new folder")
    (tmp_path / "out" / "actor").rmdir()
    whole, calls = saving.save_model, []

    def stopped(*given: Any, **further: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        whole(*given, **further)

    with monkeypatch.context() as patches:
        patches.setattr(saving, "save_model", stopped)
        assert export.main(command) == EXIT_INTERRUPTED
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["actor"]
    earlier = next(path for path in sorted((story.run_dir("whole") / "checkpoints").iterdir()))
    assert export.main([str(earlier), *command[1:]]) == EXIT_INPUT, "it would be half of each"
    assert export.main(command) == EXIT_DONE
    for name in FOLDERS[story.stage]:
        assert_same_folder(tmp_path / "out" / name, story.folder / "whole" / name)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def spoilt(folder: Path) -> Story:
    """A finished run of step 1 with two checkpoints."""
    story = Story("sft", folder, {}, FIRST_END)
    story.ended["whole"] = story.command("whole", FIRST_END, "--save-steps", 4)
    return story


def spoil(folder: Path) -> None:
    file = next(folder.glob("*.rank-0.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", slow_but(["one byte"], ["one byte", "no manifest", "cut short"]))
def test_a_damaged_checkpoint_is_passed_over(spoilt: Story, damage: str) -> None:
    out = damage.replace(" ", "-")
    shutil.copytree(spoilt.folder / "whole", spoilt.folder / out)
    newest = spoilt.run_dir(out) / "checkpoints" / f"step-{FIRST_END}"
    assert (newest.parent / "step-4").is_dir()
    DAMAGES[damage](newest)
    ended = spoilt.command(out, FIRST_END + 2, "--save-steps", 4)
    assert ended.code == 0 and "checkpoint skipped" in ended.stderr, ended.stderr
    steps = [line["step"] for line in read_metrics(spoilt.run_dir(out)) if "loss" in line]
    assert steps == list(range(1, FIRST_END + 3))
    assert f"] {FIRST_END - 3}/" in ended.stderr, "it goes on from step 4"


DAMAGES: dict[str, Callable[[Path], None]] = {
    "one byte": spoil,
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "cut short": lambda folder: next(folder.glob("*.rank-0.safetensors")).write_bytes(b"short"),
}


def test_no_usable_checkpoint_is_exit_5(spoilt: Story) -> None:
    shutil.copytree(spoilt.folder / "whole", spoilt.folder / "ruined")
    for folder in (spoilt.run_dir("ruined") / "checkpoints").iterdir():
        spoil(folder)
    before = (spoilt.folder / "ruined" / "sft" / "model.safetensors").read_bytes()
    ended = spoilt.command("ruined", FIRST_END + 2)
    assert ended.code == 5
    assert "no usable checkpoint" in ended.stderr and "Traceback" not in ended.stderr
    assert (spoilt.folder / "ruined" / "sft" / "model.safetensors").read_bytes() == before


# --- exported without being resumed ---------------------------------------------------------------------------------


def export_to(output: Path, checkpoint: Path, *further: str) -> int:
    return export.main([str(checkpoint), "--output", str(output), *further])


def test_an_earlier_checkpoint_is_exported_by_its_name(spoilt: Story, tmp_path: Path) -> None:
    run = spoilt.run_dir("whole")
    assert export_to(tmp_path / "older", run / "checkpoints" / "step-4") == EXIT_DONE
    assert export_to(tmp_path / "newest", run, "--dtype", "bf16") == EXIT_DONE
    older, newest = (load_file(tmp_path / name / "model.safetensors") for name in ("older", "newest"))
    assert {tensor.dtype for tensor in newest.values()} == {torch.bfloat16}
    older = {name: tensor.bfloat16() for name, tensor in older.items()}
    assert older.keys() == newest.keys() and any(not torch.equal(older[name], newest[name]) for name in older)
    cards = [(tmp_path / name / "README.md").read_text() for name in ("older", "newest")]
    assert [f"| step {FIRST_END} |" in card for card in cards] == [False, True], "no evaluation of a later model"


def test_the_newest_whole_checkpoint_is_exported(spoilt: Story, tmp_path: Path) -> None:
    shutil.copytree(spoilt.folder / "whole", tmp_path / "whole")
    run = tmp_path / "whole" / "runs" / "sft"
    settings = json.loads((run / "config.json").read_text())  # of before, with a flag for each monitor
    del settings["monitors"]
    (run / "config.json").write_text(json.dumps(settings | {"enable_csv": {"value": True, "from": "command line"}}))
    spoil(run / "checkpoints" / f"step-{FIRST_END}")
    assert export_to(tmp_path / "older", run / "checkpoints" / "step-4") == EXIT_DONE
    assert export_to(tmp_path / "newest", run) == EXIT_DONE
    older, newest = (load_file(tmp_path / name / "model.safetensors") for name in ("older", "newest"))
    assert all(torch.equal(older[name], newest[name]) for name in newest)
    spoil(run / "checkpoints" / "step-4")
    assert export_to(tmp_path / "none", run) == EXIT_NO_CHECKPOINT
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_exported(spoilt: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = spoilt.run_dir("whole"), spoilt.folder / "whole" / "sft"
    shutil.copytree(run / "checkpoints" / "step-4", tmp_path / "alone" / "step-4")
    moved = shutil.copytree(run, tmp_path / "moved")
    settings = json.loads((moved / "config.json").read_text())
    settings["model_name_or_path"]["value"] = str(model)
    (moved / "config.json").write_text(json.dumps(settings))
    elsewhere = shutil.copytree(moved, tmp_path / "elsewhere")
    settings["model_name_or_path"]["value"] = "models/base"
    (elsewhere / "config.json").write_text(json.dumps(settings))
    refused = {
        (tmp_path / "nothing", tmp_path / "out"): "found no checkpoint; name one",
        (model, tmp_path / "out"): f"{model}: found no checkpoint; name one",
        (run, model): f"--output: {model} exists; name a new folder",
        (tmp_path / "alone" / "step-4", tmp_path / "out"): "a checkpoint is read within the folder of its run",
        (moved, tmp_path / "out"): f"{model}: not the model that {moved / 'checkpoints'}",
        (elsewhere, tmp_path / "out"): "models/base: no such folder here, which is the model that ",
    }
    for (checkpoint, output), words in refused.items():
        assert export_to(output, checkpoint) == EXIT_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "change", "says"),
    [
        ("config.json", lambda content: [content], "config.json ... missing or unreadable"),
        ("config.json", lambda content: content | {"seed": 7}, "config.json ... seed ... missing"),
        ("config.json", lambda content: content | {"save_dtype": {}}, "--save-dtype: got None"),
        ("config.json", lambda content: content | {"seed": {"value": [7]}}, "--seed: got [7]"),
        ("env.json", lambda content: [1], "env.json ... missing or unreadable"),
        ("env.json", lambda content: {"stage": {"a": 1}}, "env.json ... {'a': 1} ... sft,"),
        ("state.json", lambda content: content | {"fingerprints": 3}, "state.json ... fingerprints ... missing"),
        ("state.json", lambda content: content | {"state": None}, "state.json ... state ... another type"),
        ("state.json", lambda content: content | {"step": "8"}, "state.json ... step ... another type"),
    ],
)
def test_files_of_a_run_that_hold_other_types(
    spoilt: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, change: Any, says: str
) -> None:
    run = shutil.copytree(spoilt.run_dir("whole"), tmp_path / "run")
    checkpoint = run / "checkpoints" / f"step-{FIRST_END}"
    path = checkpoint / file if file == "state.json" else run / file
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    if file == "state.json":  # else the checkpoint is damaged, and passed over
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        write_manifest(checkpoint, FIRST_END, files | {file: manifest_entry(path)})
    assert export_to(tmp_path / "out", checkpoint) == EXIT_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line == naming(says) and not (tmp_path / "out").exists()
