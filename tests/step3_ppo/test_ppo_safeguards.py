"""Small things that go wrong in PPO without a word, each held by a check (docs/learn/ppo_traps.md)."""

import pytest
import torch
from support.messages import naming
from support.tiny_models import random_rows

from pipeline.configuration.flags import parse
from pipeline.data.loader import Step
from pipeline.data.templates import HUMAN_ASSISTANT_TEMPLATE
from pipeline.errors import InputError
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import generate
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
from pipeline.models.loading import load_causal_lm, use_gradient_checkpointing
from pipeline.models.source import ModelSource
from pipeline.models.tokenizers import load_tokenizer
from pipeline.rewards.reward_model import separate_tokenizer
from step1_sft import training
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


def test_a_step_without_a_trained_token_is_an_error():
    counts = {"num_rows": 4, "num_tokens": 20, "num_trained": 0, "num_squares": 100}
    empty = Step(number=7, micro_batch_size=4, micro_batches=[], rows=[], **counts)
    with pytest.raises(InputError, match=naming("step 8 ... 4 rows ... trained token")):
        training.accumulate_gradients(None, empty, training.State(step=7), None)


@pytest.mark.parametrize("model", ["actor", "critic"])
def test_lora_dropout_is_refused_in_step_3(model):
    with pytest.raises(InputError, match=f"--{model}-lora-dropout: got 0.1"):
        parse(PPOConfig, [f"--{model}_lora_dropout", "0.1"], section="ppo")


def test_adams_epsilon_is_that_of_ziegler_et_al_in_step_3_alone():
    assert PPOConfig().optimizer.adam_eps == 1e-5
    assert SFTConfig().optimizer.adam_eps == 1e-8


def test_sampling_uses_the_cache_although_training_recomputes_activations(tiny_folders):
    model = load_causal_lm(tiny_folders["opt"], dtype=torch.float32)
    use_gradient_checkpointing(model)
    lengths = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompts = [Prompt(row.tolist(), n) for n, row in enumerate(random_rows(0, (5, 3)))]
    generate(
        EagerGenerator(model.eval(), Vocabulary(frozenset({10_000}), 0)),
        prompts,
        num_samples=1,
        num_slots=2,
        sampling=Sampling(6),
        key=RandomKey(0, "rollout"),
    )
    assert lengths == [5, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("template", "is_apart"), [(None, False), (HUMAN_ASSISTANT_TEMPLATE, False), ("x", True)])
def test_a_reward_model_with_another_template_reads_text(tiny_folders, tmp_path, template, is_apart):
    """One vocabulary and two chat templates: scored on the actor's tokens, it would see prompts it never learned."""
    actor = load_tokenizer(tiny_folders["opt"])
    actor.chat_template = HUMAN_ASSISTANT_TEMPLATE
    reward = load_tokenizer(tiny_folders["opt-reward"])
    reward.chat_template = "{{ messages[0].content }}{{ eos_token }}" if template == "x" else template
    reward.save_pretrained(tmp_path)
    assert (separate_tokenizer(ModelSource(str(tmp_path)), actor, "auto") is not None) == is_apart
