"""The size of a rollout: by its own flag, by the product of older ones, or by the checkpoint of a run that goes on."""

import json
import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from support.in_process import error_lines
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.saved_state import write_state
from support.tiny_run import read_metrics

from pipeline.checkpoints.checkpoint import PACKAGES, log_differences
from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import Choice, with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import record_of, values_by_rule
from pipeline.configuration.stage import Stage
from pipeline.errors import InputError
from pipeline.preparation.stage_entry import read_flags
from pipeline.run import run as run_module
from pipeline.run.earlier_runs import is_finished
from pipeline.run.resolve import not_given
from rlhf.train_config import as_override
from step3_ppo.config import PPOConfig
from step3_ppo.rollout import generation_options, make_schedule
from step3_ppo.stage import STAGE

GENERATED = "--per-device-generation-batch-size"


def on(ranks: int | None, words: str) -> Resolved:
    return with_ranks(parse(PPOConfig, words.split(), section="ppo"), ranks)


def counts(ranks: int, words: str) -> tuple[int, int, int]:
    """Prompts of a rollout, prompts that a rank samples at once, and optimizer steps of a rollout."""
    found = make_schedule(on(ranks, words).config, num_prompts=1000, world_size=ranks)
    return found.prompts_per_rollout, found.prompts_at_once, found.steps_per_rollout


@pytest.mark.parametrize(
    ("ranks", "words", "expected"),
    [
        (1, "", (16, 16, 1)),
        (4, "", (64, 16, 1)),
        (1, "--gradient-accumulation-steps 4", (64, 16, 1)),
        (2, "--per-device-train-batch-size 4", (8, 4, 1)),
        (2, "--train-batch-size 128 --per-device-train-batch-size 8", (128, 16, 1)),
        (2, "--num-samples-per-prompt 4 --ppo-epochs 3", (8, 4, 3)),
        (2, "--num-samples-per-prompt 3", (32, 16, 3)),  # 96 responses, the fewest whole prompts of whole steps
    ],
)
def test_it_is_one_optimizer_steps_where_nothing_says_it(ranks, words, expected):
    assert counts(ranks, words) == expected and "can replace" not in on(ranks, words).config.rollout_size(ranks).line


@pytest.mark.parametrize(
    ("ranks", "words", "expected"),
    [
        (1, "--rollout-batch-size 64", (64, 16, 4)),
        (4, "--rollout-batch-size 64", (64, 16, 1)),
        (2, f"--rollout-batch-size 64 {GENERATED} 5", (64, 5, 2)),
        (2, f"--rollout-batch-size 32 {GENERATED} 100", (32, 16, 1)),
        (2, f"--rollout-batch-size 0 {GENERATED} 5", (32, 5, 1)),
        (2, "--rollout-batch-size 64 --num-samples-per-prompt 4", (16, 8, 2)),
    ],
)
def test_the_flag_counts_responses_over_all_ranks_and_the_batch_is_what_is_sampled_at_once(ranks, words, expected):
    assert counts(ranks, words) == expected and "can replace" not in on(ranks, words).config.rollout_size(ranks).line


def test_the_cache_has_a_slot_for_each_response_that_is_sampled_at_once():
    words = f"--rollout-batch-size 64 --num-samples-per-prompt 2 {GENERATED} 10 --per-device-eval-batch-size 1"
    assert generation_options(on(2, words).config, 2).min_slots == 20
    assert generation_options(on(4, words).config, 4).min_slots == 16, "a rank has 8 prompts"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("words", "of_a_rank"),
    [
        (f"{GENERATED} 32", 32),
        (f"{GENERATED} 8 --per-device-train-batch-size 4", 8),
        (f"{GENERATED} 8 --generation-batches 6", 48),
        ("--generation-batches 2", 32),
        ("--generation-batch-numbers 2", 32),
        (f"{GENERATED} 8 --num-samples-per-prompt 4", 8),
        (f"{GENERATED} 8 --train-batch-size 128 --per-device-train-batch-size 8", 0),  # as many as a step takes
    ],
)
def test_older_flags_that_are_given_by_hand_make_the_rollouts_that_they_made(tmp_path, ranks, words, of_a_rank):
    """Ranks x --per-device-generation-batch-size x --generation-batches, also out of a file, and told in a line."""
    prompts = of_a_rank * ranks or 128
    assert counts(ranks, words)[0] == prompts
    responses = prompts * (4 if "samples" in words else 1)
    line = on(ranks, words).config.rollout_size(ranks).line
    assert "; from --per-device-generation-batch-size " in line
    assert line == naming(f"--rollout-batch-size {responses} can replace")
    names = words.replace("--", "").split()
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in zip(names[::2], names[1::2], strict=True)))
    assert counts(ranks, f"--config {file}")[0] == prompts
    assert counts(ranks, f"--config {file} --rollout-batch-size {2 * responses}")[0] == 2 * prompts, "it is stronger"
    again = with_ranks(on(ranks, words), ranks)
    assert again == on(ranks, words)


def test_batches_of_prompts_are_compared_with_the_rows_of_a_step_that_are_given():
    assert counts(1, f"--train-batch-size 8 --generation-batches 2 {GENERATED} 4") == (8, 4, 1)
    assert counts(2, f"--train-batch-size 8 --generation-batches 3 {GENERATED} 4") == (24, 4, 3)
    assert counts(1, "--train-batch-size 32 --generation-batches 2 --old-log-probs sampler") == (32, 16, 1)
    with pytest.raises(InputError, match=naming("step's 12 ... --rollout-batch-size 12")):
        on(1, f"--train-batch-size 12 --generation-batches 2 {GENERATED} 4")
    assert on(None, f"--train-batch-size 12 --generation-batches 2 {GENERATED} 4"), "ranks are not known yet"


def test_prompts_at_once_of_a_preset_are_not_given_by_hand(tmp_path):
    preset = tmp_path / "preset.yaml"
    text = "per_device_generation_batch_size: 16\nper_device_train_batch_size: 8\ntrain_batch_size: 128\n"
    preset.write_text(text, encoding="utf-8")
    assert counts(2, f"--preset {preset}") == (128, 16, 1) == counts(2, f"--preset {preset} --rollout-batch-size 0")
    assert counts(2, f"--preset {preset} --rollout-batch-size 256") == (256, 16, 2)
    assert counts(2, f"--preset {preset} --generation-batches 8") == (256, 16, 2)
    assert counts(2, f"--preset {preset} {GENERATED} 128") == (256, 128, 2)
    planned = replace(on(2, f"--preset {preset}"), preset="")  # as changes that would make it fit are planned
    assert with_ranks(planned, 2).config.rollout_size(2).prompts == 128
    on_three = with_ranks(planned, 3).config.rollout_size(3)
    assert (on_three.prompts, on_three.steps) == (120, 1), "5 micro-batches of 8 on each, though 16 are sampled at once"


def test_the_last_word_of_two_layers_holds(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("rollout_batch_size: 64\n")
    assert counts(1, f"--config {file} --generation-batches 2") == (32, 16, 2)
    file.write_text("generation_batches: 2\n")
    assert counts(1, f"--config {file} --rollout-batch-size 64") == (64, 16, 4)


@pytest.mark.parametrize(
    ("ranks", "words", "line"),
    [
        (
            2,
            "--rollout-batch-size 100",
            "--rollout-batch-size ... 100 ... 32 rows ... --num-samples-per-prompt 1 x 2 ranks ... "
            "--rollout-batch-size 96 or --rollout-batch-size 128",
        ),
        (
            2,
            "--rollout-batch-size 20 --num-samples-per-prompt 8 --per-device-train-batch-size 2",
            "--rollout-batch-size ... 20 ... 4 rows ... --num-samples-per-prompt 8 x 2 ranks ... "
            "--rollout-batch-size 16 or --rollout-batch-size 32",
        ),
        (
            3,
            "--rollout-batch-size 32 --per-device-train-batch-size 16",
            "--rollout-batch-size ... 32 ... 48 rows ... --num-samples-per-prompt 1 x 3 ranks ... "
            "--rollout-batch-size 48",
        ),
        (
            1,
            "--rollout-batch-size 64 --old-log-probs sampler",
            "--old-log-probs: sampler ... 4 ... trainer ... --ppo-epochs 1 and --rollout-batch-size 16",
        ),
        (
            1,
            f"{GENERATED} 64 --old-log-probs sampler",
            "--old-log-probs: sampler ... 4 ... trainer ... --ppo-epochs 1 and --gradient-accumulation-steps",
        ),
        (
            1,
            f"{GENERATED} 20",
            "20 rows a device (--per-device-generation-batch-size 20 ... step's 16 ... "
            "--per-device-generation-batch-size 16 ... --rollout-batch-size 16 without --generation-batches",
        ),
        (
            1,
            "--rollout-batch-size 64 --generation-batches 2",
            "--generation-batches 2 ... --rollout-batch-size 64",
        ),
    ],
)
def test_a_size_that_does_not_divide_is_refused_in_the_words_of_the_flag_that_was_given(ranks, words, line):
    with pytest.raises(InputError) as error:
        on(ranks, words)
    assert str(error.value) == naming(line)


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("--rollout-batch-size 100", "--ppo.rollout-batch-size 96 or --ppo.rollout-batch-size 112"),
        (
            "--per-device-generation-batch-size 20",
            "--ppo.per-device-generation-batch-size 16 ... "
            "--ppo.rollout-batch-size 16 without --ppo.generation-batches",
        ),
    ],
)
def test_every_flag_that_an_error_of_a_stage_proposes_can_be_typed(words, right):
    with pytest.raises(InputError) as error:
        on(1, words)
    assert as_override(str(error.value), "ppo") == naming(right)


def test_a_command_that_gives_a_wrong_size_ends_with_2_and_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_ppo(["--rollout-batch-size", "17"]) == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert line == naming("error: --rollout-batch-size ... 17 ... step's 16 rows")


# --- a run that goes on ---


def test_a_run_that_goes_on_with_fewer_prompts_at_once_keeps_its_rollouts_on_any_number_of_ranks(tmp_path):
    words = ["--per-device-train-batch-size", "4", "--output-dir", str(tmp_path / "out"), "--data-split", "none"]
    resolved = read_flags(STAGE, words)
    checkpoint = STAGE.run_folder(resolved.config.run) / "checkpoints/step-3"
    sizes = {"rows of an optimizer step": 8, "prompts of a rollout": 32}  # of 2 ranks with 16 prompts at once
    write_state(checkpoint, {"step": 3, "settings": {"data_split": "none"}, "sizes": sizes, "layout": {}})
    (checkpoint.parents[1] / "env.json").write_text(json.dumps({"stage": "ppo", "versions": {}}))
    found = read_flags(STAGE, [*words, *f"{GENERATED} 3".split()])
    assert not_given(found)["rollout_batch_size"][0] == 32, "hosts that do not see the checkpoint are told"
    for ranks in (1, 2):
        kept = with_ranks(found, ranks)
        assert kept.config.rollout_size(ranks).prompts == 32, "fewer at once, on any number of ranks"
        assert kept.notes == (naming(f"--rollout-batch-size 32 ... 0 (default) ... {checkpoint}"),)
    assert kept.config.rollout_size(2).steps == 4 and not is_finished(checkpoint.parents[1], kept.config, ranks=2)
    assert read_flags(STAGE, words).config.sampling.rollout_batch_size == 0, "without them it is compared"
    for more, prompts in (("", 8), ("--overwrite", 8), (f"{GENERATED} 16", 32), ("--rollout-batch-size 16", 16)):
        given = with_ranks(read_flags(STAGE, [*words, *more.split()]), 2)
        assert given.config.rollout_size(2).prompts == prompts, "what is given by hand holds"
        if prompts != 32 and more != "--overwrite":
            with pytest.raises(InputError, match=naming(f"prompts of a rollout ... {prompts} ... checkpoint ... 32")):
                is_finished(checkpoint.parents[1], given.config, ranks=2)


@pytest.mark.parametrize("changes", ["", "--actor-zero-stage 1"])
def test_the_same_command_resumes_without_a_word_of_other_settings(tmp_path, caplog, changes):
    """A new run's rollouts are of the prompts at once that it gives; one that goes on has them from its checkpoint."""
    words = f"{GENERATED} 8 --per-device-train-batch-size 4 --output-dir {tmp_path}/out --data-split none".split()
    began = with_ranks(read_flags(STAGE, words), 1).config
    checkpoint = STAGE.run_folder(began.run) / "checkpoints/step-3"
    saved = record_of(began, 1, "same") | {"layout": values_by_rule(began, "rounding"), "world_size": 1}
    saved |= {"step": 3, "versions": {name: version(name) for name in PACKAGES}}
    write_state(checkpoint, saved)
    (checkpoint.parents[1] / "env.json").write_text(json.dumps({"stage": "ppo", "versions": {}}))
    goes_on = with_ranks(read_flags(STAGE, [*words, *changes.split()]), 1).config
    assert (began.sampling.generation_batches, goes_on.sampling.rollout_batch_size) == (1, 8)
    with caplog.at_level(logging.WARNING):
        log_differences(checkpoint, saved, values_by_rule(goes_on, "rounding"), goes_on)
    told = [naming("actor_zero_stage 0 -> 1 ... up to rounding")] if changes else []
    assert caplog.messages == told
    for value, more in (("auto", 0), ("fp32", 1)):  # of a version that had this flag
        saved["layout"]["communication_data_type"] = value
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            log_differences(checkpoint, saved, values_by_rule(goes_on, "rounding"), goes_on)
        assert len(caplog.messages) == max(len(told), more)
        assert ("communication_data_type fp32 -> auto" in caplog.text) == bool(more)


def trained(folder: Path, out: Path, steps: int, more: str = "") -> int:
    words = ppo_words(
        folder, out, critic_model_name_or_path=folder / "scorer", eval_data_path=None, eval_fraction=0.0,
        max_answer_seq_len=6, max_steps=steps, save_steps=3, keep_checkpoints=9,
    )  # fmt: skip
    return run_ppo([*words, *more.split()])


def losses(out: Path) -> list[float]:
    return [line["loss/policy"] for line in read_metrics(out / "runs/ppo") if "loss/policy" in line]


@pytest.mark.slow
def test_a_run_goes_on_with_its_rollouts_by_other_prompts_at_once_and_refuses_another_size(folder, tmp_path, capsys):
    whole, few = tmp_path / "whole", tmp_path / "few"
    assert trained(folder, whole, 10, f"{GENERATED} 16") == 0
    assert trained(folder, few, 6, f"{GENERATED} 16") == 0 and trained(folder, few, 7, f"{GENERATED} 16") == 0
    assert "other settings" not in (few / "runs/ppo/log.txt").read_text(), "the same command"
    capsys.readouterr()
    assert trained(folder, few, 10, "--rollout-batch-size 8") == 2
    assert naming("prompts of a rollout ... 8 ... checkpoint ... 16") in capsys.readouterr().err.splitlines()
    assert trained(folder, few, 8, "--rollout-batch-size 16") == 0, "the same product passes"
    assert trained(folder, few, 10, f"{GENERATED} 3") == 0
    assert losses(few) == pytest.approx(losses(whole), rel=1e-5), "fewer prompts at once, the same rollouts"
    assert trained(folder, tmp_path / "new", 2, "--rollout-batch-size 16") == 0
    capsys.readouterr()
    assert trained(folder, tmp_path / "new", 4) == 2, "without the flag"
    assert naming("prompts of a rollout ... 4 ... checkpoint ... 16") in capsys.readouterr().err.splitlines()


def test_rank_0_says_it_where_hosts_see_other_checkpoints(tmp_path, monkeypatch):
    given = on(2, "--data-split none --dtype fp32")
    of_rank_0 = not_given(given.changed({"rollout_batch_size": 64}))
    seen = list[int]()
    fields = {name: getattr(STAGE, name) for name in STAGE.__dataclass_fields__}
    stage = Stage(**(fields | {"loop": lambda: lambda run, config: seen.append(config.rollout_size(2).responses)}))
    answers = iter((False, of_rank_0, Choice(), {}))  # finished, unset flags, choice, decisions
    monkeypatch.setattr(run_module.dist, "on_main", lambda work: next(answers))
    world = run_module.dist.World(1, 2, None)  # type: ignore[arg-type]  # no device is used
    run = run_module.Run(world, tmp_path, stage, given, run_module.StopRequest())
    run_module.begin(run, lambda stage, resolved: Choice())
    assert seen == [64]
