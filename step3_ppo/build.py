"""Build the objects of stage 3's loop from the configuration, or restore them from a checkpoint."""

import logging
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import RunFingerprint
from pipeline.data.batching import SFTBatch
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.engine.build import start_engines
from pipeline.engine.moving_average import MovingAverage
from pipeline.generation.rollouts import Vocabulary
from pipeline.inference.tool_conversations import Calls, make_calls
from pipeline.preparation.room import make_room
from pipeline.run.run import Run
from pipeline.training.halving import take_halved
from pipeline.training.steps import rate_factor
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Collected
from step3_ppo.flags.loss_file import load_loss
from step3_ppo.models.engines import Models, make_models, make_sources
from step3_ppo.models.hybrid_engine import HybridEngine
from step3_ppo.rollout import (
    Schedule,
    generation_options,
    make_data,
    make_schedule,
    sampling_line,
)
from step3_ppo.state import PPO, State, fingerprint_of
from step3_ppo.updater import Updater

log = logging.getLogger(__name__)


def build(run: Run, config: PPOConfig) -> tuple[PPO, checkpoint.Resumed | None]:
    """Create what the loop uses, with the weights of the checkpoint to resume from, if any; also return its rest."""
    start_engines(run)
    sources = make_sources(run, config)
    make_room(run)
    prompts, text = make_data(run, config, sources.tokenizer)
    schedule = make_schedule(config, num_prompts=len(prompts.train), world_size=run.world.size)
    config.ppo.check_steps(schedule.total_steps)
    models = make_models(run, config, sources)
    reads_columns = any(one.reads_columns for one in models.rewards) or bool(config.functions_by_title)
    fingerprint = fingerprint_of(config, prompts, text, ranks=run.world.size, total_steps=schedule.total_steps)
    resumed = checkpoint.load(run, models.trained, fingerprint, reads_columns=reads_columns)
    ppo = assemble(run, config, models, prompts=prompts, text=text, schedule=schedule, fingerprint=fingerprint)
    return ppo, resumed


def assemble(
    run: Run,
    config: PPOConfig,
    models: Models,
    *,
    prompts: StageData,
    text: StepLoader[SFTBatch] | None,
    schedule: Schedule,
    fingerprint: RunFingerprint,
) -> PPO:
    """Create what depends on models and prompts, with the current weights. Raises InputError, see `load_loss`."""
    # The average starts from the current weights: with --force-resume the checkpoint may hold none.
    average = MovingAverage(models.actor.module, decay=config.ppo.ema_decay) if config.ppo.enable_ema else None
    rate, own_loss = rate_factor(config.optimizer, total_steps=schedule.total_steps), load_loss(config.ppo)
    steps = (config.ppo.ppo_epochs, schedule.rows_per_step, config.run.seed)
    return PPO(
        run,
        config,
        replace(models, average=average),
        prompts,
        text,
        schedule,
        fingerprint,
        hybrid=make_hybrid(config, models, run.world.size),
        updater=Updater(run.world, *steps, rate, own_loss),
        calls=calls_of(config, prompts, models.tokenizer),
    )


def calls_of(config: PPOConfig, prompts: StageData, tokenizer: PreTrainedTokenizerBase) -> Calls:
    """Return the calls of the user's code in rollouts. A collective. Raises InputError, see `make_calls`."""
    return make_calls(
        config.reward_functions,
        config.tools,
        config.rewards,
        max_failures=config.rewards.max_reward_failures,
        takes_tokens=not config.method.compares,
        columns={name for columns in prompts.counts.passed.values() for name in columns},
        sources=[*config.data.data_path, *config.data.eval_data_path],
        tokenizer=tokenizer,
        max_prompt=config.data.max_prompt_seq_len,
    )


def make_hybrid(config: PPOConfig, models: Models, ranks: int) -> HybridEngine:
    """Create the engine that samples from the actor, and log the rollout size and the sampling settings."""
    configured = models.actor.module.model.generation_config
    vocabulary = Vocabulary.of(models.tokenizer, configured)
    log.info("rollouts: %s", config.rollout_size(ranks).line)
    log.info("log-probabilities of the policy before its updates: the %s's (--old-log-probs)", config.ppo.old_log_probs)
    log.info("%s", sampling_line(config, vocabulary.eos_ids, configured.to_diff_dict()))
    return HybridEngine(models.actor, vocabulary, options=generation_options(config, ranks))


def stored_state(resumed: checkpoint.Resumed) -> dict[str, Any]:
    """Return the fields of the state that a checkpoint has."""
    # Up to 5029b7a4 it also named the responses that a rollout carried on. Where those were allowed, it is refused.
    return {name: value for name, value in resumed.state["ppo"].items() if name not in ("carried", "left")}


def resume(ppo: PPO, resumed: checkpoint.Resumed | None) -> tuple[State, Collected | None]:
    """Return the state of a checkpoint, with its rollout if that has updates left; without one, the start state."""
    state = State(**stored_state(resumed)) if resumed else State(kl_coef=ppo.config.ppo.kl_coef)
    take_halved(state, ppo.config, buffers=ppo.hybrid, given={"generate": ppo.schedule.prompts_at_once})
    if resumed is None:
        return state, None
    if state.step and ppo.models.takes_first:
        # With --force-resume the run may have had other reward models, which stored their own constants.
        ppo.models.normalise_by(state.score_constants or [0.0, 1.0])
    if ppo.models.average is not None and "average" in resumed.fragments:
        ppo.models.average.restore(resumed.fragments["average"])
    if not state.update:
        return state, None
    return state, Collected.restored(resumed.tensors, resumed.state["rollout"], ppo.run.world.device)
