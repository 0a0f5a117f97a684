"""The four models of stage 3: actor and critic under training engines, reference and reward as frozen ones."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.configuration.groups import ModelConfig
from pipeline.data.templates import set_template
from pipeline.engine.build import frozen_engine, language_model_engine, value_model_engine
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.generation.options import GenerationOptions
from pipeline.models.causal_lm import CausalLM
from pipeline.models.loading import adapter_base, base_model, load_causal_lm, load_config
from pipeline.models.lora import keep_start_adapter, start_model
from pipeline.models.packed_attention import enable_packed_attention, uses_packed_attention
from pipeline.models.reward_model import load_reward_model, score_constants
from pipeline.models.tokenizers import load_tokenizer, prepare_tokenizer
from pipeline.run.run import Run
from pipeline.training.start_models import check_start_models, same_tokens
from step3_ppo.checks import start_models
from step3_ppo.config import PPOConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """The engines of stage 3.

    reference: None where the actor with the adapters that it began with, if any, is the reference.
    reward: None where the critic with the adapters and the head that it began with is the reward model.
    reward_tokenizer: None where the reward model reads the actor's own tokens.
    score_mean, score_std: normalise the reward model's scores.
    """

    tokenizer: Any
    actor: TrainingEngine
    critic: TrainingEngine
    reference: FrozenEngine | None
    reward: FrozenEngine | None
    reward_tokenizer: Any
    score_mean: float
    score_std: float

    def named(self) -> dict[str, TrainingEngine | FrozenEngine]:
        """The models that this run holds, by their roles."""
        found = {"actor": self.actor, "critic": self.critic, "reference": self.reference, "reward": self.reward}
        return {name: engine for name, engine in found.items() if engine is not None}

    @property
    def pack_rows(self) -> bool:
        """True where all models take the rows of a forward pass without their padding."""
        return all(uses_packed_attention(base_model(engine.module.model).config) for engine in self.named().values())

    def release_gathered(self, *names: str) -> None:
        """Release what ZeRO-3 gathered of these models (all where none is named), after a phase that read them."""
        for name, engine in self.named().items():
            if not names or name in names:
                engine.release_gathered()

    @contextmanager
    def reference_policy(self) -> Iterator[Any]:
        """Open the model of reference log-probabilities: one of its own, or the actor as it was before training."""
        if self.reference is not None:
            yield self.reference
        else:
            with start_model(self.actor.module.model):
                yield self.actor

    @contextmanager
    def reward_model(self) -> Iterator[Any]:
        """Open the model of raw scores: one of its own, or the critic as it was before training."""
        if self.reward is not None:
            yield self.reward
        else:
            with self.critic.module.start_model():
                yield self.critic


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """The actor's and critic's, and the reward model's where that is another one, else None."""

    actor: Any
    reward: Any


def make_tokenizers(config: PPOConfig) -> Tokenizers:
    """Load the tokenizers and look at all four models' files: what cannot work is refused before any weight is read.

    Raises:
        InputError: a critic whose tokenizer is not the actor's, or lengths beyond the models' positions.
    """
    check_start_models(start_models(config, {}))
    tokenizer = prepare_tokenizer(config.actor.model_name_or_path, config.data.template)
    reward_path = config.reward_model_name_or_path or config.critic.model_name_or_path
    return Tokenizers(tokenizer, separate_tokenizer(reward_path, tokenizer, config.data.template))


def make_models(run: Run, config: PPOConfig, tokenizers: Tokenizers) -> Models:
    """Load and wrap the four models."""
    reward_path = config.reward_model_name_or_path or config.critic.model_name_or_path
    mean, std = score_constants(load_config(reward_path)) if config.ppo.normalise_scores else (0.0, 1.0)
    models = Models(
        tokenizer=tokenizers.actor,
        actor=language_model_engine(run, config.actor, accumulation=config.actor_accumulation),
        # Starts as the reward model, on the scale of the normalised reward.
        critic=value_model_engine(run, config.critic, normalised=config.ppo.normalise_scores),
        reference=make_reference(run, config),
        reward=make_reward(run, config, reward_path),
        reward_tokenizer=tokenizers.reward,
        score_mean=mean,
        score_std=std,
    )
    for trained, flags in ((models.actor, config.actor), (models.critic, config.critic)):
        if holds_start(config, flags) and adapter_base(flags.model_name_or_path) is not None:
            keep_start_adapter(trained.module.model)
    for engine in models.named().values():
        enable_packed_attention(base_model(engine.module.model), device=run.world.device)
    log.info("micro-batches: rows %s", "are packed" if models.pack_rows else "are padded to the longest")
    return models


def separate_tokenizer(reward_path: str, tokenizer: Any, template: str) -> Any:
    """Return the reward model's own tokenizer where it differs from the actor's `tokenizer`, else None."""
    reward_tokenizer = load_tokenizer(reward_path)
    if reward_tokenizer.chat_template is None:
        set_template(reward_tokenizer, template)
    same = same_tokens(tokenizer, reward_tokenizer) and tokenizer.chat_template == reward_tokenizer.chat_template
    if not same:
        log.info("the reward model reads responses from text: its tokenizer or its template is not the actor's")
    return None if same else reward_tokenizer


def holds_start(config: PPOConfig, model: ModelConfig) -> bool:
    """Return whether switching adapters gives the model that training began with, so that no second one is loaded.

    An adapter that goes on is copied for that, which ZeRO stage 3 has partitioned.
    """
    is_copied = adapter_base(model.model_name_or_path) is not None
    switches = bool(model.lora_dim) and config.deepspeed.only_optimize_lora
    return switches and not (is_copied and model.partitioned == "weights")


def make_reference(run: Run, config: PPOConfig) -> FrozenEngine | None:
    """Load the policy before PPO; none where switching the actor's adapters off gives it."""
    if holds_start(config, config.actor):
        return None

    def load(path: str, **settings: Any) -> CausalLM:
        return CausalLM(load_causal_lm(path, **settings))

    path, offload = config.actor.model_name_or_path, config.offload_reference_model
    return frozen_engine(run, load, path, config.actor, offload=offload, role="reference")


def make_reward(run: Run, config: PPOConfig, path: str) -> FrozenEngine | None:
    """Load the reward model; none where switching the critic's adapters off gives it."""
    if holds_start(config, config.critic) and path == config.critic.model_name_or_path:
        return None
    offload = config.offload_reward_model
    return frozen_engine(run, load_reward_model, path, config.critic, offload=offload, role="reward")


def generation_options(config: PPOConfig) -> GenerationOptions:
    """Collect what the flags say of generation."""
    sampling = config.sampling
    return GenerationOptions(
        backend=sampling.generation_engine,
        merge_lora=sampling.merge_lora_for_generation,
        max_sequence_length=config.data.max_prompt_seq_len + sampling.max_answer_seq_len,
        # Optimizer states that come back for the update need the memory that the cache had.
        release_cache=sampling.release_inference_cache or sampling.offload_optimizer_during_rollout,
        tensor_parallel_size=sampling.inference_tp_size,
        weights=sampling.rollout_weights,
        min_slots=max(
            sampling.per_device_generation_batch_size * sampling.num_samples_per_prompt,
            config.optimizer.per_device_eval_batch_size,
        ),
    )
