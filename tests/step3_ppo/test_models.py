"""Models that step 3 refuses before it reads any weight."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.messages import naming
from support.ppo_settings import make_run, ppo_config
from support.ppo_updates import (
    MEAN,
)
from support.tiny_models import NUM_TOKENS, save_tiny
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flags import parse
from pipeline.engine import start_models
from pipeline.engine.engine import TrainingEngine
from pipeline.errors import EnvironmentFault, InputError
from pipeline.inference.answer_scores import load_scorer, score_answers
from pipeline.kernels.int8_linear import Int8Linear
from pipeline.models.lora import STORED_INT8
from pipeline.models.reward_model import last_token_scores
from pipeline.rewards.reward_model import scored_ids
from pipeline.rewards.rows import Scale, ScoredRows
from step3_ppo.config import PPOConfig
from step3_ppo.models.engines import make_models, make_sources
from step3_ppo.stage import STAGE


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
    with pytest.raises(InputError, match=naming("--critic-model-name-or-path ... tokenizer is not")):
        made(world, tmp_path, config)
    config = copy.deepcopy(ppo_config(trained_folders)).replace(reward_model_name_or_path=str(folder))
    models = made(world, tmp_path, config)
    (judge,) = models.rewards
    assert judge.tokenizer is not None and (judge.weight, judge.scale) == (1.0, Scale(0.0, 1.0, takes_first=True))
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


def wrapped(engine):
    """DeepSpeed's engine of a model."""
    return engine.deepspeed if isinstance(engine, TrainingEngine) else engine._forward


OWN = {
    "zero_stage": ({"zero_stage": "3"}, lambda engine: engine.weights is not None),
    "quantization": (
        {"quantization": "int8"},
        lambda engine: any(isinstance(m, Int8Linear) for m in engine.module.modules()),
    ),
    "attn_implementation": (
        {"attn_implementation": "eager"},
        lambda engine: engine.module.get_submodule("model").config._attn_implementation == "eager",
    ),
    "offload_weights": (
        {"zero_stage": "3", "offload_weights": "cpu"},
        lambda engine: wrapped(engine).zero_offload_param() is not None,
    ),
}
LORA = {"lora_dim": 2, "lora_module_name": "q_proj"}


@pytest.mark.parametrize("name", OWN)
def test_a_flag_of_the_reward_model_is_of_no_other_model(world, trained_folders, tmp_path, name):
    """A reward model of flags of its own is loaded beside the critic, whose adapters off would serve as it."""
    own, holds = OWN[name]
    config = ppo_config(trained_folders, actor=LORA)
    config = config.replace(critic=config.critic.replace(**LORA).model_dump())
    assert set(made(world, tmp_path, config).named()) == {"actor", "critic"}
    models = made(world, tmp_path, config.replace(**{f"reward_model_{field}": own[field] for field in own}))
    assert set(models.named()) == {"actor", "critic", "reward"}
    assert {role: bool(holds(engine)) for role, engine in models.named().items()} == {
        "actor": False, "critic": False, "reward": True,
    }  # fmt: skip


def adapter_of(reward: str, folder) -> str:
    """A folder of stage 2 with an adapter of a reward model alone, and a head of its own."""
    model = AutoModelForSequenceClassification.from_pretrained(reward)
    peft = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, peft).save_pretrained(folder)
    model.config.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(reward).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("starts_as_adapter", [False, True])
def test_a_loaded_reward_model_scores_as_the_critic_before_training(
    world, trained_folders, tmp_path, starts_as_adapter
):
    reward = adapter_of(trained_folders.reward, tmp_path / "adapter") if starts_as_adapter else trained_folders.reward
    config = ppo_config(SimpleNamespace(actor=trained_folders.actor, reward=reward))
    config = config.replace(critic=config.critic.replace(**LORA).model_dump())
    ids = torch.randint(4, NUM_TOKENS, (3, 9), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([4, 2, 3]), torch.tensor([5, 4, 2])
    scores = {}
    for name, changes in {"served": {}, "loaded": {"reward_model_zero_stage": "3"}}.items():
        models = made(world, tmp_path, config.replace(**changes))
        for key, parameter in models.critic.module.named_parameters():
            if "lora_B" in key and parameter.requires_grad:
                parameter.data.fill_(0.5)
        rows = ScoredRows(
            ids, *lengths, torch.ones(3, dtype=torch.bool), {}, lambda n: {"messages": "[]"}, models.tokenizer
        )
        with torch.no_grad():
            scores[name] = models.rewards[0].score(rows)
            values = models.critic(ids, rows.mask, num_tokens=None, right_padded=True)
        assert not torch.allclose(last_token_scores(values, rows.mask.sum(1)), scores[name], atol=0.05), "it learned"
    torch.testing.assert_close(scores["loaded"], scores["served"], rtol=0.0, atol=1e-5)


WORDS = ["--actor-model-name-or-path", "a", "--critic-model-name-or-path", "c", "--critic-zero-stage"]
PLACE = Placement(dtype="bf16", device="cuda", ranks=2, run_dir="run")


def test_the_old_flag_of_offloading_is_an_alias():
    words = ["--offload-reward-model", "true"], ["--reward-model-offload-weights", "cpu"]
    old, new = (parse(PPOConfig, [*WORDS, "3", *given], section="ppo").config for given in words)
    found = old.engine_jsons({}, PLACE)
    assert found == new.engine_jsons({}, PLACE)
    assert found["reward model"]["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "offload_param" not in found["critic"]["zero_optimization"] | found["reference"]["zero_optimization"]
    kept = parse(PPOConfig, [*WORDS, "3", *words[0], "--reward-model-offload-weights", "none"], section="ppo").config
    assert "offload_param" not in kept.engine_jsons({}, PLACE)["reward model"]["zero_optimization"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "3 --reward-model-quantization int8",
            "--reward-model-quantization int8 ... ZeRO stage 3 ... --reward-model-zero-stage 0",
        ),
        (
            "0 --reward-model-offload-weights cpu",
            "--offload-reward-model ... ZeRO stage 3 ... 0 ... --reward-model-zero-stage 3",
        ),
        (
            "3 --reward-model-zero-stage 0 --reward-model-offload-weights cpu",
            "--offload-reward-model ... ZeRO stage 3 ... 0",
        ),
    ],
)
def test_flags_of_the_reward_model_that_contradict_are_refused(words, says):
    config = parse(PPOConfig, [*WORDS, *words.split()], section="ppo").config
    with pytest.raises(InputError, match=naming(says)):
        config.engine_jsons({}, PLACE)


def test_a_package_that_the_reward_model_lacks_is_named_with_its_flag(trained_folders, monkeypatch):
    monkeypatch.setattr(start_models, "is_flash_attn_2_available", lambda: False)
    config = ppo_config(trained_folders).replace(reward_model_attn_implementation="flash_attention_2")
    with pytest.raises(EnvironmentFault, match="^--reward-model-attn-implementation flash_attention_2: the package"):
        start_models.check_start_models(STAGE.start_models(config, {}))


def test_a_stored_reward_model_names_its_flag(trained_folders, tmp_path):
    folder = shutil.copytree(trained_folders.reward, tmp_path / "int8")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": STORED_INT8}}))
    config = ppo_config(trained_folders).replace(reward_model_name_or_path=str(folder))
    with pytest.raises(InputError, match="give --reward-model-quantization int8$"):
        start_models.check_start_models(STAGE.start_models(config, {}))


def test_lengths_beyond_the_positions_are_refused(world, trained_folders, tmp_path):
    config = ppo_config(trained_folders)
    config = config.replace(data=config.data.replace(max_prompt_seq_len=60).model_dump())
    with pytest.raises(InputError, match="--max-answer-seq-len 68: the model .* has 64 positions"):
        made(world, tmp_path, config)


def reward_with_positions(trained_folders, bpe_folder, folder, positions: int) -> str:
    """A reward model of the actor's tokens and template with so many learned positions."""
    save_tiny("opt", bpe_folder, folder, reward=True, max_position_embeddings=positions)
    PreTrainedTokenizerFast.from_pretrained(trained_folders.actor).save_pretrained(folder)
    return str(folder)


def test_a_reward_model_of_the_actors_tokens_has_positions_for_whole_sequences(
    world, trained_folders, tmp_path, bpe_folder
):
    """Prompts have 16 tokens at most, responses 8."""
    for positions in (24, 23):
        folder = reward_with_positions(trained_folders, bpe_folder, tmp_path / str(positions), positions)
        config = ppo_config(trained_folders).replace(reward_model_name_or_path=folder)
        run = make_run(world, tmp_path, config)
        if positions == 24:
            assert make_sources(run, config).reward_tokenizers == {"reward": None}
    with pytest.raises(InputError, match=r"--max-prompt-seq-len \+ --max-answer-seq-len 24: the model .* 23 positions"):
        make_sources(run, config)


@torch.no_grad()
def test_text_beyond_the_positions_of_a_reward_model_of_other_tokens_is_cut_on_its_left(
    world, trained_folders, tmp_path, bpe_folder
):
    """Its tokens may be more than the actor's: the end of the response is scored, as `rlhf compare` does."""
    folder = reward_with_positions(trained_folders, bpe_folder, tmp_path / "reward", 12)
    other_tokenizer(trained_folders.actor, tmp_path / "reward")
    config = ppo_config(trained_folders).replace(reward_model_name_or_path=folder)
    models = made(world, tmp_path, config)
    (reward,) = models.rewards
    assert reward.tokenizer is not None
    ids = torch.tensor([models.tokenizer("The quick brown fox jumps over", add_special_tokens=False)["input_ids"]])
    row = {"messages": json.dumps([{"role": "user", "content": "Where is it, and how does it get there?"}])}
    lengths = torch.tensor([0]), torch.tensor([ids.shape[1]])
    rows = ScoredRows(ids, *lengths, torch.tensor([False]), None, lambda n: row, models.tokenizer)
    score = reward.score(rows)
    judge = load_scorer(folder, dtype=torch.float32)
    (read,) = rows
    text = (read.messages, read.response.strip(), False)
    assert len(scored_ids(judge.tokenizer, *text, num_positions=12)) == 12
    torch.testing.assert_close(score, torch.tensor(score_answers(judge, [text], batch_size=1)), rtol=1e-5, atol=1e-6)
