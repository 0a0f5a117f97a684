"""The batch that a preset's rates are meant for, on any number of ranks."""

from dataclasses import replace

import pytest
from support.messages import naming
from support.source_tree import ROOT

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import load_yaml, parse
from pipeline.configuration.origins import COMMAND_LINE, DEFAULT, Kind, Origin
from pipeline.configuration.rank_rules import EVALUATED, GENERATED, MICRO, STEPS, Choice, evaluated_rows, with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.errors import InputError
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_dpo.config import DPOConfig
from step3_ppo.config import PPOConfig

STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "dpo": DPOConfig}
PRESETS = [
    (path, section) for path in sorted((ROOT / "launch" / "presets").iterdir()) for section in load_yaml(str(path))
]


def on(ranks: int | None, section: str, *words: str) -> Resolved:
    return with_ranks(parse(STAGES[section], list(words), section=section), ranks)


@pytest.mark.parametrize(("preset", "section"), [one for one in PRESETS if one[0].stem != "tiny"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_preset_keeps_its_batch_by_accumulation(preset, section, ranks):
    resolved = on(ranks, section, "--preset", str(preset))
    values = dict(flat_items(resolved.config))
    per_step = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert per_step * ranks == values["train_batch_size"] > 0
    assert all(note.startswith("--inference-tp-size ") for note in resolved.notes)
    if section == "ppo":
        rollout, at_once = resolved.config.rollout_size(ranks), values["per_device_generation_batch_size"]
        assert rollout.responses == per_step * ranks, "one optimizer step on each rollout"
        assert rollout.at_once == min(at_once, per_step) and rollout.prompts == per_step * ranks


def test_the_origin_of_what_follows_is_told():
    resolved = on(2, "ppo", "--train-batch-size", "128")
    assert resolved.config.optimizer.gradient_accumulation_steps == 4
    assert str(resolved.origins["gradient_accumulation_steps"]) == "--train-batch-size 128 on 2 ranks"
    assert resolved.config.rollout_size(2).responses == 128 and resolved.origins["generation_batches"] == DEFAULT
    assert resolved.origins["per_device_train_batch_size"] == DEFAULT


@pytest.mark.parametrize(("ranks", "size"), [(8, 8), (16, 8), (4, 4), (6, 2), (3, 1), (1, 1)])
def test_fewer_ranks_share_a_rollout_than_a_file_says_where_it_is_meant_for_more(tmp_path, ranks, size):
    preset = tmp_path / "p.yaml"
    preset.write_text("inference_tp_size: 8\n")
    resolved = on(ranks, "ppo", "--preset", str(preset))
    assert resolved.config.sampling.inference_tp_size == size
    of_ranks = f"{ranks} rank{'s' if ranks > 1 else ''}"
    note = naming(f"--inference-tp-size {size} ... 8 ({preset}) ... {of_ranks}")
    assert resolved.notes == (() if size == 8 else (note,)) and with_ranks(resolved, ranks) == resolved
    origin = str(preset) if size == 8 else f"in place of 8 in {preset}"
    assert str(resolved.origins["inference_tp_size"]) == origin
    assert on(ranks, "ppo", "--inference-tp-size", "8").config.sampling.inference_tp_size == 8, "given: not changed"


def test_a_planner_that_lowers_a_presets_prompts_at_once_leaves_the_rollout_as_it_is(tmp_path):
    preset = tmp_path / "p.yaml"
    preset.write_text("per_device_generation_batch_size: 8\nper_device_train_batch_size: 8\n")
    resolved = on(1, "ppo", "--preset", str(preset))
    lower = Choice({GENERATED: 2}, COMMAND_LINE).of(replace(resolved, preset=""), 1)
    assert lower.config.rollout_size(1).responses == resolved.config.rollout_size(1).responses == 8


def test_a_planner_that_lowers_given_prompts_at_once_leaves_the_rollout_as_it_is():
    resolved = on(1, "ppo", "--per-device-generation-batch-size", "8", "--train-batch-size", "64")
    lower = Choice({GENERATED: 2}, COMMAND_LINE).of(resolved, 1).config
    assert lower.rollout_size(1).responses == resolved.config.rollout_size(1).responses == 64
    assert (resolved.config.sampling.generation_batches, lower.sampling.generation_batches) == (8, 32)


def test_evaluations_have_the_rows_that_were_given_however_often_a_plan_chooses():
    resolved = on(1, "sft", "--per-device-eval-batch-size", "4", "--eval-iters", "3")
    for size in (32, 8):
        resolved = Choice({EVALUATED: size}, Origin(Kind.PLAN, "a GPU")).of(resolved, 1)
        assert resolved.config.optimizer.per_device_eval_batch_size == size and evaluated_rows(resolved, 99, 1) == 12


def test_fewer_ranks_share_a_rollout_than_the_file_of_config_says_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("inference_tp_size: 8\n")
    resolved = on(6, "ppo", "--config", str(file))
    assert resolved.config.sampling.inference_tp_size == 2
    assert resolved.origins["inference_tp_size"].kind is Kind.FILE


def test_the_notes_of_all_rules_are_kept(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("inference_tp_size: 8\ntrain_batch_size: 64\nauto_fit: true\n")
    before, sharing, rows = on(6, "ppo", "--config", str(file), "--reward-model", "r").notes
    assert before == naming("--auto fit now") and sharing.startswith("--inference-tp-size 2 ") and "66 rows" in rows


def test_a_json_that_contradicts_what_follows_is_told_what_that_follows_from(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}')
    words = ("--train-batch-size", "64", "--deepspeed-config", str(file))
    resolved = on(2, "sft", *words)
    file.write_text('{"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": "auto"}')
    place = Placement(device="cuda", dtype="bf16", ranks=2, run_dir=tmp_path)
    with pytest.raises(InputError) as caught:
        resolved.config.engine_jsons(resolved.origins, place)
    wanted = naming("got 3 ... --gradient-accumulation-steps (--train-batch-size 64 on 2 ranks)")
    assert wanted == str(caught.value)


def test_a_json_that_contradicts_an_accumulation_changes_no_zero_stage(tmp_path):
    """The stage is found first: else none would seem to be right, and another flag would be named."""
    file = tmp_path / "ds.json"
    file.write_text('{"gradient_accumulation_steps": 3}')
    resolved = on(2, "sft", "--train-batch-size", "64", "--offload", "true", "--deepspeed-config", str(file))
    assert resolved.config.model.zero_stage == 1
    place = Placement(device="cuda", dtype="bf16", ranks=2, run_dir=tmp_path)
    with pytest.raises(InputError, match=naming("gradient_accumulation_steps: got 3")):
        resolved.config.engine_jsons(resolved.origins, place)


def test_accumulation_that_is_given_by_a_stronger_layer_ends_it(tmp_path):
    preset = tmp_path / "p.yaml"
    preset.write_text("train_batch_size: 64\nper_device_train_batch_size: 8\n")
    words = ("--preset", str(preset))
    assert on(1, "sft", *words).config.optimizer.gradient_accumulation_steps == 8
    given = on(1, "sft", *words, "--gradient-accumulation-steps", "3")
    assert (given.config.optimizer.gradient_accumulation_steps, given.config.optimizer.train_batch_size) == (3, 0)
    preset.write_text("gradient_accumulation_steps: 3\nper_device_train_batch_size: 8\n")
    assert on(1, "sft", *words, "--train-batch-size", "32").config.optimizer.gradient_accumulation_steps == 4


def test_without_it_or_without_a_number_of_ranks_nothing_follows():
    assert on(3, "sft", "--gradient-accumulation-steps", "5").config.optimizer.gradient_accumulation_steps == 5
    assert on(None, "sft", "--train-batch-size", "64").config.optimizer.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("ranks", "rows", "hint"), [(16, 128, "; --per-device-train-batch-size 4 keeps it"), (3, 72, ""), (5, 80, "")]
)
def test_a_batch_that_the_ranks_cannot_have_is_told(ranks, rows, hint):
    words = ("--train-batch-size", "64", "--per-device-train-batch-size", "8")
    resolved = on(ranks, "reward", *words)
    (note,) = with_ranks(resolved, ranks).notes
    wanted = f"--train-batch-size 64 (command line){hint}"
    assert note == naming(f"{rows} rows ({ranks} ranks x {rows // ranks})", wanted)


@pytest.mark.parametrize(("ranks", "target", "rows"), [(8, 97, 96), (8, 7, 8), (2, 1, 2), (6, 64, 66), (6, 128, 126)])
def test_the_rows_that_are_told_are_those_that_run_however_they_are_cut(ranks, target, rows):
    resolved = on(ranks, "sft", "--train-batch-size", str(target))
    note = naming(f"{rows} rows ({ranks} ranks x {rows // ranks}) ... --train-batch-size {target} (command line)")
    assert resolved.notes == (note,)
    optimizer = resolved.config.optimizer
    assert optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * ranks == rows
    again = Choice({MICRO: 1, STEPS: rows // ranks}, Origin(Kind.PLAN, "a GPU")).of(resolved, ranks)
    assert again.notes == resolved.notes and again.config.optimizer.per_device_train_batch_size == 1


def test_accumulation_that_the_batch_rules_out_is_told(tmp_path):
    words = ("--train-batch-size", "64", "--per-device-train-batch-size", "4", "--gradient-accumulation-steps")
    assert on(2, "sft", *words, "3").notes == (
        naming("--gradient-accumulation-steps 3 (command line) ... --train-batch-size 64 ... 8"),
    )
    assert on(2, "sft", *words, "8").notes == () and with_ranks(on(2, "sft", *words, "3"), 2).notes[1:] == ()


def test_generation_batches_that_are_given_must_fit():
    words = (
        "--train-batch-size",
        "64",
        "--per-device-train-batch-size",
        "8",
        "--per-device-generation-batch-size",
        "8",
    )
    assert on(1, "ppo", *words).config.sampling.generation_batches == 8
    assert on(1, "ppo", *words, "--generation-batches", "16").config.sampling.generation_batches == 16
    with pytest.raises(InputError, match=naming("rollout ... 8 rows a device")):
        on(1, "ppo", *words, "--generation-batches", "1")
