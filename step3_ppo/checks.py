"""Checks of stage 3 before any row or weight is read: its start models, and the flags that have to fit them."""

from collections.abc import Mapping
from functools import partial

from pipeline.models.loading import check_decoder, check_positions
from pipeline.models.paths import check_language_model, check_reward_model
from pipeline.models.reward_model import check_head
from pipeline.training.start_models import (
    Check,
    StartModel,
    check_cache,
    check_critic_tokens,
    check_rotary_length,
    check_settings,
    package_checks,
)
from step3_ppo.config import PPOConfig


def start_models(config: PPOConfig, made: Mapping[str, str]) -> list[StartModel]:
    """Return actor, critic and reward model (if it has a flag of its own) with their checks.

    Args:
        made: folder of an earlier stage's output -> the model which that stage starts from.
    """
    lengths = "--max_prompt_seq_len + --max_answer_seq_len"
    longest = config.data.max_prompt_seq_len + config.sampling.max_answer_seq_len
    actor_path = config.actor.model_name_or_path
    actor, models = made.get(actor_path, actor_path), []
    for role, settings in (("actor", config.actor), ("critic", config.critic)):
        flag, path = f"--{role}_model_name_or_path", settings.model_name_or_path
        start = made.get(path, path)
        fits: list[Check] = [
            partial(check_decoder, start, flag),
            *(partial(check, start, longest, lengths) for check in (check_positions, check_rotary_length)),
            partial(check_settings, start, settings, f"{role}_"),
        ]
        if role == "actor":
            fits.append(partial(check_cache, start, flag))
        else:
            fits.insert(0, partial(check_critic_tokens, start, actor, flag))
            fits += [] if path in made else [partial(check_head, path)]
        kind = check_language_model if role == "actor" else check_reward_model
        packages = package_checks(settings, config.optimizer, config.deepspeed, f"{role}_")
        models.append(StartModel(flag, path, kind, packages, fits))
    if path := config.reward_model_name_or_path:
        flag = "--reward_model_name_or_path"
        fits = [partial(check_decoder, made.get(path, path), flag)]
        fits += [] if path in made else [partial(check_head, path)]
        models.append(StartModel(flag, path, check_reward_model, fits=fits))
    return models
