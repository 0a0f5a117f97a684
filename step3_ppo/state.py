"""The fixed objects of a run of stage 3 (PPO), its state that changes (State), and the content of a checkpoint."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import RunFingerprint, run_fingerprint
from pipeline.data.batching import SFTBatch
from pipeline.data.cache import StageData
from pipeline.data.loader import StepLoader
from pipeline.engine.engine import TrainingEngine
from pipeline.heartbeat import beat
from pipeline.inference.tool_conversations import Calls
from pipeline.rewards.rows import Reward
from pipeline.run.run import Run
from pipeline.training.steps import Counters
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Collected, Responses, RewardScores
from step3_ppo.models.engines import Models
from step3_ppo.models.hybrid_engine import HybridEngine
from step3_ppo.objectives import Objective, PolicyObjective, StepSize, ValueObjective
from step3_ppo.rewarding import rewarded_alike, updated_spreads
from step3_ppo.rollout import Sampler, Schedule, make_sampling, replace_groups
from step3_ppo.updater import Updater


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
    hybrid: engine that generates.
    updater: takes optimizer steps.
    calls: calls of the reward functions and of tools, whose workers are started when they are called.
    """

    run: Run
    config: PPOConfig
    models: Models
    prompts: StageData
    text: StepLoader[SFTBatch] | None
    schedule: Schedule
    fingerprint: RunFingerprint
    hybrid: HybridEngine
    updater: Updater
    calls: Calls

    @property
    def rewards(self) -> list[Reward]:
        """All rewards of the run, reward models first."""
        return [*self.models.rewards, *self.calls.rewards.functions]

    @property
    def idle_optimizers(self) -> list[TrainingEngine]:
        """The engines whose optimizer states are in host memory while no step is taken."""
        return list(self.models.trained.values()) if self.config.sampling.offload_optimizer_during_rollout else []

    def sampler(self, rows: Any, state: State, *, num_samples: int, batch_size: int) -> Sampler:
        """Begin a rollout; return the sampler of its responses to `rows`, with the settings of the flags."""

        def should_stop() -> bool:
            beat("generate", state.step)
            return self.run.stop.is_set()

        self.calls.rewards.begin(rows, self.models.tokenizer, num_samples=num_samples, step=state.step)
        return Sampler(
            hybrid=self.hybrid,
            rows=rows,
            world=self.run.world,
            sampling=make_sampling(self.config),
            num_samples=num_samples,
            batch_size=batch_size,
            max_prompt=self.config.data.max_prompt_seq_len,
            should_stop=should_stop,
            calls=self.calls.rewards if self.calls.rewards.counted_names else None,
            tools=self.calls.tools,
        )

    def sample(self, state: State, *, batch_size: int) -> Responses:
        """Sample the responses of a rollout, `batch_size` prompts at once on each rank. A collective.

        Raises:
            Interrupted: the run is to stop; with `--replace-equal-groups` also see `FunctionCalls.values`.
        """
        rows, seed, k = self.prompts.train, self.config.run.seed, self.config.sampling.num_samples_per_prompt
        position, rounds = self.position(state), list[Responses]()
        sampler = self.sampler(rows, state, num_samples=k, batch_size=batch_size)

        def sample_next(count: int) -> Responses | None:
            nonlocal position
            if rounds and not position % self.schedule.positions_per_epoch:
                return None  # all prompts of the epoch are used
            key, chosen = self.schedule.prompts(position, count, seed=seed, num_prompts=len(rows))
            position = self.schedule.position_after(position, count, num_prompts=len(rows))
            rounds.append(sampler.sample(chosen, key))
            return rounds[-1]

        responses = sample_next(self.schedule.prompts_per_rollout)
        assert responses is not None  # the epoch of a position has at least one more prompt
        if self.config.ppo.replace_equal_groups:

            def is_equal(sampled: Responses) -> Tensor:
                return rewarded_alike(sampled, self.judged(sampled, state), self.config.ppo, group_size=k)

            pad_id = self.hybrid.vocabulary.pad_id
            responses = replace_groups(responses, sample_next, is_equal, group_size=k, pad_id=pad_id)
            values = [self.judged(one, state).values[one.valid].nan_to_num(0.0) for one in rounds]
            totals = [one @ one.new_tensor([reward.weight for reward in self.rewards]) for one in values]
            further, score = sum(len(one) for one in totals[1:]) // k, torch.cat(totals).mean().item()
            state.store_tally("sampled", {"place": position, "further": further, "score": score})
        return responses

    def position(self, state: State, *, of_next: bool = False) -> int:
        """Return the position of the rollout in the order of all epochs' prompts; of_next: of the rollout after it."""
        counted = state.tally_of_rollout("sampled") if of_next else state.tally_before("sampled")
        position: int = counted["place"] if counted else (state.rollout + of_next) * self.schedule.prompts_per_rollout
        return position

    def judged(self, responses: Responses, state: State, model_scores: Tensor | None = None) -> RewardScores:
        """Return the raw scores of all rewards, once functions have given theirs. A collective.

        model_scores: (N, reward models) fp32; None: there are no reward models.

        Raises:
            Interrupted: see `FunctionCalls.values`.
        """
        rows = zip(responses.row_index.tolist(), responses.valid.tolist(), strict=True)
        values = self.calls.rewards.values([row if counts else None for row, counts in rows], self.run.stop.is_set)
        width, none = responses.sampler_log_probs.shape[1], responses.sampler_log_probs[:, :0]
        judged = RewardScores.of(self.rewards, none if model_scores is None else model_scores, values, width=width)
        if responses.tool_counts is not None:  # no reward applies to a row that a call has lost
            lost = responses.lost.unsqueeze(1)
            scores = judged.values.masked_fill(lost, torch.nan)
            judged = replace(judged, values=scores, applies=judged.applies & ~lost)
        if (scaling := self.config.rewards.reward_scaling) == "none":
            return judged
        earlier = state.tally_before("spreads") if scaling == "running" else None
        return replace(judged, spreads=updated_spreads(responses, judged, earlier))

    def objectives(self, state: State, size: StepSize, micro_batch_size: int) -> list[Objective]:
        """Return the objectives of the next step: that of the critic alone during its warm-up."""
        ppo, critic = self.config.ppo, self.models.critic
        objectives: list[Objective] = []
        if state.step >= ppo.critic_warmup_steps or critic is None:
            text = self.text.resized(self.text.step(state.step), micro_batch_size) if self.text else None
            objectives += [
                PolicyObjective(
                    engine=self.models.actor,
                    ppo=ppo,
                    size=size,
                    longest=self.config.sampling.max_answer_seq_len,
                    kl_coef=state.kl_coef,
                    temperature=self.config.sampling.temperature,
                    text=text,
                    unsup_coef=self.config.data.unsup_coef,
                    own_loss=self.updater.own_loss,
                    models=self.models,
                    world=self.run.world,
                )
            ]
        if critic is not None:
            objectives += [ValueObjective(critic, ppo.value_clip)]
        return objectives


def checkpoint_content(ppo: PPO, state: State, rollout: Collected | None) -> checkpoint.Content:
    """Collect the content of a checkpoint: all that changes, and the rollout unless all its updates are done."""
    unfinished = rollout if state.update else None
    return checkpoint.Content(
        state={"ppo": asdict(state), "rollout": unfinished.metrics if unfinished else None},
        engines=ppo.models.trained,
        fragments={"average": average.fragments()} if (average := ppo.models.average) is not None else {},
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
