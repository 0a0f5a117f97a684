"""Runs whose flags are `auto`, of ranks that were told of a GPU and compute on the CPU: as the same flags by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.marks import slow_but
from support.run_words import run_stage, run_words, start_flags

from pipeline.launching.target import GIB, Target
from pipeline.planning.fastest import Candidate

FOLDER_SIZES = {"num_train": 40, "num_test": 24}
GPU = Target("GPU", 8 * GIB, tb_per_s=2.0, tflops=300.0, described=False)
CUT = ("per_device_train_batch_size", "gradient_accumulation_steps")


def run(stage: str, folder: Path, out: Path, *words: object, max_steps: int = 2) -> dict[str, Any]:
    """A run of two steps of 8 rows in this process; its flags."""
    flags = start_flags(stage, folder) | {
        "enable_tensorboard": "false", "eval_iters": 1, "output_dir": out if stage == "ppo" else out / stage,
        "max_steps": max_steps, "train_batch_size": 8,
    }  # fmt: skip
    assert run_stage(stage, [*run_words(folder, **flags), *map(str, words)]) == 0
    return json.loads((out / "runs" / stage / "config.json").read_text())


def metrics(out: Path, stage: str) -> list[dict[str, Any]]:
    """What a run has logged, but for times and memory."""
    lines = map(json.loads, (out / "runs" / stage / "metrics.jsonl").read_text().splitlines())
    left_out = ("time", "_s", "gib", "mfu", "utilisation")
    return [
        {name: value for name, value in line.items() if not any(part in name for part in left_out)} for line in lines
    ]


@pytest.mark.parametrize("stage", slow_but(["sft"], ["sft", "reward", "ppo"]))
def test_what_is_chosen_gives_the_numbers_of_the_same_flags_by_hand(folder, tmp_path, monkeypatch, stage):
    monkeypatch.setattr("pipeline.launching.target.this_machine", lambda *slots: GPU)
    settings = run(stage, folder, tmp_path / "auto")
    chosen = {name: entry["value"] for name, entry in settings.items() if str(entry["from"]).startswith("chosen for ")}
    assert [settings[name]["value"] for name in CUT] == [8, 1] and settings[CUT[0]][
        "from"
    ] == "chosen for 1 x GPU, 8.0 GiB each"
    assert settings["per_device_eval_batch_size"]["value"] == (8 if stage == "ppo" else 32)
    monkeypatch.undo()
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value).lower())]
    by_hand = run(stage, folder, tmp_path / "hand", *words)
    assert {by_hand[name]["value"] for name in chosen} == set(chosen.values())
    training = [
        [line for line in metrics(tmp_path / name, stage) if "loss" in line or "loss/policy" in line]
        for name in ("auto", "hand")
    ]
    assert training[0] == training[1] and len(training[0]) == 2


def test_equal_rows_cut_otherwise_have_equal_losses(folder, tmp_path):
    for size in (8, 2):
        run(
            "sft",
            folder,
            tmp_path / str(size),
            "--per-device-train-batch-size",
            size,
            "--gradient-checkpointing",
            "true" if size == 2 else "false",
        )
    one, other = ([line["loss"] for line in metrics(tmp_path / str(size), "sft") if "loss" in line] for size in (8, 2))
    assert one == pytest.approx(other, abs=1e-5) and one[0] != one[1]
    weights = [load_file(tmp_path / str(size) / "sft/model.safetensors") for size in (8, 2)]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=2e-5) for name in weights[0])


def test_evaluations_have_the_rows_of_the_default_whatever_was_chosen(folder, tmp_path, monkeypatch):
    rows = []
    for number, target in enumerate((Target("CPU", 8 * GIB), GPU)):
        monkeypatch.setattr("pipeline.launching.target.this_machine", lambda *slots, target=target: target)
        settings = run("sft", folder, tmp_path / str(number))
        (first, *_) = (line["eval_rows"] for line in metrics(tmp_path / str(number), "sft") if "eval_rows" in line)
        rows.append((settings["per_device_eval_batch_size"]["value"], first))
    assert rows == [(16, 16), (32, 16)]


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_choice_on_the_same_gpus_alone(folder, tmp_path, monkeypatch):
    def goes_on(target: Target, steps: int, *words: object) -> tuple[list[Any], str]:
        monkeypatch.setattr("pipeline.launching.target.this_machine", lambda *slots: target)
        settings = run("sft", folder, tmp_path, *words, max_steps=steps)
        log = (tmp_path / "runs/sft/log.txt").read_text().splitlines()
        (line,) = [line.partition("chosen by the plan: ")[2] for line in log if "chosen by the plan" in line][-1:]
        return [settings[name]["value"] for name in CUT], line

    first, said = goes_on(GPU, 2)
    assert first == [8, 1] and said.startswith("--zero-stage 2 --per-device-train-batch-size 8 ")
    # Another version of the plan would choose otherwise.
    monkeypatch.setattr("pipeline.planning.fastest.micro_batches", lambda resolved, names: [4])
    again = "--zero-stage 2 --per-device-train-batch-size 8 --per-device-eval-batch-size 32 (as the run began)"
    assert goes_on(GPU, 3) == ([8, 1], again)
    # Its memory was measured in between.
    assert goes_on(replace(GPU, memory=int(8.1 * GIB)), 4) == ([8, 1], again)
    other, said = goes_on(Target("GPU", 6 * GIB, described=False), 5)
    assert other == [4, 2] and said.endswith("began on 1 x GPU, 8.1 GiB each")
    given, _ = goes_on(Target("GPU", 6 * GIB, described=False), 6, "--per-device-train-batch-size", 2)
    assert given == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_every_value_that_was_chosen_is_held_when_a_run_goes_on(folder, tmp_path, monkeypatch, stage):
    monkeypatch.setattr("pipeline.launching.target.this_machine", lambda *slots: GPU)

    def chosen(name: str, steps: int) -> dict[str, Any]:
        settings = run(stage, folder, tmp_path / name, max_steps=steps)
        return {flag: one["value"] for flag, one in settings.items() if str(one["from"]).startswith("chosen for ")}

    first = chosen("held", 2)
    # Another version of the plan would choose each of them otherwise.
    monkeypatch.setattr("pipeline.preparation.plans.fastest", another_choice(first))
    other = chosen("other", 2)
    assert first.keys() == other.keys() and not first.items() & other.items()
    assert chosen("held", 3) == first
    assert len(first) >= (6 if stage == "ppo" else 4)


def another_choice(values: dict[str, Any]) -> Any:
    """A plan that chooses another value of each of these flags: half the rows, the other truth value."""
    others = {
        name: not value if isinstance(value, bool) else max(1, value // 2) if value > 1 else 2
        for name, value in values.items()
    }
    return lambda planner, resolved: Candidate.of(planner, resolved, others)


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_the_zero_stage_that_was_chosen_for_it(folder, tmp_path, monkeypatch):
    """But not one that a preset named when it began."""
    monkeypatch.setattr("pipeline.launching.target.this_machine", lambda *slots: GPU)

    def stage_of(steps: int, *words: object) -> int:
        return int(run("sft", folder, tmp_path, *words, max_steps=steps)["zero_stage"]["value"])

    assert stage_of(2) == 2
    monkeypatch.setattr("pipeline.planning.fastest.stages_to_try", lambda *_: [{"zero_stage": 1}])  # of another version
    assert stage_of(3) == 2, "as the run began"
    preset = tmp_path / "presets/1.3b.yaml"
    preset.parent.mkdir()
    preset.write_text("zero_stage: 3\n")
    assert stage_of(4, "--preset", preset) == 3
    preset.write_text("")
    assert stage_of(5, "--preset", preset) == 1
    assert stage_of(6, "--zero-stage", 0) == 0


@pytest.fixture
def goes_on(folder, tmp_path, monkeypatch):
    """A call runs or continues a run by name; it returns its values with their sources, and what it says of them."""
    monkeypatch.setattr("pipeline.launching.target.this_machine", lambda *slots: GPU)

    def run_on(name: str, steps: int, *words: object) -> tuple[dict[str, Any], str]:
        settings = run("sft", folder, tmp_path / name, *words, max_steps=steps)
        log = (tmp_path / name / "runs/sft/log.txt").read_text().splitlines()
        said = [line for line in log if "chosen by the plan" in line][-1]
        return {flag: (entry["value"], entry["from"][:7]) for flag, entry in settings.items()}, said

    return run_on


def test_a_run_that_goes_on_chooses_anew_where_other_flags_are_given(goes_on):
    """A flag that is `auto` again has no value that the others were chosen beside, nor has what it contradicts."""
    goes_on("auto", 2, "--per-device-train-batch-size", 2, "--gradient-checkpointing", "true")
    now, said = goes_on("auto", 3)
    assert [now[name] for name in (*CUT, "gradient_checkpointing")] == [
        (8, "chosen "), (1, "chosen "), (False, "chosen "),
    ]  # fmt: skip
    assert "as the run began" not in said


@pytest.mark.slow
def test_a_run_that_goes_on_takes_another_zero_stage_where_its_flags_ask_for_it(goes_on):
    assert goes_on("offloaded", 2)[0]["zero_stage"] == (2, "chosen ")
    now, said = goes_on("offloaded", 3, "--offload-parameters", "true")
    assert now["zero_stage"] == (3, "chosen ") and said.endswith("began with other flags")
    goes_on("lower", 2)
    assert goes_on("lower", 3, "--zero-stage", 1)[0]["zero_stage"][0] == 1
    lacking, _ = goes_on("lower", 4, "--zero-stage", 1, "--per-device-eval-batch-size", 100_000)
    assert lacking["per_device_train_batch_size"] == (1, "chosen "), "beside a batch that no memory is left for"


def test_what_fit_changed_is_held_when_a_run_goes_on_with_the_flags_that_it_was_changed_for(
    folder, tmp_path, monkeypatch
):
    """Of 32 rows at once, which lack memory on this GPU, it takes 16; another number is the user's again."""
    little = replace(GPU, memory=624 * 2**20)
    monkeypatch.setattr("pipeline.launching.target.this_machine", lambda *slots: little)
    words = ("--train-batch-size", 32, "--gradient-checkpointing", "false", "--zero-stage", 0,
             "--per-device-eval-batch-size", 8, "--per-device-train-batch-size")  # fmt: skip

    def micro_batch(steps: int, *more: object) -> dict[str, Any]:
        return dict(run("sft", folder, tmp_path, *words, *more, max_steps=steps)[CUT[0]])

    origin = {"kind": "PLAN", "source": "1 x GPU, 0.6 GiB each", "replaced": 32}
    assert micro_batch(2, 32, "--auto", "fit") == {"value": 16, "from": f"chosen for {little}", "origin": origin}
    assert not list((tmp_path / "runs/sft").glob("automatic*"))
    alone = ("--train-batch-size", 0, *words[2:], 32)
    fitted = run("sft", folder, tmp_path / "alone", *alone, "--auto", "fit", max_steps=2)
    micro, steps = (fitted[name]["value"] for name in CUT)
    assert micro * steps == 32 and steps > 1
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.preparation.plans.fits", lambda *_: True)  # where the given batch fits after all
        given = run("sft", folder, tmp_path / "alone", *alone, max_steps=3)
    assert [given[name]["value"] for name in CUT] == [32, 1], "an accumulation belongs to its micro-batch"
    monkeypatch.setattr("pipeline.preparation.plans.fitting_flags", lambda *_: {CUT[0]: 4, CUT[1]: 8})  # of today
    assert micro_batch(3, 32, "--auto-fit")["value"] == 16, "also by the words of before"
    assert micro_batch(4, 8, "--auto", "fit")["origin"] == {"kind": "COMMAND_LINE", "source": ""}
    assert micro_batch(5, 32)["value"] == 32


def test_what_a_commit_before_auto_searched_is_not_read(folder, tmp_path):
    """It wrote its choice to automatic.yaml, which is a file like any other now."""
    rows = ("--per-device-train-batch-size", 8, "--train-batch-size", 8)
    run("sft", folder, tmp_path, *rows)
    searched = tmp_path / "runs/sft/automatic.yaml"
    searched.write_text(f'# In place of: {{"{CUT[0]}": 8}}\n{CUT[0]}: 4\n{CUT[1]}: 2\nsub_group_size: 1000\n')
    settings = run("sft", folder, tmp_path, *rows, "--auto-fit", max_steps=3)
    assert [settings[name]["value"] for name in CUT] == [8, 1] and settings["sub_group_size"]["value"] > 1000
    assert searched.is_file()
