"""Everything of stage 3 that stays as it is (PPO) and that evolves (State): built, restored and saved."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import RunFingerprint, run_fingerprint
from pipeline.checkpoints.model_folder import save_trained
from pipeline.checkpoints.offline import OfflineCheckpoint
from pipeline.data.batching import SFTBatch
from pipeline.data.cache import StageData
from pipeline.data.loader import Step, StepLoader
from pipeline.engine.build import start_engines
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.moving_average import MovingAverage
from pipeline.generation.hybrid_engine import HybridEngine
from pipeline.generation.rollouts import Sampling
from pipeline.heartbeat import beat
from pipeline.models.flops import TrainingWork, training_work
from pipeline.models.reward_model import score_head_fields
from pipeline.models.source import ModelSource, prepare_tokenizer
from pipeline.models.tokenizers import eos_ids
from pipeline.out_of_memory import KEPT_CACHE
from pipeline.planning.room import make_room
from pipeline.run.run import Run
from pipeline.training.halving import take_halved
from pipeline.training.steps import Counters, rate_factor
from step3_ppo.config import PPOConfig, generation_options
from step3_ppo.experience import Collected, Cut, Responses, Rewarded, Scores, reward_responses
from step3_ppo.models import Models, make_models, make_sources
from step3_ppo.rollout import Sampler, Schedule, make_prompts, make_schedule, make_text, sampling_line
from step3_ppo.updater import StepSize, Updater

log = logging.getLogger(__name__)


@dataclass(slots=True)
class State(Counters):
    """Everything of stage 3 that evolves, besides the engines and the moving average.

    rollout: rollouts that are done.
    update: minibatches of the current rollout that are done; 0: a new rollout has to be sampled.
    first_ratio_error: ratio error of the current rollout's first update; None where that trained no policy.
    kl_coef: KL coefficient of the current rollout.
    """

    rollout: int = 0
    update: int = 0
    first_ratio_error: float | None = None
    kl_coef: float = 0.0

    def finish_rollout(self) -> None:
        """Go on to the next rollout."""
        self.rollout += 1
        self.update = 0


@dataclass(frozen=True, slots=True)
class PPO:
    """Everything of stage 3 that stays as it is while it trains.

    run: ranks, folder and settings.
    config: configuration of the stage.
    models: engines and tokenizers.
    prompts: prompts to train on and held-out ones.
    text: blocks for the ptx loss; None without them.
    schedule: arithmetic of rollouts and steps.
    fingerprint: what a resumed run must share.
    rate: step -> share of the peak learning rate.
    average: moving average of the actor's weights; None without --enable_ema.
    hybrid: engine that generates.
    updater: takes optimizer steps.
    actor_work: matrix operations of the actor's passes in training.
    critic_work: matrix operations of the critic's passes in training.
    """

    run: Run
    config: PPOConfig
    models: Models
    prompts: StageData
    text: StepLoader[SFTBatch] | None
    schedule: Schedule
    fingerprint: RunFingerprint
    rate: Callable[[int], float]
    average: MovingAverage | None
    hybrid: HybridEngine
    updater: Updater
    actor_work: TrainingWork
    critic_work: TrainingWork

    @property
    def engines(self) -> dict[str, TrainingEngine]:
        """The models that are trained."""
        return {"actor": self.models.actor, "critic": self.models.critic}

    @property
    def idle_optimizers(self) -> list[TrainingEngine]:
        """The engines whose optimizer states leave the device while no step is taken."""
        return list(self.engines.values()) if self.config.sampling.offload_optimizer_during_rollout else []

    def sampler(self, rows: Any, state: State, *, num_samples: int, batch_size: int) -> Sampler:
        """Return a sampler of responses to `rows`, as the flags say."""

        def should_stop() -> bool:
            beat("generate", state.step)
            return self.run.stop.is_set()

        sampling = self.config.sampling
        return Sampler(
            hybrid=self.hybrid,
            rows=rows,
            world=self.run.world,
            sampling=Sampling(sampling.max_answer_seq_len, sampling.temperature, sampling.top_p, sampling.top_k),
            num_samples=num_samples,
            batch_size=batch_size,
            max_prompt=self.config.data.max_prompt_seq_len,
            should_stop=should_stop,
        )

    def rewarded(self, responses: Responses, scores: Scores, state: State) -> Rewarded:
        """Return rewards and advantages with the coefficients of the run."""
        mean, std, kl_coef = self.models.score_mean, self.models.score_std, state.kl_coef
        return reward_responses(responses, scores, self.config.ppo, kl_coef=kl_coef, score_mean=mean, score_std=std)

    def update_flops(self, size: StepSize, text: Step[SFTBatch] | None, *, trained_actor: bool) -> float:
        """Return the matrix operations of an optimizer step: the passes of the models that were trained in it."""
        rows = {"num_tokens": size.num_tokens, "num_squares": size.num_squares}
        flops = self.critic_work.flops(**rows)
        if trained_actor:
            flops += self.actor_work.flops(**rows, num_head_tokens=size.num_response_tokens)
        if text is not None:
            flops += self.actor_work.flops(
                num_tokens=text.num_tokens, num_squares=text.num_squares, num_head_tokens=text.num_trained
            )
        return flops

    def micro_batch_size(self, state: State) -> int:
        """Return the rows of a micro-batch in force."""
        return state.batch_size("train", self.config.optimizer.per_device_train_batch_size)

    def cut(self, responses: Responses, state: State) -> Cut:
        """Cut a rollout into this rank's micro-batches of each optimizer step."""
        size = self.micro_batch_size(state)
        lengths = responses.lengths(packs=self.models.pack_rows)
        return Cut(size, list(self.updater.minibatches(lengths, size, rollout=state.rollout)))


def build(run: Run, config: PPOConfig) -> tuple[PPO, checkpoint.Resumed | None]:
    """Everything that the loop works on, with the weights of the newest checkpoint; and the rest of that checkpoint."""
    start_engines(run)
    sources = make_sources(run, config)
    make_room(run)
    prompts = make_prompts(run, config, sources.tokenizer)
    text = make_text(run, config, sources.tokenizer)
    models = make_models(run, config, sources)
    schedule = make_schedule(config, num_prompts=len(prompts.train), world_size=run.world.size)
    fingerprint = fingerprint_of(config, prompts, text, ranks=run.world.size)
    engines = {"actor": models.actor, "critic": models.critic}
    resumed = checkpoint.load(run, config.run.resumes_from, engines, fingerprint, force=config.run.force_resume)
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
    """Everything that is made of the models and the prompts, with the weights as they are now."""
    return PPO(
        run,
        config,
        models,
        prompts,
        text,
        schedule,
        fingerprint,
        rate=rate_factor(config.optimizer, total_steps=schedule.total_steps),
        # Starts from the weights as they are now: with --force_resume the checkpoint may hold no average.
        average=MovingAverage(models.actor.module, decay=config.ppo.ema_decay) if config.ppo.enable_ema else None,
        hybrid=make_hybrid(config, models),
        updater=make_updater(run, config, models, schedule),
        actor_work=training_work(models.actor.module.model),
        critic_work=training_work(models.critic.module.model),
    )


def make_hybrid(config: PPOConfig, models: Models) -> HybridEngine:
    """Make the engine that samples from the actor, and log what it samples with."""
    configured = models.actor.module.model.generation_config
    ends = eos_ids(models.tokenizer, configured)
    pad_id, options = models.tokenizer.pad_token_id, generation_options(config)
    log.info("%s", sampling_line(config, ends, configured.to_diff_dict()))
    return HybridEngine(models.actor, eos_ids=ends, pad_id=pad_id, options=options)


def make_updater(run: Run, config: PPOConfig, models: Models, schedule: Schedule) -> Updater:
    """Collect what an optimizer step of actor and critic needs."""
    return Updater(
        actor=models.actor,
        critic=models.critic,
        world=run.world,
        ppo=config.ppo,
        temperature=config.sampling.temperature,
        rows_per_step=schedule.rows_per_step,
        unsup_coef=config.data.unsup_coef,
        seed=config.run.seed,
    )


def resume(ppo: PPO, resumed: checkpoint.Resumed | None) -> tuple[State, Collected | None]:
    """The counters of a checkpoint, and the rollout that it holds where its updates were not done; else the start."""
    state = State(**resumed.state["ppo"]) if resumed else State(kl_coef=ppo.config.ppo.kl_coef)
    take_halved(state, ppo.config)
    if KEPT_CACHE in state.halved:
        ppo.hybrid.always_release()
    if resumed is None:
        return state, None
    if ppo.average is not None and "average" in resumed.fragments:
        ppo.average.restore(resumed.fragments["average"])
    if not state.update:
        return state, None
    rollout = Collected.restored(
        resumed.tensors,
        resumed.state["rollout"],
        ppo.run.world.device,
        cut=lambda responses: ppo.cut(responses, state),
    )
    return state, rollout


def fingerprint_of(
    config: PPOConfig, prompts: StageData, text: StepLoader[SFTBatch] | None, *, ranks: int
) -> RunFingerprint:
    """Return the properties that a resumed run must share with the one that wrote its checkpoint."""
    models = {"actor": config.actor.model_name_or_path, "critic": config.critic.model_name_or_path}
    models["reward"] = config.reward_path
    return run_fingerprint(
        config,
        models={f"{name} model": path for name, path in models.items()},
        data={"prompts": prompts.train} | ({} if text is None else {"ptx text": text.rows}),
        ranks=ranks,
    )


def save_models(ppo: PPO, state: State) -> None:
    """Write the model folders. A collective."""
    run, models, average = ppo.run, ppo.models, ppo.average
    actor, tokenizer = models.actor.module, models.tokenizer
    save_actor(run, actor, tokenizer, step=state.step)
    if average is not None:
        with average.swapped_in():
            save_actor(run, actor, tokenizer, step=state.step, average=True)
    save_critic(run, models.critic.module, tokenizer, step=state.step)


def save_actor(run: Run, module: Any, tokenizer: PreTrainedTokenizerBase, *, step: int, average: bool = False) -> None:
    """Write the actor's folder, or that of its moving average. A collective."""
    config: PPOConfig = run.resolved.config
    folder = Path(config.run.output_dir) / ("actor_ema" if average else "actor")
    kind = "Moving average of a PPO-tuned model" if average else "PPO-tuned model"
    save_trained(run, module, tokenizer, folder, model=config.actor, kind=kind, step=step)


def save_critic(run: Run, module: Any, tokenizer: PreTrainedTokenizerBase, *, step: int) -> None:
    """Write the critic's folder. A collective."""
    config: PPOConfig = run.resolved.config
    fields = score_head_fields(tokenizer, score_mean=module.score_mean, score_std=module.score_std, label="value")
    folder = Path(config.run.output_dir) / "critic"
    save_trained(run, module, tokenizer, folder, model=config.critic, kind="PPO critic", step=step, score_fields=fields)


def export(checkpoint: OfflineCheckpoint) -> None:
    """Write the model folders of a checkpoint, one model in memory at a time."""
    run, step, config = checkpoint.run, checkpoint.saved["step"], checkpoint.run.resolved.config
    tokenizer = prepare_tokenizer(ModelSource(config.actor.model_name_or_path), config.data.template)
    save_actor(run, checkpoint.language_model("actor", config.actor), tokenizer, step=step)
    if checkpoint.has_average:
        average = checkpoint.language_model("actor", config.actor, average=True)
        save_actor(run, average, tokenizer, step=step, average=True)
        del average
    critic = checkpoint.value_model("critic", config.critic, normalised=config.ppo.normalise_scores)
    save_critic(run, critic, tokenizer, step=step)


def checkpoint_content(ppo: PPO, state: State, rollout: Collected | None) -> checkpoint.Content:
    """Collect what a checkpoint holds: everything that evolves, and the rollout until all its updates are done."""
    kept = rollout if state.update else None
    return checkpoint.Content(
        state={"ppo": asdict(state), "rollout": kept.metrics if kept else None},
        engines=ppo.engines,
        fragments={"average": ppo.average.fragments()} if ppo.average is not None else {},
        tensors=kept.tensors() if kept else {},
    )
