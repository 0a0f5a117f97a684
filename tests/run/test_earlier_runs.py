"""Folders of earlier runs: nothing foreign is deleted, nothing finished redone, nothing resumed under other flags."""

import json
from pathlib import Path

import pytest
from support.messages import naming, refusal
from support.saved_state import write_state

from pipeline.configuration.flags import parse
from pipeline.configuration.origins import DEFAULT, Kind, Origin
from pipeline.configuration.resume_rules import check_resumed, differences, record_of, values_by_rule
from pipeline.errors import InputError
from pipeline.files import OURS, check_replaceable
from pipeline.run.earlier_runs import chosen_before, clear, input_contents, is_finished, write_done
from step1_sft.config import SFTConfig
from step1_sft.stage import STAGE as SFT
from step3_ppo.config import PPOConfig
from step3_ppo.stage import STAGE as PPO


def sft(folder, **changes) -> SFTConfig:
    """A run on the data and the model of `make_inputs`; `changes` are flags of any group."""
    flags = {"output_dir": folder / "sft", "data_path": folder / "rows.jsonl", "model_name_or_path": folder / "base"}
    words = [f"--{name}={value}" for name, value in (flags | changes).items()]
    return parse(SFTConfig, words, section="sft").config


def make_inputs(folder) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (folder / "base").mkdir(parents=True)
    (folder / "base" / "config.json").write_text("{}")
    (folder / "base" / "model.safetensors").write_bytes(bytes(range(64)))


def finish(folder, *, steps=5, with_model=True, **changes):
    """The folder of a finished run of `sft(folder, **changes)` on one rank."""
    make_inputs(folder)
    (folder / "runs").mkdir()
    config = sft(folder, **changes)
    write_done(folder / "runs", config, SFT, steps=steps, ranks=1, inputs=input_contents(config))
    if with_model:
        (folder / "sft").mkdir()
        (folder / "sft" / "config.json").write_text("{}")
    return folder / "runs"


def refused(run, config, *, ranks=1) -> list[str]:
    return refusal(is_finished, run, config, ranks=ranks)


def test_a_folder_of_other_files_is_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="thesis.txt"):
        check_replaceable(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_new_an_empty_and_an_own_folder_are_replaceable(tmp_path):
    check_replaceable(tmp_path / "new")
    check_replaceable(tmp_path)
    (tmp_path / OURS).write_text("{}")
    check_replaceable(tmp_path)


def test_a_finished_run_has_nothing_to_do_unless_it_is_extended(tmp_path):
    run = finish(tmp_path)
    assert is_finished(run, sft(tmp_path), ranks=1)
    assert is_finished(run, sft(tmp_path, max_steps=5), ranks=1), "as many as whole epochs had"
    assert not is_finished(run, sft(tmp_path, max_steps=6), ranks=1)


@pytest.mark.parametrize("asked", [{"overwrite": "true"}, {"resume": "never"}, {"resume": "step-3"}], ids=str)
def test_a_finished_run_is_made_again_where_that_is_asked_for(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    Path("step-3").mkdir()
    assert not is_finished(finish(tmp_path), sft(tmp_path, seed=7, **asked), ranks=1)


@pytest.mark.parametrize("with_run", [True, False])
def test_a_checkpoint_folder_that_is_not_there_is_found_before_anything_else(tmp_path, with_run):
    with pytest.raises(InputError, match="--resume absent: no such folder"):
        is_finished(finish(tmp_path) if with_run else tmp_path, sft(tmp_path, resume="absent"), ranks=1)


def test_a_finished_run_whose_model_is_gone_goes_on(tmp_path):
    assert not is_finished(finish(tmp_path, with_model=False), sft(tmp_path), ranks=1)


@pytest.mark.parametrize("text", ["", "{}", '{"stage": "sft", "steps": 5}'])
def test_a_mark_without_a_whole_record_lets_the_last_checkpoint_decide(tmp_path, text):
    run = finish(tmp_path)
    (run / "done.json").write_text(text)
    assert not is_finished(run, sft(tmp_path, seed=7), ranks=1)


OTHERS = {
    "a setting": ({"learning_rate": 0.5}, "--learning-rate ... 0.5 ... finished run ... 1e-05"),
    "how it is saved": ({"save_dtype": "bf16"}, "--save-dtype ... 'bf16' ... finished run ... 'auto'"),
    "a weight": ({"data_path": "{}/rows.jsonl:0.5"}, "--data-path ... {}/rows.jsonl:0.5"),
    "evaluation rows": ({"eval_data_path": "{}/rows.jsonl"}, "--eval-data-path ... {}/rows.jsonl"),
    "a hub id": (
        {"model_name_or_path": "org/x"},
        "--model-name-or-path ... org/x ... finished",
    ),
    "batches": ({"per_device_train_batch_size": 2}, "rows of an optimizer step ... 2 ... finished run ... 16"),
    "epochs": ({"num_train_epochs": 3}, "--num-train-epochs ... 3 ... finished run ... 1"),
    "fewer steps": ({"max_steps": 2}, "--max-steps ... 2 ... finished run ... 5 steps"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_finished_run_of_other_settings_data_or_models_is_named(tmp_path, name):
    changes, line = OTHERS[name]
    run = finish(tmp_path)
    filled = {flag: str(value).format(tmp_path) for flag, value in changes.items()}
    found, hint = refused(run, sft(tmp_path, **filled))
    assert found == naming(line.format(tmp_path))
    assert hint == naming("--output-dir ... --overwrite")
    assert ("--max-steps above 5" in hint) == (name in ("epochs", "fewer steps")), "more steps do not mend a setting"


def test_whole_epochs_are_more_than_a_run_that_was_stopped_by_max_steps(tmp_path):
    run = finish(tmp_path, max_steps=5)
    assert is_finished(run, sft(tmp_path, max_steps=5, num_train_epochs=3), ranks=1), "the steps decide"
    assert refused(run, sft(tmp_path))[0] == naming("--max-steps ... 0 (whole epochs) ... 5 steps")


def test_changed_content_under_the_same_path_is_a_difference(tmp_path):
    run = finish(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "c", "response": "d"}\n')
    (tmp_path / "base" / "model.safetensors").write_bytes(bytes(64))
    lines = refused(run, sft(tmp_path))
    assert [line.partition(":")[0] for line in lines[:2]] == ["--data-path", "--model-name-or-path"]


def test_of_several_sources_the_changed_one_is_named(tmp_path):
    (tmp_path / "more.jsonl").write_text('{"prompt": "x", "response": "y"}\n')
    both = {"data_path": f"{tmp_path}/rows.jsonl"}
    make_inputs(tmp_path)
    config = sft(tmp_path, **both)
    config = config.replace(data=config.data.replace(data_path=[*config.data.data_path, f"{tmp_path}/more.jsonl"]))
    before = {"inputs": input_contents(config)}
    (tmp_path / "more.jsonl").write_text('{"prompt": "x", "response": "z"}\n')
    (line,) = differences(before, {"inputs": input_contents(config)}, config)
    assert line == naming(f"--data-path ... {tmp_path}/more.jsonl ... checkpoint")


def save_checkpoint(run, config, step=3, *, settings=None) -> Path:
    """What a checkpoint of that run says of it, as far as it is read before a start."""
    folder = run / "checkpoints" / f"step-{step}"
    record = record_of(config, 1, "same")
    write_state(folder, {"step": step, **record, "settings": record["settings"] | (settings or {})})
    return folder


@pytest.mark.parametrize("done", [False, True], ids=["unfinished", "finished, and more steps"])
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"learning_rate": 0.5}, "--learning-rate ... 0.5 ... checkpoint ... 1e-05"),
        (
            {"per_device_train_batch_size": 2},
            "rows of an optimizer step ... 2 ... checkpoint ... 16 (--train-batch-size)",
        ),
    ],
    ids=["a setting", "batches"],
)
def test_a_checkpoint_of_other_settings_is_refused_before_anything_is_loaded(tmp_path, done, changes, line):
    run = finish(tmp_path) if done else tmp_path / "runs"
    folder = save_checkpoint(run, sft(tmp_path))
    found, hint = refused(run, sft(tmp_path, max_steps=6, **changes))
    assert (
        found == naming(line) and hint.startswith(f"{folder}: ") and "--overwrite" in hint and "--force-resume" in hint
    )
    assert not is_finished(run, sft(tmp_path, max_steps=6), ranks=1)
    for way in ("overwrite", "force_resume"):
        assert not is_finished(run, sft(tmp_path, max_steps=6, **changes, **{way: "true"}), ranks=1)
    if "learning_rate" not in changes:
        assert not is_finished(run, sft(tmp_path, max_steps=6, **changes), ranks=None)


@pytest.mark.parametrize("named", [False, True], ids=["newest", "named"])
def test_fewer_steps_than_the_checkpoint_has_are_refused_with_two_ways_out(tmp_path, named):
    folder = save_checkpoint(tmp_path / "runs", sft(tmp_path), step=270)
    flags = {"resume": folder} if named else {}
    (line,) = refused(tmp_path / "runs", sft(tmp_path, max_steps=100, **flags))
    assert line == naming(f"--max-steps 100 ... {folder} ... step 270 ... larger number")
    assert f"`rlhf export {folder} --output FOLDER`" in line
    for more in (270, 271, 0):
        assert not is_finished(tmp_path / "runs", sft(tmp_path, max_steps=more, **flags), ranks=1)
    assert not is_finished(tmp_path / "runs", sft(tmp_path, max_steps=100, overwrite="true"), ranks=1)


def test_nothing_counts_as_chosen_beside_a_zero_stage_that_a_preset_named(tmp_path):
    resolved = parse(PPOConfig, ["--output-dir", str(tmp_path)], section="ppo")
    run = PPO.run_folder(resolved.config.run)
    save_checkpoint(run, resolved.config)
    preset, plan = Origin(Kind.PRESET, "launch/presets/x.yaml"), Origin(Kind.PLAN, "1 x GPU")
    origins = {"actor_zero_stage": preset, "critic_zero_stage": preset, "critic_gradient_checkpointing": plan}
    (run / "config.json").write_text(json.dumps({name: {"value": 1, **one.entry} for name, one in origins.items()}))
    assert chosen_before(PPO, resolved) == {}
    (run / "config.json").write_text(json.dumps({name: {"value": 1, **plan.entry} for name in origins}))
    assert chosen_before(PPO, resolved) == dict.fromkeys(origins, (1, plan))


def test_the_checkpoint_that_is_named_is_compared(tmp_path):
    run, other = tmp_path / "runs", tmp_path / "elsewhere"
    save_checkpoint(run, sft(tmp_path))
    named = save_checkpoint(other, sft(tmp_path, seed=7))
    (line, _) = refused(run, sft(tmp_path, resume=named))
    assert line == naming("--seed ... 1234 ... checkpoint ... 7")
    assert not is_finished(run, sft(tmp_path, seed=7, resume=named), ranks=1)


def test_a_checkpoint_of_a_commit_without_kinds_of_origins_is_refused_in_one_line(tmp_path):
    run = tmp_path / "runs"
    named = save_checkpoint(run, sft(tmp_path))
    entry = {"value": 1234, "from": "default"}
    for written, is_refused in (({"seed": entry}, True), ({"seed": entry | DEFAULT.entry}, False), ({}, False)):
        (run / "config.json").write_text(json.dumps(written))
        for flags in ({}, {"resume": named}, {"force_resume": "true"}):
            if is_refused:
                (line,) = refused(run, sft(tmp_path, **flags))
                assert line == naming(f"{named} ... earlier commit ... d0a9914c ... env.json ... --overwrite")
            else:
                assert not is_finished(run, sft(tmp_path, **flags), ranks=1)
        assert not is_finished(run, sft(tmp_path, overwrite="true"), ranks=1)


def test_a_checkpoint_that_is_damaged_is_passed_over_as_a_resume_does(tmp_path):
    run = tmp_path / "runs"
    save_checkpoint(run, sft(tmp_path))
    newest = save_checkpoint(run, sft(tmp_path), step=4)
    (newest / "state.json").write_text((newest / "state.json").read_text().replace("1234", "1235"))
    assert not is_finished(run, sft(tmp_path), ranks=1)
    (newest / "manifest.json").unlink()
    assert not is_finished(run, sft(tmp_path), ranks=1)


def test_what_cannot_matter_is_no_difference(tmp_path):
    """Intervals, timeouts, how the work is cut, and other paths of equal content."""
    run = finish(tmp_path)
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    changes = {"print_steps": 7, "eval_interval": 3, "save_steps": 2, "rank_timeout_s": 9, "zero_stage": 2}
    changes |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    changes |= {"data_path": tmp_path / "moved.jsonl", "model_name_or_path": tmp_path / "elsewhere"}
    assert is_finished(run, sft(tmp_path, **changes), ranks=1)
    changes["gradient_accumulation_steps"] = 2
    assert is_finished(run, sft(tmp_path, **changes), ranks=2), "half the rows on twice as many ranks"
    assert is_finished(run, sft(tmp_path, **changes), ranks=None)


def test_clearing_takes_what_could_be_mistaken_and_leaves_the_rest(tmp_path):
    for name in ("checkpoints/step-3", "log"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("metrics.jsonl", "samples.jsonl", "row_values.jsonl", "rows.json", "done.json", "config.json"):
        (tmp_path / name).write_text("")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "log"]


def test_settings_that_decide_what_is_learned_must_be_the_same(tmp_path):
    before, after = SFTConfig(), SFTConfig()
    longer = after.replace(run=after.run.replace(max_steps=9, save_steps=3).model_dump())
    check_resumed(tmp_path, record_of(before, 1, "same"), record_of(longer, 1, "same"), longer)
    other = after.replace(model=after.model.replace(learning_rate=1e-2, lora_dim=4).model_dump())
    with pytest.raises(InputError) as error:
        check_resumed(tmp_path, record_of(before, 1, "same"), record_of(other, 1, "same"), other)
    lines = str(error.value).splitlines()
    assert lines[0] == naming("--learning-rate ... 0.01 ... checkpoint ... 1e-05")
    assert lines[1] == naming("--lora-dim ... 4 ... checkpoint ... 0")
    assert "--overwrite" in lines[2]


def test_flags_that_cut_the_work_may_change(tmp_path):
    """Those that messages advise after a lack of memory among them."""
    config = PPOConfig()
    sampling = {"generation_engine": "eager", "rollout_weights": "whole", "inference_tp_size": 2}
    sampling |= {"release_inference_cache": True, "merge_lora_for_generation": False}
    other = config.replace(
        sampling=config.sampling.replace(**sampling).model_dump(),
        deepspeed=config.deepspeed.replace(zero3_gather="layers").model_dump(),
    )
    check_resumed(tmp_path, record_of(config, 1, "same"), record_of(other, 1, "same"), other)
    assert (
        values_by_rule(other, "rounding")["zero3_gather"] == "layers"
        and values_by_rule(other, "rounding")["rollout_weights"] == "whole"
    )


def test_a_checkpoint_that_does_not_know_a_flag_had_its_default(tmp_path):
    config = PPOConfig()
    older = {name: value for name, value in values_by_rule(config, "same").items() if name not in ("kl_coef", "top_k")}
    older["generation_engine"] = "eager"  # compared in an older version, and no longer
    check_resumed(tmp_path, {"settings": older}, record_of(config, 1, "same"), config)
    other = config.replace(ppo=config.ppo.replace(kl_coef=0.5).model_dump())
    with pytest.raises(InputError, match=naming("--kl-coef ... 0.5 ... checkpoint ... 0.1")):
        check_resumed(tmp_path, {"settings": older}, record_of(other, 1, "same"), other)
    with pytest.raises(InputError, match=naming("--gone ... None ... checkpoint ... 3")):
        check_resumed(tmp_path, {"settings": older | {"gone": 3}}, record_of(config, 1, "same"), config)


def test_step_3_writes_several_model_folders():
    names = [folder.name for folder in PPOConfig().outputs]
    assert names == ["actor", "critic"]
    with_average = PPOConfig(ppo=PPOConfig().ppo.replace(enable_ema=True))
    assert [folder.name for folder in with_average.outputs] == ["actor", "critic", "actor_ema"]
