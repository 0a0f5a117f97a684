"""The phases of a PPO iteration: collect a rollout, update both models on it, evaluate."""

import logging
import math
import time
from collections.abc import Callable, Iterator

from pipeline.data.batching import SFTBatch
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.engine.moving_average import MovingAverage
from pipeline.generation.hybrid_engine import HybridEngine
from pipeline.generation.rollouts import RandomKey, Sampling
from pipeline.models.tokenizers import eos_ids
from pipeline.run.heartbeat import beat
from pipeline.run.run import Run
from pipeline.training.flops import forward_work, training_mfu
from pipeline.training.recorder import Recorder
from pipeline.training.steps import Stopping, check_still_converging, note_bad_step
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Responses, Scores
from step3_ppo.micro_batches import Lengths, MicroBatch, micro_batches, places, scoring_batches
from step3_ppo.models import Models, generation_options
from step3_ppo.ppo_math import next_kl_coef
from step3_ppo.prompts import Plan
from step3_ppo.rollout import Rewarded, Sampler, reward, score
from step3_ppo.rollout_metrics import append_samples, evaluation_metrics, rollout_metrics
from step3_ppo.state import Collected, State
from step3_ppo.updater import Updater, should_stop_early

log = logging.getLogger(__name__)

EMPTY_WARNING = 0.5  # share of responses without a word above which the log says so


class Phases:
    """What the loop calls; holds everything that stays, and the state that evolves."""

    def __init__(
        self,
        run: Run,
        config: PPOConfig,
        models: Models,
        *,
        prompts: StageData,
        text: StepLoader[SFTBatch] | None,
        plan: Plan,
        rate: Callable[[int], float],
        average: MovingAverage | None,
        recorder: Recorder,
        state: State,
        stopping: Stopping,
    ) -> None:
        self.run, self.config, self.models, self.prompts, self.text = run, config, models, prompts, text
        self.plan, self.rate, self.average, self.recorder, self.state = plan, rate, average, recorder, state
        self.stopping = stopping
        self._actor_work, self._critic_work = (forward_work(m.module.model) for m in (models.actor, models.critic))
        tokenizer = models.tokenizer
        generation_config = models.actor.module.model.generation_config
        self.hybrid = HybridEngine(
            models.actor,
            eos_ids=eos_ids(tokenizer, generation_config),
            pad_id=tokenizer.pad_token_id,
            options=generation_options(config),
        )
        self.updater = Updater(
            actor=models.actor,
            critic=models.critic,
            world=run.world,
            ppo=config.ppo,
            temperature=config.sampling.temperature,
            rows_per_step=plan.rows_per_step,
            micro_batch_size=config.optimizer.per_device_train_batch_size,
            unsup_coef=config.data.unsup_coef,
            seed=config.run.seed,
            stopping=stopping,
        )

    def sampler(self, rows: object, *, num_samples: int, batch_size: int) -> Sampler:
        """Samples responses to `rows` as the flags say."""
        sampling = self.config.sampling
        return Sampler(
            hybrid=self.hybrid,
            rows=rows,
            world=self.run.world,
            sampling=Sampling(sampling.max_answer_seq_len, sampling.temperature, sampling.top_p, sampling.top_k),
            num_samples=num_samples,
            batch_size=batch_size,
            max_prompt=self.config.data.max_prompt_seq_len,
            should_stop=self._between_tokens,
        )

    def _between_tokens(self) -> bool:
        beat("generate", self.state.step)
        return self.run.stop.here()

    def _between_batches(self) -> None:
        beat("score", self.state.step)
        self.stopping.check()

    def collect(self) -> Collected:
        """Sample responses to the next prompts, score them, and compute advantages. A collective.

        Raises:
            Interrupted: the run is to stop; nothing of the rollout is kept.
        """
        config, state = self.config, self.state
        started = self.recorder.begin("generate")
        epoch, planned = self.plan.prompts(
            seed=config.run.seed, rollout=state.rollout, num_prompts=len(self.prompts.train)
        )
        sampler = self.sampler(
            self.prompts.train,
            num_samples=config.sampling.num_samples_per_prompt,
            batch_size=config.sampling.per_device_generation_batch_size,
        )
        responses = sampler.sample(planned, RandomKey(config.run.seed, "rollout", epoch))
        sampled = self.recorder.begin("score")
        lengths = Lengths.of(responses, packs=self.models.pack_rows)
        steps = self.updater.plan(lengths, rollout=0, epoch=0)
        batches = None if self.updater.without_old_pass else [batch for step in steps for batch in step]
        _, rewarded, metrics = self.assess(responses, lengths, batches, self.prompts.train)
        if metrics["completions/empty_fraction"] > EMPTY_WARNING:
            log.warning("step %d: most responses are an EOS alone: the policy answers nothing", state.step)
        num_response_tokens = int(responses.response_mask.sum())
        num_tokens = state.num_tokens + int((responses.attention_mask & responses.valid.unsqueeze(1)).sum())
        metrics |= {
            "objective/kl_coef": state.kl_coef,
            "time/generate_s": sampled - started,
            "time/score_s": time.monotonic() - sampled,
            "generate_tokens_per_s": num_response_tokens / (sampled - started),
            "epoch": (state.rollout + 1) / self.plan.rollouts_per_epoch,
            "num_tokens": num_tokens,
        }
        return Collected(responses, rewarded.experience, metrics)

    def assess(
        self, responses: Responses, lengths: Lengths, policy_batches: list[MicroBatch] | None, rows: object
    ) -> tuple[Scores, Rewarded, dict[str, float]]:
        """What the models say about responses, rewards and advantages, and the rollout's metrics. A collective.

        policy_batches: of the policy's own pass; None: there is none, and the sampler's log-probabilities serve.
        """
        beat("score", self.state.step)
        models = self.models
        scores = score(
            models,
            responses,
            scoring_batches(lengths, world=self.run.world),
            policy_batches,
            rows=rows,
            temperature=self.config.sampling.temperature,
            between=self._between_batches,
        )
        rewarded = reward(
            responses,
            scores,
            self.config.ppo,
            kl_coef=self.state.kl_coef,
            score_mean=models.score_mean,
            score_std=models.score_std,
        )
        return scores, rewarded, rollout_metrics(responses, scores, rewarded, kl_coef=self.state.kl_coef)

    def updates(self, collected: Collected) -> Iterator[None]:
        """The optimizer steps that a rollout has left; each writes a line of metrics, the first one the rollout's own.

        After each item the state is whole and may be saved: with the rollout where `state.update` is not 0.

        Raises:
            Interrupted: the run is to stop; the gradients of the current step are dropped.
            DivergedError: too many steps in a row were not finite.
        """
        state = self.state
        lengths = Lengths.of(collected.responses, packs=self.models.pack_rows)
        planned = list(self.updater.updates(lengths, rollout=state.rollout))
        while planned:
            beat("train", state.step)
            before = state.step
            stop_early = self._update(collected, planned[state.update])
            state.update += 1
            if is_last := stop_early or state.update == len(planned):
                self._finish_rollout(collected)
            if state.step > before:
                yield
            if is_last:
                return

    def _update(self, collected: Collected, batches: list[MicroBatch]) -> bool:
        """One optimizer step, unless the rows are all fillers; whether the rollout's other steps are to be left out."""
        config, state = self.config, self.state
        num_response_tokens, num_sampled = self.updater.num_tokens(collected.responses, collected.experience, batches)
        if not num_sampled:
            # Fillers of an epoch's last rollout: no step, or AdamW's momentum would move the weights.
            return False
        started = self.recorder.begin("train")
        first = state.update == 0
        rollout_values = collected.metrics if first else {}
        metrics: dict[str, float] = {}
        stepped = False
        if num_response_tokens:
            metrics, stepped = self.updater.update(
                collected.responses,
                collected.experience,
                batches,
                num_tokens=num_response_tokens,
                kl_coef=state.kl_coef,
                rate_factor=self.rate(state.step),
                train_actor=state.step >= config.ppo.critic_warmup_steps,
                text=self.text.step(state.step) if self.text else None,
            )
            state.first_ratio_error = metrics["policy/first_ratio_error"] if first else state.first_ratio_error
        if first:
            state.num_tokens = int(collected.metrics["num_tokens"])
        self._count(stepped)
        seconds = time.monotonic() - started
        metrics |= rollout_values | {
            "policy/first_ratio_error": state.first_ratio_error,
            "time/train_s": seconds,
            "skipped_updates": state.skipped_updates,
        }
        total = seconds + rollout_values.get("time/generate_s", 0.0) + rollout_values.get("time/score_s", 0.0)
        num_rows = len(collected.responses.order)
        num_tokens = int(collected.responses.attention_mask.sum()) * self.plan.rows_per_step // num_rows
        metrics |= self._update_mfu(num_tokens, int(num_response_tokens), seconds)
        self.recorder.write_training(
            state.step, metrics, seconds=total, num_tokens=num_tokens, num_rows=self.plan.rows_per_step
        )
        if not stepped:
            self._note_bad_step(collected, batches, "no finite reward" if not num_response_tokens else "not finite")
        return should_stop_early(metrics, config.ppo.approx_kl_stop)

    def _finish_rollout(self, collected: Collected) -> None:
        self._adapt_kl(collected.metrics["objective/kl"], len(collected.responses.order))
        self.state.rollout += 1
        self.state.update = 0

    def _note_bad_step(self, collected: Collected, batches: list[MicroBatch], cause: str) -> None:
        rows = collected.responses.select(places(batches, self.run.world.device))
        cause = f"loss or gradient {cause}" if cause == "not finite" else cause
        prompts = rows.row_index.tolist()
        note_bad_step(self.run, step=self.state.step, rows=prompts, input_ids=[rows.sequences], cause=cause)
        limit, flag = self.config.optimizer.max_bad_steps, "--actor_learning_rate"
        check_still_converging(self.run, self.state.bad_in_a_row, limit=limit, rate_flag=flag)

    def _update_mfu(self, num_tokens: int, num_response_tokens: int, seconds: float) -> dict[str, float]:
        rows = self.plan.rows_per_step
        flops = self._actor_work.flops(num_tokens=num_tokens, num_rows=rows, num_head_tokens=num_response_tokens)
        flops += self._critic_work.flops(num_tokens=num_tokens, num_rows=rows)
        return training_mfu(flops, seconds=seconds, world_size=self.run.world.size, device=self.run.world.device)

    def _count(self, stepped: bool) -> None:
        state = self.state
        state.step += 1
        state.skipped_updates += not stepped
        settling = self.models.actor.loss_scale_can_fall or self.models.critic.loss_scale_can_fall
        state.bad_in_a_row = 0 if stepped or settling else state.bad_in_a_row + 1
        if stepped and self.average is not None:
            self.average.update()

    def _adapt_kl(self, observed: float, num_rows: int) -> None:
        ppo = self.config.ppo
        if ppo.kl_target and math.isfinite(observed):
            self.state.kl_coef = next_kl_coef(
                self.state.kl_coef, observed, target=ppo.kl_target, horizon=ppo.kl_horizon, num_sequences=num_rows
            )

    def evaluate(self) -> None:
        """Sample and score held-out prompts with the same random numbers each time, once a step. A collective.

        Raises:
            Interrupted: the run is to stop.
        """
        if self.state.evaluated == self.state.step:
            return
        rows, limit = self.prompts.eval, self.config.run.eval_iters
        count = min(len(rows), limit) if limit else len(rows)
        if not count:
            return
        size = self.config.optimizer.per_device_eval_batch_size
        sampler = self.sampler(rows, num_samples=1, batch_size=size)
        responses = sampler.sample(list(range(count)), RandomKey(self.config.run.seed, "eval"))
        lengths = Lengths.of(responses, packs=self.models.pack_rows)
        (batches,) = micro_batches(
            range(len(lengths)), lengths, rows_per_step=len(lengths), world=self.run.world, size=size
        )
        scores, rewarded, metrics = self.assess(responses, lengths, batches, rows)
        self.recorder.write(self.state.step, evaluation_metrics(metrics))
        if self.run.world.is_main:
            append_samples(
                self.run.folder / "samples.jsonl",
                step=self.state.step,
                responses=responses,
                scores=scores,
                rewarded=rewarded,
                tokenizer=self.models.tokenizer,
            )
        self.models.release_gathered()
        self.state.evaluated = self.state.step
