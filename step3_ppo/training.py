"""Step 3's loop: build, resume, then rollout -> rewards -> updates -> log -> save, readable from top to bottom."""

import logging

from pipeline import checkpoint
from pipeline.earlier_runs import settings_of
from pipeline.engine import start_deepspeed
from pipeline.metrics import Recorder
from pipeline.run import Run, write_done
from pipeline.schedule import rate_factor
from step3_ppo.config import PPOConfig
from step3_ppo.data import make_prompts, make_text
from step3_ppo.ema import MovingAverage
from step3_ppo.models import make_models
from step3_ppo.phases import Phases, State
from step3_ppo.plan import make_plan
from step3_ppo.save import save_checkpoint, save_models

log = logging.getLogger(__name__)


def train(run: Run, config: PPOConfig) -> None:
    """Improve the actor against the reward model; leave actor/, critic/ (and actor_ema/) in `--output_dir`.

    Raises:
        StoppedRun: asked to stop; the checkpoint is written.
        DivergedError: too many updates in a row were not finite.
    """
    start_deepspeed()
    models = make_models(run, config)
    prompts = make_prompts(run, config, models.tokenizer)
    text = make_text(run, config, models.tokenizer)
    plan = make_plan(config, num_prompts=len(prompts.train), world_size=run.world.size)
    rate = rate_factor(
        config.optimizer.lr_scheduler_type,
        num_warmup_steps=config.optimizer.num_warmup_steps,
        num_training_steps=plan.total_steps,
        floor=config.optimizer.min_learning_rate_ratio,
    )
    average = MovingAverage(models.actor.module, decay=config.ppo.ema_decay) if config.ppo.enable_ema else None
    state = State(kl_coef=config.ppo.kl_coef)
    engines = {"actor": models.actor, "critic": models.critic}
    resumed = checkpoint.load(run.folder, config.run.resume, engines, settings=settings_of(config))
    if resumed:
        state = State(**resumed.state["ppo"])
        if average is not None:
            average.load(resumed.tensors)
    recorder = Recorder(
        run,
        config.run,
        start_step=state.step,
        total_steps=plan.total_steps,
        shown=("objective/scores", "objective/kl", "policy/approx_kl", "loss/value"),
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
    )

    def save_everything() -> None:
        save_checkpoint(run, config, models, state, average)
        save_models(run, config, models, average)

    if state.step == 0:
        phases.evaluate()
    while not plan.is_done(step=state.step, rollout=state.rollout):
        before = state.step
        rollout = phases.collect()
        phases.update(rollout)
        if plan.is_done(step=state.step, rollout=state.rollout):
            break
        if passed(config.run.eval_interval, before, state.step):
            phases.evaluate()
        if run.stop.anywhere(run.world):
            save_checkpoint(run, config, models, state, average)
            raise run.stopped(state.step, plan.total_steps)
        if passed(config.run.save_steps, before, state.step):
            save_everything()
    phases.evaluate()
    save_everything()
    write_done(run, steps=state.step)


def passed(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of `interval` lies in (before, after]; an update phase takes several steps at once."""
    return interval > 0 and after // interval > before // interval
