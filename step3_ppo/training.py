"""Step 3's loop: build, resume, then rollout -> rewards -> updates -> log -> save, readable from top to bottom."""

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from pipeline.checkpoints import checkpoint
from pipeline.engine.moving_average import MovingAverage
from pipeline.engine.optimizer_offload import optimizer_states_on_host
from pipeline.engine.start import start_deepspeed
from pipeline.run.heartbeat import beat
from pipeline.run.run import Run, write_done
from pipeline.training.recorder import Recorder
from pipeline.training.steps import Interrupted, Stopping, rate_factor
from step3_ppo.config import PPOConfig, check_generation
from step3_ppo.data import make_prompts, make_text
from step3_ppo.models import make_models, make_tokenizers
from step3_ppo.phases import Phases
from step3_ppo.prompts import make_plan
from step3_ppo.save import checkpoint_content, run_fingerprint, save_models
from step3_ppo.state import Collected, State

log = logging.getLogger(__name__)

T = TypeVar("T")


def train(run: Run, config: PPOConfig) -> None:
    """Improve the actor against the reward model; leave actor/, critic/ (and actor_ema/) in `--output_dir`.

    Raises:
        StoppedRun: asked to stop; the checkpoint is written.
        DivergedError: too many updates in a row were not finite.
    """
    check_generation(config, run.world.size)
    start_deepspeed(deterministic=config.run.deterministic)
    tokenizers = make_tokenizers(config)
    prompts = make_prompts(run, config, tokenizers.actor)
    text = make_text(run, config, tokenizers.actor)
    models = make_models(run, config, tokenizers)
    plan = make_plan(config, num_prompts=len(prompts.train), world_size=run.world.size)
    rate = rate_factor(
        config.optimizer.lr_scheduler_type,
        num_warmup_steps=config.optimizer.num_warmup_steps,
        num_training_steps=plan.total_steps,
        floor=config.optimizer.min_learning_rate_ratio,
    )
    fingerprint = run_fingerprint(config, prompts, text, plan)
    state, collected = State(kl_coef=config.ppo.kl_coef), None
    engines = {"actor": models.actor, "critic": models.critic}
    resumed = checkpoint.load(run, config.run.resume, engines, fingerprint, force=config.run.force_resume)
    if resumed:
        state = State(**resumed.state["ppo"])
        if state.update:
            collected = Collected.restored(resumed.tensors, resumed.state["rollout"], run.world.device)
    # Made of the weights as they are now: with --force_resume the checkpoint may hold no average.
    average = MovingAverage(models.actor.module, decay=config.ppo.ema_decay) if config.ppo.enable_ema else None
    if resumed and average is not None and "average" in resumed.fragments:
        average.restore(resumed.fragments["average"])
    recorder = Recorder(
        run,
        config.run,
        start_step=state.step if resumed else -1,
        total_steps=plan.total_steps,
        shown=("objective/scores", "objective/kl", "policy/approx_kl", "loss/value"),
        models=models.named(),
    )
    phases = Phases(
        run,
        config,
        models,
        prompts=prompts,
        text=text,
        plan=plan,
        rate=rate,
        average=average,
        recorder=recorder,
        state=state,
        stopping=Stopping(run),
    )

    saver = checkpoint.Saver(
        run, fingerprint, keep=config.run.keep_checkpoints, background=config.run.save_in_background
    )

    def save_state() -> None:
        recorder.sync()
        content = checkpoint_content(models, state=state, collected=collected, average=average)
        saver.save(content, step=state.step)

    def save_everything() -> None:
        beat("save", state.step)
        checkpoint.attempt(save_state)
        checkpoint.attempt(lambda: save_models(run, config, models, average))

    def at_rest(sampling: Callable[[], T]) -> T:
        """No step is taken while responses are made: the optimizer states may be elsewhere."""
        resting = config.sampling.offload_optimizer_during_rollout
        with optimizer_states_on_host([models.actor, models.critic] if resting else []):
            return sampling()

    def one_rollout() -> Iterator[None]:
        """Sample unless a checkpoint held the rollout; then an item for each optimizer step."""
        nonlocal collected
        collected = collected or at_rest(phases.collect)
        yield from phases.updates(collected)
        collected = None

    try:
        if state.step % config.run.eval_interval == 0 if config.run.eval_interval else state.step == 0:
            at_rest(phases.evaluate)  # once a step: a run that was stopped within an evaluation makes it now
        while not plan.is_done(step=state.step, rollout=state.rollout):
            for _ in one_rollout():
                checkpoint.attempt(saver.poll)
                if plan.is_done(step=state.step, rollout=state.rollout):
                    break
                if config.run.eval_interval and state.step % config.run.eval_interval == 0:
                    at_rest(phases.evaluate)
                if phases.stopping.after_step():
                    raise Interrupted
                if config.run.save_steps and state.step % config.run.save_steps == 0:
                    save_everything()
        at_rest(phases.evaluate)
    except Interrupted:
        beat("save", state.step)
        save_state()
        saver.finish()
        raise run.stopped(state.step, plan.total_steps) from None
    beat("save", state.step)
    checkpoint.attempt(save_state)
    checkpoint.attempt(saver.finish)
    save_models(run, config, models, average)
    write_done(run, steps=state.step)
