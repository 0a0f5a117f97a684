"""The four models of stage 3: actor and critic under training engines, reference and reward as frozen ones."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.data.templates import set_template
from pipeline.engine.build import frozen_engine, language_model_engine, value_model_engine
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.start_models import check_start_models, same_tokens
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.forward.packed_attention import enable_packed_attention, uses_packed_attention
from pipeline.models.loading import base_model, load_language_model
from pipeline.models.lora import keep_start_adapter, start_model
from pipeline.models.reward_model import load_reward_model, score_constants
from pipeline.models.source import ModelSource, prepare_tokenizer
from pipeline.run.run import Run
from step3_ppo.config import PPOConfig, frozen_models, holds_start

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """The engines of stage 3.

    tokenizer: tokenizer of actor and critic.
    actor: policy.
    critic: value model.
    reference: None where the actor with the adapters that it began with, if any, is the reference.
    reward: None where the critic with the adapters and the head that it began with is the reward model.
    reward_tokenizer: None where the reward model reads the actor's own tokens.
    score_mean: mean of the reward model's scores, which are normalised by it.
    score_std: standard deviation of these scores.
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
        return all(
            uses_packed_attention(base_model(engine.module.get_submodule("model")).config)
            for engine in self.named().values()
        )

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
class Sources:
    """The models that stage 3 starts from, and the tokenizers of its run.

    actor: start of the actor.
    critic: start of the critic.
    reward: reward model; the critic's start where none is named.
    tokenizer: tokenizer of actor and critic.
    reward_tokenizer: None where the reward model reads the actor's own tokens.
    """

    actor: ModelSource
    critic: ModelSource
    reward: ModelSource
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase | None


def make_sources(run: Run, config: PPOConfig) -> Sources:
    """Load the tokenizers and look at all four models' files: what cannot work is refused before any weight is read.

    Raises:
        InputError: a critic whose tokenizer is not the actor's, or lengths beyond the models' positions.
    """
    actor, critic, *named = check_start_models(run.stage.start_models(config, {}))
    reward = named[0] if named else critic
    tokenizer = prepare_tokenizer(actor, config.data.template)
    return Sources(actor, critic, reward, tokenizer, separate_tokenizer(reward, tokenizer, config.data.template))


def make_models(run: Run, config: PPOConfig, sources: Sources) -> Models:
    """Load and wrap the four models."""
    frozen = frozen_models(config)
    mean, std = score_constants(sources.reward.config) if config.ppo.normalise_scores else (0.0, 1.0)
    models = Models(
        tokenizer=sources.tokenizer,
        actor=language_model_engine(run, sources.actor, config.actor, accumulation=config.actor_accumulation),
        # Starts as the reward model, on the scale of the normalised reward.
        critic=value_model_engine(run, sources.critic, config.critic, normalised=config.ppo.normalise_scores),
        reference=make_reference(run, config, sources.actor) if "reference" in frozen else None,
        reward=make_reward(run, config, sources.reward) if "reward model" in frozen else None,
        reward_tokenizer=sources.reward_tokenizer,
        score_mean=mean,
        score_std=std,
    )
    started = ((models.actor, sources.actor, config.actor), (models.critic, sources.critic, config.critic))
    for trained, source, flags in started:
        if holds_start(config, flags) and source.base is not None:
            keep_start_adapter(trained.module.model)
    for engine in models.named().values():
        enable_packed_attention(base_model(engine.module.get_submodule("model")), device=run.world.device)
    log.info("micro-batches: rows %s", "are packed" if models.pack_rows else "are padded to the longest")
    return models


def separate_tokenizer(
    reward: ModelSource, tokenizer: PreTrainedTokenizerBase, template: str
) -> PreTrainedTokenizerBase | None:
    """Return the reward model's own tokenizer where it differs from the actor's `tokenizer`, else None."""
    reward_tokenizer = reward.tokenizer
    if reward_tokenizer.chat_template is None:
        set_template(reward_tokenizer, template)
    same = same_tokens(tokenizer, reward_tokenizer) and tokenizer.chat_template == reward_tokenizer.chat_template
    if not same:
        log.info("the reward model reads responses from text: its tokenizer or its template is not the actor's")
    return None if same else reward_tokenizer


def make_reference(run: Run, config: PPOConfig, source: ModelSource) -> FrozenEngine:
    """Load the policy before PPO."""

    def load(source: ModelSource, **settings: Any) -> CausalLM:
        return CausalLM(load_language_model(source, **settings))

    offload = config.offload_reference_model
    return frozen_engine(run, load, source, config.actor, offload=offload, role="reference")


def make_reward(run: Run, config: PPOConfig, source: ModelSource) -> FrozenEngine:
    """Load the reward model."""
    offload = config.offload_reward_model
    return frozen_engine(run, load_reward_model, source, config.critic, offload=offload, role="reward")
