"""Models that step 3 refuses before it reads any weight."""

import copy
import json
from types import SimpleNamespace

import pytest
from support.ppo_settings import make_run, ppo_config
from support.ppo_updates import (
    MEAN,
)
from support.tiny_models import NUM_TOKENS, save_tiny
from transformers import PreTrainedTokenizerFast

from pipeline.errors import InputError
from step3_ppo.models.engines import make_models, make_sources


def test_dropout_of_lora_layers_is_refused(trained_folders):
    """It would be drawn anew in each pass: the first ratio could not be 1."""
    with pytest.raises(ValueError, match="lora_dropout: .*0"):
        ppo_config(trained_folders, actor={"lora_dim": 4, "lora_dropout": 0.1})


def other_tokenizer(source: str, folder) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = saved["model"]["vocab"]
    saved["model"]["vocab"] = {t: i if i < 4 else NUM_TOKENS + 3 - i for t, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def made(world, folder, config):
    """The models of a run with `config`."""
    run = make_run(world, folder, config)
    return make_models(run, config, make_sources(run, config))


def test_a_critic_with_another_tokenizer_is_refused_and_a_reward_model_is_not(
    world, trained_folders, tmp_path, bpe_folder
):
    folder = tmp_path / "other"
    save_tiny("llama", bpe_folder, folder, reward=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained_folders.actor)
    tokenizer.save_pretrained(folder)
    other_tokenizer(trained_folders.actor, folder)
    config = ppo_config(SimpleNamespace(actor=trained_folders.actor, reward=str(folder)))
    with pytest.raises(InputError, match="--critic_model_name_or_path .* its tokenizer is not that of"):
        made(world, tmp_path, config)
    config = copy.deepcopy(ppo_config(trained_folders)).replace(reward_model_name_or_path=str(folder))
    models = made(world, tmp_path, config)
    assert models.reward_tokenizer is not None and (models.score_mean, models.score_std) == (0.0, 1.0)
    assert models.critic.module.score_mean == MEAN


def test_each_engine_has_the_deepspeed_json_of_its_own_role(world, trained_folders, tmp_path):
    """Actor and critic differ in ZeRO stage, with ptx text in the accumulation too; frozen ones follow their twins."""
    config = ppo_config(trained_folders, actor={"zero_stage": 1})
    config = config.replace(critic=config.critic.replace(zero_stage=3).model_dump())
    config = config.replace(data=config.data.replace(unsupervised_data_path=["text.jsonl"]).model_dump())
    models = made(world, tmp_path, config)
    stages = {name: engine.deepspeed.zero_optimization_stage() for name, engine in models.trained.items()}
    assert stages == {"actor": 1, "critic": 3}
    accumulated = {name: engine.deepspeed.gradient_accumulation_steps() for name, engine in models.trained.items()}
    assert accumulated == {"actor": 2, "critic": 1}
    assert {name: engine.weights is not None for name, engine in models.frozen.items()} == {
        "reference": False, "reward": True,
    }  # fmt: skip


def test_lengths_beyond_the_positions_are_refused(world, trained_folders, tmp_path):
    config = ppo_config(trained_folders)
    config = config.replace(data=config.data.replace(max_prompt_seq_len=60).model_dump())
    with pytest.raises(InputError, match="max_answer_seq_len 68: the model .* has 64 positions"):
        made(world, tmp_path, config)
