"""The `Stage` of PPO and its other methods, stage 3."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.configuration.stage import Stage, Start
from pipeline.errors import dashed
from pipeline.rewards.worker_flags import reward_pool
from step3_ppo.config import LENGTH_FLAGS, PPOConfig, own_flags
from step3_ppo.flags.methods import METHODS

ACTOR_START = Start("actor", "sft")

if TYPE_CHECKING:
    from pipeline.checkpoints.offline import OfflineCheckpoint
    from pipeline.engine.start_models import StartModel
    from pipeline.planning.needs import StageNeeds
    from pipeline.run.run import Run


def starts(flags: Mapping[str, Any]) -> dict[str, Start]:
    """Return where the models of a run with these flags start: a critic from the reward model, else the actor."""
    method = METHODS.get(str(flags.get("method", "ppo")), METHODS["ppo"])
    others = flags.get("reward_function") or flags.get("environment") or method.has_teacher
    is_rewarded_by_model = flags.get("reward_model_name_or_path") or not others
    follows = Start("reward", "reward") if is_rewarded_by_model else ACTOR_START
    if method.has_critic:
        return {"actor_": ACTOR_START, "critic_": follows}
    return {"actor_": ACTOR_START} | ({"reward_model_": follows} if is_rewarded_by_model else {})


def loop() -> "Callable[[Run, PPOConfig], None]":
    """Import and return the loop of the stage."""
    from step3_ppo.training import train

    return train


def start_models(config: PPOConfig, base_of_output: Mapping[str, str]) -> "list[StartModel]":
    """Return actor, critic and reward model (if it has its own flags) with their checks.

    Args:
        base_of_output: folder of an earlier stage's output -> the model which that stage starts from.
    """
    from pipeline.engine.start_models import (
        StartModel,
        check_cache,
        check_critic_tokens,
        check_rotary_length,
        check_settings,
        check_teacher_tokens,
        package_checks,
    )
    from pipeline.models.paths import check_language_model, check_model_path, check_reward_model
    from pipeline.models.reward_model import check_head, has_score_head
    from pipeline.models.source import ModelSource, check_decoder, check_positions

    models: list[StartModel] = []
    for role in config.roles:
        # A frozen model without its own flags starts from the files of a trained one.
        is_teacher, is_alone = role.name == "teacher", role.number or own_flags(config, role)
        has_own_start = role.path and (is_teacher or is_alone or config.reward_model_name_or_path)
        if not role.is_trained and not has_own_start:
            continue
        path, settings, prefix = config.start_of(role), config.flags_of(role), role.prefix or f"{role.flags}_"
        flag = "--more-reward-models" if role.number else dashed(f"{prefix}{'model_' * role.is_trained}name_or_path")
        start = ModelSource(base_of_output.get(path, path))
        fits: list[Callable[[], None]] = [partial(check_decoder, start, flag)]
        if role.is_trained or is_teacher:
            checks = (check_positions, check_rotary_length)
            fits += [partial(check, start, config.max_sequence_length, LENGTH_FLAGS) for check in checks]
        only_lora = config.deepspeed.only_optimize_lora
        fits.append(partial(check_settings, start, settings, prefix, learns=role.is_trained, only_lora=only_lora))
        if role.has_values:
            new_head = config.may_begin_head(role) and not (path in base_of_output or has_score_head(start))
            fits += [] if path in base_of_output else [partial(check_head, start, new_head=new_head)]
        else:
            fits.append(partial(check_cache, start, flag))
        if (role.is_trained or is_teacher) and models:
            check_tokens = check_teacher_tokens if is_teacher else check_critic_tokens
            fits.insert(0, partial(check_tokens, start, models[0].source, flag))
        packages = package_checks(config, settings, prefix, trains=role.is_trained)
        kind = check_reward_model if role.has_values else check_language_model
        kind = check_model_path if config.may_begin_head(role) else kind
        models.append(StartModel(flag, path, start, kind, packages, fits))
    return models


def preflight(config: PPOConfig, columns: Collection[str]) -> None:
    """Load the reward functions in a process of their own, try the loss, and compare the critic's warm-up with steps.

    Raises InputError for functions that are wrong, and where --max-steps leaves no step to the policy.
    """
    from step3_ppo.flags.loss_file import load_loss

    load_loss(config.ppo)
    if config.run.max_steps:
        config.ppo.check_steps(config.run.max_steps)
    if functions := config.reward_functions:
        with reward_pool(config.rewards, functions) as pool:
            pool.check(columns)


def resolve_auto(run: "Run") -> dict[str, str]:
    """Return the values of `old_log_probs` and `off_policy_weights` that `auto` stands for in this run."""
    from pipeline.engine.build import compute_dtype
    from step3_ppo.models.needs import models_of, old_log_probs

    config: PPOConfig = run.resolved.config
    (actor, *_), dtype = models_of(config, {}), compute_dtype(run)
    whose = old_log_probs(config, actor, dtype, run.world.size, run.world.device)
    return {"old_log_probs": whose, "off_policy_weights": config.weights_off_policy(dtype)}


def needs(config: PPOConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> "StageNeeds":
    """Return what a rank needs, for the planner."""
    from step3_ppo.models.needs import needs

    return needs(config, base_of_output, dtype, ranks)


def export(checkpoint: "OfflineCheckpoint") -> None:
    """Write the model folders of a checkpoint."""
    from step3_ppo.models.saving import export

    export(checkpoint)


STAGE = Stage(
    number=3,
    section="ppo",
    title="PPO",
    package="step3_ppo",
    config=PPOConfig,
    starts=starts,
    reached={"eval_objective/scores": 1, "eval_objective/kl": 0},
    compared=("eval_completions/mean_length", "eval_completions/truncated_fraction"),
    methods={name: method.title for name, method in METHODS.items()},
    loop=loop,
    start_models=start_models,
    needs=needs,
    preflight=preflight,
    resolve_auto=resolve_auto,
    export=export,
)
