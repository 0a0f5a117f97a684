"""The engines of stage 3: training engines for models that learn, frozen engines for the others."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.engine.build import frozen_engine, language_model_engine, load_policy, value_model_engine
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.moving_average import MovingAverage
from pipeline.engine.start_models import check_start_models
from pipeline.models.forward.packed_attention import enable_packed_attention, uses_packed_attention
from pipeline.models.loading import base_model
from pipeline.models.lora import keep_start_adapter, start_model
from pipeline.models.reward_model import has_score_head, load_reward_model, score_constants
from pipeline.models.source import ModelSource, check_positions, num_positions, prepare_tokenizer
from pipeline.rewards.reward_model import RewardModel, separate_tokenizer
from pipeline.rewards.rows import BatchReward, Scale
from pipeline.run.run import Run
from step3_ppo.config import LENGTH_FLAGS, PPOConfig
from step3_ppo.models.roles import COMPARED, Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """The engines of stage 3, by the names of their roles.

    tokenizer: tokenizer of the models that learn.
    trained: policy ("actor") and value model ("critic").
    frozen: "reference" or "teacher", and "reward", each only if it is loaded separately. Otherwise the actor serves as
        the reference policy, with its adapters switched back to those that training began with. So does the critic as
        the reward model, with the head that it began with.
    rewards: reward models, with their constants.
    has_reference: False = the run needs no log-probabilities of a reference policy. A teacher is one.
    average: moving average of the actor's weights; None without --enable-ema.
    """

    tokenizer: Any
    trained: dict[str, TrainingEngine]
    frozen: dict[str, FrozenEngine]
    rewards: list[BatchReward]
    has_reference: bool = True
    average: MovingAverage | None = None

    @property
    def actor(self) -> TrainingEngine:
        """The policy."""
        return self.trained["actor"]

    @property
    def critic(self) -> TrainingEngine | None:
        """The value model; None without a critic."""
        return self.trained.get("critic")

    def named(self) -> dict[str, TrainingEngine | FrozenEngine]:
        """Return the engines of all models in memory, by role."""
        return {**self.trained, **self.frozen}

    @property
    def pack_rows(self) -> bool:
        """True if all models accept packed rows, without padding, in a forward pass."""
        return all(
            uses_packed_attention(base_model(engine.module.get_submodule("model")).config)
            for engine in self.named().values()
        )

    @property
    def takes_first(self) -> bool:
        """True if a reward model is to be normalised by the scores of the first rollout."""
        return any(one.scale.takes_first for one in self.rewards)

    def normalise_by(self, constants: Sequence[float]) -> bool:
        """Set mean and std of the scores of each reward model; a critic without constants takes those of the first.

        Returns True if the critic takes them. It does not if the first reward model has stored constants.
        """
        is_first, critic = self.rewards[0].scale.takes_first, self.critic
        for one, mean, std in zip(self.rewards, constants[::2], constants[1::2], strict=True):
            one.scale = Scale(mean, std)
        mean, std, *_ = constants
        if not is_first or critic is None or (critic.module.score_mean, critic.module.score_std) != (0.0, 1.0):
            return False
        critic.module.score_mean, critic.module.score_std = mean, std
        return True

    def release_gathered(self, *names: str) -> None:
        """Free what ZeRO-3 has gathered of these models, or of all if none is named, after a phase that read it."""
        for name, engine in self.named().items():
            if not names or name in names:
                engine.release_gathered()

    def release_reference(self) -> None:
        """Free what ZeRO-3 has gathered of the reference or the teacher."""
        self.release_gathered(*COMPARED)

    @contextmanager
    def reference_policy(self) -> Iterator[Any]:
        """Open the reference policy: a separate model, such as a teacher, or the actor as it was before training."""
        if separate := [self.frozen[name] for name in COMPARED if name in self.frozen]:
            yield separate[0]
        else:
            with start_model(self.actor.module.model):
                yield self.actor

    @contextmanager
    def reward_model(self, name: str) -> Iterator[Any]:
        """Open a reward model by its role's name: a separate model, or the critic as it was before training."""
        if name in self.frozen:
            yield self.frozen[name]
        else:
            critic = self.trained["critic"]
            with critic.module.start_model():
                yield critic


@dataclass(frozen=True, slots=True)
class Sources:
    """The models that stage 3 starts from, and the tokenizers of its run.

    starts: role -> files of the model that it starts from, even if the role gets no engine.
    tokenizer: tokenizer of the models that learn.
    reward_tokenizers: role of a reward model -> its tokenizer; None if it reads the actor's tokens.
    """

    starts: dict[str, ModelSource]
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizers: dict[str, PreTrainedTokenizerBase | None]


def make_sources(run: Run, config: PPOConfig) -> Sources:
    """Load the tokenizers and check all models' files, before any weight is read.

    Raises:
        InputError: a critic whose tokenizer is not the actor's, or lengths beyond the positions of a model that reads
            the actor's tokens.
    """
    models = run.stage.start_models(config, {})
    checked = dict(zip([model.path for model in models], check_start_models(models), strict=True))
    starts = {role.name: checked[config.start_of(role)] for role in config.roles}
    rendering = (config.data.template, config.data.chat_template_kwargs)
    tokenizer = prepare_tokenizer(starts["actor"], *rendering)
    of_rewards = {
        role.name: separate_tokenizer(starts[role.name], tokenizer, *rendering)
        for role in config.roles
        if role.is_reward_model
    }
    for name, separate in of_rewards.items():
        if separate is None:
            check_positions(starts[name], config.max_sequence_length, LENGTH_FLAGS)
    return Sources(starts, tokenizer, of_rewards)


def make_models(run: Run, config: PPOConfig, sources: Sources) -> Models:
    """Load the models of the run and wrap them in engines."""
    has_reference = config.ppo.has_reference
    models = Models(tokenizer=sources.tokenizer, trained={}, frozen={}, rewards=[], has_reference=has_reference)
    served = {role.flags for role in config.roles if role not in config.held_roles}  # by a trained model
    rewards = [role for role in config.roles if role.is_reward_model]
    models.rewards.extend(scoring_model(config, models, sources, role) for role in rewards)
    for role in config.held_roles:
        source = sources.starts[role.name]
        if not role.is_trained:
            models.frozen[role.name] = make_frozen(run, config, role, source)
            continue
        models.trained[role.name] = make_trained(run, config, role, source)
        if role.flags in served and source.base is not None:
            keep_start_adapter(models.trained[role.name].module.model)
    for engine in models.named().values():
        enable_packed_attention(engine.module.get_submodule("model"), device=run.world.device)
    if config.ppo.log_kl and not config.ppo.kl_coef:
        log.info("the reference serves objective/kl alone (--log-kl true): at --kl-coef 0 its KL has no weight")
    log.info("micro-batches: rows %s", "are packed" if models.pack_rows else "are padded to the longest")
    return models


def scoring_model(config: PPOConfig, models: Models, sources: Sources, role: Role) -> RewardModel:
    """Return a reward model with its weight and the constants that stage 2 stored in its folder, if any."""
    start = sources.starts[role.name].config
    constants = score_constants(start) if config.ppo.normalise_scores else (0.0, 1.0)
    scale = Scale(*(constants or (0.0, 1.0)), takes_first=constants is None)
    opened, tokenizer = partial(models.reward_model, role.name), sources.reward_tokenizers[role.name]
    return RewardModel(role.title, config.weight_of(role), scale, opened, tokenizer, num_positions(start))


def make_trained(run: Run, config: PPOConfig, role: Role, source: ModelSource) -> TrainingEngine:
    """Load a model that learns. A critic starts as the reward model, on the scale of the normalised reward.

    A new head starts at zero. Random values as large as the rewards would add noise to every advantage until the critic
    has unlearned them.
    """
    flags = config.flags_of(role)
    if role.has_values:
        head = head_settings(config, role, source)
        return value_model_engine(run, source, flags, name=role.title, head_std=0.0, **head)
    return language_model_engine(run, source, flags, name=role.title)


def head_settings(config: PPOConfig, role: Role, source: ModelSource) -> dict[str, bool]:
    """Return how a trained model's scalar head begins: anew, and on the scale of the normalised reward."""
    new_head = config.may_begin_head(role) and not has_score_head(source)
    return {"new_head": new_head, "normalised": config.ppo.normalise_scores and config.has_reward_model}


def make_frozen(run: Run, config: PPOConfig, role: Role, source: ModelSource) -> FrozenEngine:
    """Load a frozen model: the policy before PPO, or a reward model."""
    load = load_reward_model if role.has_values else load_policy
    return frozen_engine(run, load, source, config.flags_of(role), name=role.title)
