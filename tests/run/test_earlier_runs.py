"""Folders of earlier runs: nothing foreign is deleted, nothing finished redone, nothing resumed under other flags."""

import json

import pytest

from pipeline.configuration.resume_rules import check_same_settings, defaults_of, values_by_rule
from pipeline.errors import InputError
from pipeline.files import OURS, check_replaceable
from pipeline.run.run import clear, is_finished, model_folders
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


def sft(folder, **changes) -> SFTConfig:
    made = SFTConfig()
    return made.replace(run=made.run.replace(output_dir=str(folder / "sft"), **changes).model_dump())


def finish(folder, *, stage="sft", steps=5, with_model=True):
    (folder / "runs").mkdir()
    (folder / "runs" / "done.json").write_text(json.dumps({"stage": stage, "steps": steps}))
    if with_model:
        (folder / "sft").mkdir()
        (folder / "sft" / "config.json").write_text("{}")
        (folder / "sft" / OURS).write_text("{}")
    return folder / "runs"


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
    assert is_finished(run, sft(tmp_path), "sft")
    assert is_finished(run, sft(tmp_path, max_steps=5), "sft")
    assert not is_finished(run, sft(tmp_path, max_steps=6), "sft")


def test_a_finished_run_whose_model_is_gone_goes_on(tmp_path):
    assert not is_finished(finish(tmp_path, with_model=False), sft(tmp_path), "sft")


def test_a_run_folder_of_another_stage_is_refused(tmp_path):
    run = finish(tmp_path, stage="reward")
    with pytest.raises(InputError, match="holds a run of reward, this is sft"):
        is_finished(run, sft(tmp_path), "sft")


def test_clearing_takes_what_could_be_mistaken_and_leaves_the_rest(tmp_path):
    for name in ("checkpoints/step-3", "log"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("metrics.jsonl", "samples.jsonl", "done.json", "config.json"):
        (tmp_path / name).write_text("")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "log"]


def test_settings_that_decide_what_is_learned_must_be_the_same(tmp_path):
    before, after = SFTConfig(), SFTConfig()
    longer = after.replace(run=after.run.replace(max_steps=9, save_steps=3).model_dump())
    check_same_settings(tmp_path, values_by_rule(before, "same"), values_by_rule(longer, "same"))
    other = after.replace(model=after.model.replace(learning_rate=1e-2, lora_dim=4).model_dump())
    with pytest.raises(InputError) as refused:
        check_same_settings(tmp_path, values_by_rule(before, "same"), values_by_rule(other, "same"))
    lines = str(refused.value).splitlines()
    assert lines[0] == "--learning_rate: found 0.01, the checkpoint has 1e-05"
    assert lines[1] == "--lora_dim: found 4, the checkpoint has 0"
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
    check_same_settings(tmp_path, values_by_rule(config, "same"), values_by_rule(other, "same"))
    assert (
        values_by_rule(other, "rounding")["zero3_gather"] == "layers"
        and values_by_rule(other, "rounding")["rollout_weights"] == "whole"
    )


def test_a_checkpoint_that_does_not_know_a_flag_had_its_default(tmp_path):
    config = PPOConfig()
    older = {name: value for name, value in values_by_rule(config, "same").items() if name not in ("kl_coef", "top_k")}
    older["generation_engine"] = "eager"  # compared in an older version, and no longer
    check_same_settings(tmp_path, older, values_by_rule(config, "same"), defaults=defaults_of(config))
    other = config.replace(ppo=config.ppo.replace(kl_coef=0.5).model_dump())
    with pytest.raises(InputError, match="--kl_coef: found 0.5, the checkpoint has 0.1"):
        check_same_settings(tmp_path, older, values_by_rule(other, "same"), defaults=defaults_of(other))
    with pytest.raises(InputError, match="--gone: found None, the checkpoint has 3"):
        check_same_settings(tmp_path, older | {"gone": 3}, values_by_rule(config, "same"), defaults=defaults_of(config))


def test_step_3_writes_several_model_folders():
    names = [folder.name for folder in model_folders(PPOConfig(), "ppo")]
    assert names == ["actor", "critic"]
    with_average = PPOConfig(ppo=PPOConfig().ppo.replace(enable_ema=True))
    assert [folder.name for folder in model_folders(with_average, "ppo")] == ["actor", "critic", "actor_ema"]
