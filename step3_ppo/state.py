"""The fixed objects of a run of stage 3 (PPO), its state that changes (State), and the content of a checkpoint."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import RunFingerprint, run_fingerprint
from pipeline.data.batching import SFTBatch
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.moving_average import MovingAverage
from pipeline.heartbeat import beat
from pipeline.models.flops import TrainingWork
from pipeline.rewards.rollout import RolloutScoring, RunFunctions
from pipeline.run.run import Run
from pipeline.training.steps import Counters
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Collected, Minibatches, Responses, Scores
from step3_ppo.models.engines import Models
from step3_ppo.models.hybrid_engine import HybridEngine
from step3_ppo.objectives import Objective, PolicyObjective, StepSize, ValueObjective
from step3_ppo.rewarding import Rewarded, Terms, reward_responses, rewarded_alike, spreads
from step3_ppo.rollout import Sampler, Schedule, make_sampling, replace_groups
from step3_ppo.updater import Updater

log = logging.getLogger(__name__)


@dataclass(slots=True)
class State(Counters):
    """The state of stage 3 that changes, besides the engines and the moving average.

    rollout: rollouts that are done.
    update: minibatches of the current rollout that are done; 0: a new rollout has to be sampled.
    first_ratio_error: ratio error of the current rollout's first update; None if that update trained no policy.
    kl_coef: KL coefficient of the current rollout.
    score_constants: mean and std of the scores of each reward model, if one of them takes these from the first rollout;
        None if every reward model has stored its own.
    tallies: running totals of rollouts, for resuming: failed calls of functions, the position among the prompts,
        spreads of rewards. The key "rollout" has the number of the last rollout that stored any, "before" the totals
        without it, "with" those with it. A rollout that is sampled again, because the run was stopped in its first
        update, counts once by that.
    """

    rollout: int = 0
    update: int = 0
    first_ratio_error: float | None = None
    kl_coef: float = 0.0
    score_constants: list[float] | None = None
    tallies: dict[str, Any] = field(default_factory=dict)

    def tally_before(self, name: str) -> Any:
        """Return a total over the rollouts before this one, without it; None if there is none yet."""
        return self.tallies.get("before" if self.tallies.get("rollout") == self.rollout else "with", {}).get(name)

    def store_tally(self, name: str, value: Any) -> None:
        """Store a total, a JSON value, over the rollouts up to and with this one."""
        if self.tallies.get("rollout") != self.rollout:
            self.tallies = {"rollout": self.rollout, "before": self.tallies.get("with", {}), "with": {}}
        self.tallies["with"] = {**self.tallies["with"], name: value}

    def tally_of_rollout(self, name: str) -> Any:
        """Return the total that this rollout has stored, itself included; None if it has stored none."""
        return self.tallies.get("with", {}).get(name) if self.tallies.get("rollout") == self.rollout else None

    def finish_rollout(self) -> None:
        """Continue with the next rollout."""
        self.rollout += 1
        self.update = 0


@dataclass(frozen=True, slots=True)
class PPO:
    """The objects of stage 3 that do not change while it trains.

    run: ranks, folder and settings.
    config: configuration of the stage.
    models: engines and tokenizers.
    prompts: prompts to train on and held-out ones.
    text: blocks for the ptx loss; None without them.
    schedule: arithmetic of rollouts and steps.
    fingerprint: what a resumed run must share.
    rate: step -> share of the peak learning rate.
    average: moving average of the actor's weights; None without --enable-ema.
    hybrid: engine that generates.
    updater: takes optimizer steps.
    work: matrix operations of each trained model's passes.
    functions: reward functions; their workers are started when they are called. None: there are none.
    own_loss: the user's policy loss; None: a built-in one.
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
    work: dict[str, TrainingWork]
    functions: RunFunctions | None
    own_loss: Callable[..., Tensor] | None

    @property
    def function_weights(self) -> dict[str, float]:
        """Name -> weight of each reward function."""
        return self.functions.weights if self.functions else {}

    @property
    def reward_names(self) -> list[str]:
        """The names of all rewards, reward models first."""
        return [*(one.name for one in self.models.rewards), *self.function_weights]

    @property
    def idle_optimizers(self) -> list[TrainingEngine]:
        """The engines whose optimizer states are in host memory while no step is taken."""
        return list(self.models.trained.values()) if self.config.sampling.offload_optimizer_during_rollout else []

    def sampler(self, rows: Any, state: State, *, num_samples: int, batch_size: int) -> Sampler:
        """Return a sampler of responses to `rows` with the settings of the flags."""

        def should_stop() -> bool:
            beat("generate", state.step)
            return self.run.stop.is_set()

        return Sampler(
            hybrid=self.hybrid,
            rows=rows,
            world=self.run.world,
            sampling=make_sampling(self.config),
            num_samples=num_samples,
            batch_size=batch_size,
            max_prompt=self.config.data.max_prompt_seq_len,
            should_stop=should_stop,
            scoring=self.scoring(rows, state, num_samples),
        )

    def scoring(self, rows: Any, state: State, num_samples: int) -> RolloutScoring | None:
        """Return the calls of reward functions for a rollout; None without functions."""
        if self.functions is None:
            return None
        return RolloutScoring(self.functions, rows, self.models.tokenizer, num_samples=num_samples, step=state.step)

    def sample(self, state: State, *, batch_size: int) -> Responses:
        """Sample the responses of a rollout, `batch_size` prompts at once on each rank. A collective.

        Raises:
            Interrupted: the run is to stop, or a reward function failed too often.
        """
        rows, seed, k = self.prompts.train, self.config.run.seed, self.config.sampling.num_samples_per_prompt
        position, rounds = self.position(state), list[tuple[Responses, RolloutScoring | None]]()

        def sample_next(count: int) -> Responses | None:
            nonlocal position
            if rounds and not position % self.schedule.positions_per_epoch:
                return None  # all prompts of the epoch are used
            key, chosen = self.schedule.prompts(position, count, seed=seed, num_prompts=len(rows))
            position = self.schedule.position_after(position, count, num_prompts=len(rows))
            sampler = self.sampler(rows, state, num_samples=k, batch_size=batch_size)
            rounds.append((sampler.sample(chosen, key), sampler.scoring))
            return rounds[-1][0]

        responses = sample_next(self.schedule.prompts_per_rollout)
        assert responses is not None  # the epoch of a position has at least one more prompt
        if self.config.ppo.replace_equal_groups:
            pad_id, is_equal = self.hybrid.vocabulary.pad_id, partial(self.equal_groups, state=state)
            responses = replace_groups(responses, sample_next, is_equal, group_size=k, pad_id=pad_id)
        self._count_sampled(rounds, state, position=position)
        return responses

    def position(self, state: State, *, of_next: bool = False) -> int:
        """Return the position of the rollout in the order of all epochs' prompts; of_next: of the rollout after it."""
        counted = state.tally_of_rollout("sampled") if of_next else state.tally_before("sampled")
        position: int = counted["place"] if counted else (state.rollout + of_next) * self.schedule.prompts_per_rollout
        return position

    def equal_groups(self, responses: Responses, state: State) -> Tensor:
        """Return (prompts,) bool, True = all responses to the prompt have the same reward from functions."""
        model_scores = responses.sampler_log_probs[:, :0]  # no reward model scores them
        terms = self.terms(responses, model_scores, state, group_size=self.config.sampling.num_samples_per_prompt)
        return rewarded_alike(responses, model_scores, self.config.ppo, terms)

    def _count_sampled(
        self, rounds: Sequence[tuple[Responses, RolloutScoring | None]], state: State, *, position: int
    ) -> None:
        """Store what was sampled for a rollout, the failed calls of functions, and the position of the next rollout.

        Args:
            rounds: the responses to its prompts, then those to further ones, each with their calls.

        Raises:
            Interrupted: see `RunFunctions.counted`.
        """
        failures, totals = list[tuple[RolloutScoring, Tensor]](), list[Tensor]()
        for responses, scoring in rounds:
            if scoring is None or responses.scored is None:
                return
            scored = responses.scored.select(responses.valid.nonzero().flatten())
            failures.append((scoring, scored.failures))
            totals.append(scored.values @ scored.values.new_tensor(list(self.function_weights.values())))
        assert self.functions is not None
        state.store_tally("failures", self.functions.counted(state.tally_before("failures") or {}, failures))
        if self.config.ppo.replace_equal_groups:
            further = sum(len(one) for one in totals[1:]) // self.config.sampling.num_samples_per_prompt
            state.store_tally(
                "sampled", {"place": position, "further": further, "score": torch.cat(totals).mean().item()}
            )

    def rewarded(
        self,
        responses: Responses,
        scores: Scores,
        model_scores: Tensor,
        state: State,
        *,
        group_size: int,
        is_counted: bool = False,
    ) -> Rewarded:
        """Return rewards and advantages, with the coefficients of the run.

        model_scores: raw scores of the reward models, (responses, models).

        is_counted: True = the rollout's scores enter the running scale of later rollouts.
        """
        terms = self.terms(responses, model_scores, state, group_size=group_size)
        if is_counted and self.config.rewards.reward_scaling == "running":
            state.store_tally("spreads", terms.spreads)
        ppo = self.config.ppo
        if state.step < ppo.critic_warmup_steps:  # Monte-Carlo returns, not the critic's own guesses
            ppo = ppo.model_copy(update={"returns_lambda": 1.0})
        return reward_responses(responses, scores, model_scores, ppo, kl_coef=state.kl_coef, terms=terms)

    def terms(self, responses: Responses, model_scores: Tensor, state: State, *, group_size: int) -> Terms:
        """Return the terms of the sum of rewards: reward models, functions with their weights, and scales."""
        # Until the first rollout has set them, a reward model without mean and std takes those of `model_scores`.
        models = self.models.fitted(model_scores[responses.valid])
        terms = Terms(models, self.function_weights, group_size=group_size)
        scaling = self.config.rewards.reward_scaling
        if scaling == "none":
            return terms
        earlier = state.tally_before("spreads") if scaling == "running" else None
        return replace(terms, spreads=spreads(responses, model_scores, terms, earlier))

    def normalise_by_first(self, responses: Responses, scores: Scores, model_scores: Tensor, state: State) -> Scores:
        """Normalise by mean and std of this first rollout from now on; return `scores` with the critic's values so."""
        text = "--normalise-scores: the %s has no stored mean and std: uses those of the first rollout, %.4g and %.4g"
        first, *_ = rewards = self.models.fitted(model_scores[responses.valid])
        for one, before in zip(rewards, self.models.rewards, strict=True):
            if before.takes_first:
                log.info(text, one.name, one.mean, one.std)
        state.score_constants = [value for one in rewards for value in (one.mean, one.std)]
        if not self.models.normalise_by(state.score_constants) or scores.values is None:
            return scores
        return replace(scores, values=(scores.values - first.mean) / first.std)

    def objectives(self, state: State, size: StepSize) -> list[Objective]:
        """Return the objectives of the next step: that of the critic alone during its warm-up."""
        ppo, critic = self.config.ppo, self.models.critic
        objectives: list[Objective] = []
        if state.step >= ppo.critic_warmup_steps or critic is None:
            text = self.text.resized(self.text.step(state.step), self.micro_batch_size(state)) if self.text else None
            objectives += [
                PolicyObjective(
                    engine=self.models.actor,
                    work=self.work["actor"],
                    ppo=ppo,
                    size=size,
                    longest=self.config.sampling.max_answer_seq_len,
                    kl_coef=state.kl_coef,
                    temperature=self.config.sampling.temperature,
                    text=text,
                    unsup_coef=self.config.data.unsup_coef,
                    own_loss=self.own_loss,
                    models=self.models,
                    world=self.run.world,
                )
            ]
        if critic is not None:
            objectives += [ValueObjective(critic, self.work["critic"], ppo.value_clip)]
        return objectives

    def micro_batch_size(self, state: State) -> int:
        """Return the current number of rows of a micro-batch."""
        return state.batch_size("train", self.config.optimizer.per_device_train_batch_size)

    def minibatches(self, responses: Responses, state: State) -> Minibatches:
        """Return this rank's micro-batches of each optimizer step on a rollout."""
        size = self.micro_batch_size(state)
        lengths = responses.lengths(packs=self.models.pack_rows)
        return Minibatches(size, list(self.updater.minibatches(lengths, size, rollout=state.rollout)))


def checkpoint_content(ppo: PPO, state: State, rollout: Collected | None) -> checkpoint.Content:
    """Collect the content of a checkpoint: all that changes, and the rollout unless all its updates are done."""
    unfinished = rollout if state.update else None
    return checkpoint.Content(
        state={"ppo": asdict(state), "rollout": unfinished.metrics if unfinished else None},
        engines=ppo.models.trained,
        fragments={"average": ppo.average.fragments()} if ppo.average is not None else {},
        tensors=unfinished.tensors() if unfinished else {},
    )


def fingerprint_of(
    config: PPOConfig, prompts: StageData, text: StepLoader[SFTBatch] | None, *, ranks: int, total_steps: int
) -> RunFingerprint:
    """Return the properties that a resumed run must share with the one that wrote its checkpoint."""
    data = {"prompts": prompts.train} | ({} if text is None else {"ptx text": text.rows})
    fingerprint = run_fingerprint(config, data, ranks=ranks, total_steps=total_steps)
    functions = config.functions_by_title.items()
    files = {f"file of {title}": one.digest for title, one in functions if one.digest}
    modules = {f"{path} of {title}": content for title, one in functions for path, content in one.modules.items()}
    hashes, columns = {**fingerprint.fingerprints, **files}, {**fingerprint.columns, **modules}
    return replace(fingerprint, fingerprints=hashes, columns=columns)
