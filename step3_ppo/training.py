"""Stage 3's loop: sample, score, reward, update both models, adapt the KL coefficient; from build to finish.

The functions below the loop are its steps, in order: each hands the settings of the run to the module that does it.
"""

import math
from functools import partial
from typing import Any

from torch import Tensor

from pipeline.configuration.rank_rules import evaluated_rows
from pipeline.data.batching import SCORING_TOKENS
from pipeline.engine.optimizer_offload import optimizer_states_on_host
from pipeline.generation.rollouts import RandomKey
from pipeline.heartbeat import beat
from pipeline.models.flops import training_mfu
from pipeline.run.run import Run, take_folder
from pipeline.training.micro_batches import micro_batches, row_indices, scoring_batches
from pipeline.training.run_control import RunControl
from pipeline.training.steps import note_skipped_step
from step3_ppo.build import build, resume
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Collected, Responses, RewardScores, Scores
from step3_ppo.mathematics.estimators import next_kl_coef
from step3_ppo.metrics import METRICS, SHOWN, of_rewards
from step3_ppo.models.saving import save_models
from step3_ppo.rewarding import reward_responses
from step3_ppo.rollout import log_unfinished
from step3_ppo.rollout_metrics import (
    append_samples,
    evaluation_metrics,
    group_metrics,
    pass_metrics,
    rollout_metrics,
    row_values,
    warn_of_equal_rewards,
)
from step3_ppo.scoring import Passes, normalise_by_first, policy_log_probs, reward_model_scores, score_responses
from step3_ppo.state import PPO, State, checkpoint_content
from step3_ppo.updater import Update


def train(run: Run, config: PPOConfig) -> None:
    """Train the actor on the rewards; save actor/, critic/ (and actor_ema/) in `--output-dir`.

    Raises:
        StoppedRun: the run was asked to stop; its checkpoint is written.
        DivergedError: too many updates in a row were not finite.
    """
    ppo, resumed = build(run, config)
    state, rollout = resume(ppo, resumed)  # rollout: None, or the one whose updates were interrupted
    take_folder(run)
    control = make_control(ppo, resumed_step=state.step if resumed else None)
    with ppo.calls, control.resumable(state, lambda: checkpoint_content(ppo, state, rollout)):
        while True:
            with control.halving.when_out_of_memory(state):
                is_done = ppo.schedule.is_done(step=state.step, position=ppo.position(state))
                if is_done or control.evaluation_is_due(state):
                    evaluate(ppo, state, control)
                if is_done:
                    break
                control.stop_if_requested()
                if control.save_is_due(state):
                    control.save(state, checkpoint_content(ppo, state, rollout), lambda: save(ppo, state))

                if rollout is None or state.update == 0:
                    with optimizer_states_on_host(ppo.idle_optimizers):
                        responses = sample(ppo, state, control)  # 1. to the next prompts, the same on every rank
                        scores = score(ppo, responses, state, control)  # 2. log-probabilities, values
                        judged = score_rewards(ppo, responses, ppo.prompts.train, state, control)  # 3. raw scores
                        rollout = reward(ppo, responses, scores, judged, state=state, control=control)  # 4. KL, GAE

                update = step_objectives(ppo, rollout, state, control)  # 5. all that learn step, or none
                if update is not None:
                    log_update(ppo, rollout, update, state, control)
                state.update += 1
                if state.update == len(rollout.steps):
                    adapt_kl(ppo, rollout, state)  # 6. the KL coefficient follows its target
                    state.finish_rollout()
                    rollout = None
    control.finish(state, checkpoint_content(ppo, state, rollout), lambda: save(ppo, state))


def make_control(ppo: PPO, *, resumed_step: int | None) -> RunControl:
    """Return the object that handles metrics, checkpoints and stop requests of this run."""
    return RunControl(
        ppo.run,
        ppo.fingerprint,
        resumed_step=resumed_step,
        metrics=METRICS | of_rewards(one.name for one in ppo.rewards),
        engines=ppo.models.named(),
        counts=ppo.prompts.counts,
        # With one step a rollout approx_kl is always 0: the policy has not moved when it is measured.
        shown=SHOWN
        + (("policy/approx_kl",) if ppo.schedule.steps_per_rollout > 1 else ())
        + (("loss/kl",) if ppo.config.compares_in_updates else ()),
        buffers=ppo.hybrid,
    )


# --- the steps of the loop ------------------------------------------------------------------------------------------


def sample(ppo: PPO, state: State, control: RunControl) -> Responses:
    """Sample responses to the next prompts; reward functions begin to score those that have ended. A collective.

    Raises:
        Interrupted: the run is to stop; the rollout is dropped.
    """
    control.begin("generate")
    beat("generate", state.step)
    size = control.halving.batch_size(state, "generate", ppo.schedule.prompts_at_once)
    responses = ppo.sample(state, batch_size=size)
    log_unfinished(responses, rollout=state.rollout, limit=ppo.config.sampling.max_answer_seq_len)
    return responses


def score(ppo: PPO, responses: Responses, state: State, control: RunControl) -> Scores:
    """Run policy, reference and critic over the responses. A collective.

    The policy's pass has exactly the shapes of the first epoch's updates. With `--old-log-probs sampler` it is left
    out. A teacher with an exact divergence in the loss runs in the updates alone, and in evaluations.

    Raises:
        Interrupted: the run is to stop; nothing of the rollout is kept.
    """
    control.begin("score")
    beat("score", state.step)
    policy: tuple[Tensor, Tensor | None] = (responses.sampler_log_probs, None)
    if ppo.config.ppo.old_log_probs != "sampler":
        size = control.halving.batch_size(state, "train", ppo.config.optimizer.per_device_train_batch_size)
        policy = score_policy(ppo, responses, state, control, size)
        ppo.hybrid.note_update()  # the pass has the shapes of an update
    with_reference = not ppo.config.compares_in_updates
    return score_others(ppo, responses, policy, state, control, with_reference=with_reference)


def score_rewards(ppo: PPO, responses: Responses, rows: Any, state: State, control: RunControl) -> RewardScores:
    """Return the raw scores of all rewards for responses to `rows`: run the models, wait for functions. A collective.

    Raises:
        Interrupted: the run is to stop, or a function returned something else than values; the rollout is dropped.
    """
    passes = scoring_passes(ppo, responses, state, control)
    return ppo.judged(responses, state, reward_model_scores(ppo.models, passes, rows=rows))


def reward(
    ppo: PPO, responses: Responses, scores: Scores, judged: RewardScores, *, state: State, control: RunControl
) -> Collected:
    """Turn scores into rewards and advantages, and return the rollout that is ready for updates with its metrics.

    Raises:
        Interrupted: a reward function failed too often; the rollout is dropped.
    """
    if ppo.calls.rewards.counted_names:
        state.store_tally("failures", ppo.calls.rewards.counted(state.tally_before("failures") or {}))
    if ppo.models.takes_first:
        scores, state.score_constants = normalise_by_first(ppo.models, responses, scores, judged)
    k, coefficients = ppo.config.sampling.num_samples_per_prompt, ppo.config.ppo.at(state.step)
    if ppo.config.rewards.reward_scaling == "running":
        state.store_tally("spreads", judged.spreads)
    rewarded = reward_responses(responses, scores, judged, coefficients, kl_coef=state.kl_coef, group_size=k)
    metrics = rollout_metrics(responses, scores, rewarded, coefficients)
    metrics |= group_metrics(rewarded, state.tally_of_rollout("sampled"), group_size=k)
    num_tokens = int((responses.attention_mask & responses.valid.unsqueeze(1)).sum())
    generate_s = control.recorder.seconds("generate")
    metrics |= {"objective/kl_coef": state.kl_coef} if ppo.models.has_reference else {}
    metrics |= {
        "time/generate_s": generate_s,
        "time/score_s": control.recorder.seconds("score"),
        "generate_tokens_per_s": int(responses.response_mask.sum()) / generate_s,
        "epoch": ppo.position(state, of_next=True) / ppo.schedule.positions_per_epoch,
        "num_tokens": state.num_tokens + num_tokens,
    }
    control.begin("train")  # from here on optimizer states are on the device again; their memory is not scoring's
    return Collected(responses, rewarded.experience, metrics)


def step_objectives(ppo: PPO, rollout: Collected, state: State, control: RunControl) -> Update | None:
    """Take the optimizer step of the rollout's next minibatch; None if all its rows are padding. A collective.

    Raises:
        Interrupted: the run is to stop; the gradients are dropped.
    """
    beat("train", state.step)
    micro_batch_size = control.halving.batch_size(state, "train", ppo.config.optimizer.per_device_train_batch_size)
    if rollout.micro_batch_size != micro_batch_size:  # not formed yet, or halved since; old log-probabilities stay
        lengths = rollout.responses.lengths(packs=ppo.models.pack_rows)
        rollout.steps = list(ppo.updater.minibatches(lengths, micro_batch_size, rollout=state.rollout))
        rollout.micro_batch_size = micro_batch_size
    batches = rollout.steps[state.update]
    size = ppo.updater.step_size(rollout.responses, rollout.experience, batches)
    if not size.num_rows:
        # An epoch's last rollout may end in padding. A step on it would move the weights by AdamW's momentum alone.
        return None
    control.begin("train")
    if not size.num_trained:
        return Update(batches, size)
    objectives = ppo.objectives(state, size, micro_batch_size)
    for engine in ppo.models.trained.values():
        if all(engine is not objective.engine for objective in objectives):
            engine.release_gathered()
    metrics, stepped = ppo.updater.update(
        objectives,
        rollout.responses,
        rollout.experience,
        batches,
        num_tokens=size.num_trained,
        step=state.step,
        stopping=control.stopping,
    )
    if ppo.config.ppo.divergence:
        ppo.models.release_reference()
    ppo.hybrid.note_update()
    if stepped and ppo.models.average is not None:
        ppo.models.average.update()
    return Update(batches, size, objectives, metrics, stepped)


def log_update(ppo: PPO, rollout: Collected, update: Update, state: State, control: RunControl) -> None:
    """Count an optimizer step and write its metrics; the first step of a rollout also writes the rollout's metrics.

    Raises:
        DivergedError: too many steps in a row were not finite.
    """
    metrics, first = dict(update.metrics), state.update == 0
    if first:
        state.num_tokens = int(rollout.metrics["num_tokens"])
        state.first_ratio_error = metrics.get("policy/first_ratio_error")
        metrics |= rollout.metrics
    learnt = update.size.num_trained or not ppo.config.ppo.replace_equal_groups
    state.count_step(stepped=update.stepped, is_bad=bool(learnt), engines=ppo.models.trained.values())
    seconds = control.recorder.seconds("train")
    metrics |= {
        "policy/first_ratio_error": math.nan if state.first_ratio_error is None else state.first_ratio_error,
        "time/train_s": seconds,
        "skipped_updates": state.skipped_updates,
    }
    if update.size.num_trained:
        world = ppo.run.world
        metrics |= training_mfu(update.flops, seconds=seconds, world_size=world.size, device=world.device)
    total = seconds + (metrics["time/generate_s"] + metrics["time/score_s"] if first else 0.0)
    control.log(state, metrics, seconds=total, num_tokens=update.num_tokens, num_rows=update.size.num_rows)
    if not update.stepped and learnt:
        note_skipped(ppo, rollout, update, state)
    elif not update.stepped:
        warn_of_equal_rewards(state.step)


def note_skipped(ppo: PPO, rollout: Collected, update: Update, state: State) -> None:
    """Log the prompts of a skipped step. Raises DivergedError after too many skipped steps in a row."""
    rows = rollout.responses.select(row_indices(update.batches, ppo.run.world.device))
    cause = "loss or gradient not finite" if update.size.num_trained else "no finite reward"
    prompts, ids = rows.row_index.tolist(), [rows.sequences]
    note_skipped_step(ppo.run, state, rows=prompts, input_ids=ids, cause=cause)


def adapt_kl(ppo: PPO, rollout: Collected, state: State) -> None:
    """Adapt the KL coefficient to `--kl-target`, if there is one, once the critic's warm-up has ended."""
    settings, observed = ppo.config.ppo, rollout.metrics.get("objective/kl", math.nan)
    # During the warm-up the policy is still the start model, so its KL means nothing.
    waits = settings.critic_warmup_steps > 0 and state.step <= settings.critic_warmup_steps
    if settings.kl_target and math.isfinite(observed) and not waits:
        state.kl_coef = next_kl_coef(
            state.kl_coef,
            observed,
            target=settings.kl_target,
            horizon=settings.kl_horizon,
            num_sequences=int(rollout.experience.response_mask.any(1).sum()),  # sequences whose KL was observed
        )


def evaluate(ppo: PPO, state: State, control: RunControl) -> None:
    """Sample and score held-out prompts, at most once a step, with the same random numbers each time. A collective.

    Raises:
        Interrupted: the run is to stop.
    """
    rows, requested = ppo.prompts.eval, ppo.config.optimizer.per_device_eval_batch_size
    count = evaluated_rows(ppo.run.resolved, len(rows), ppo.run.world.size)
    if state.evaluated == state.step or not count:
        return
    size = control.halving.batch_size(state, "evaluate", requested)
    k = ppo.config.rewards.eval_samples_per_prompt
    sampler = ppo.sampler(rows, state, num_samples=k, batch_size=max(1, size // k))
    with optimizer_states_on_host(ppo.idle_optimizers):
        responses = sampler.sample(list(range(count)), RandomKey(ppo.config.run.seed, "eval"))
        policy = score_policy(ppo, responses, state, control, size, rows_per_step=len(responses.sequences))
        scores = score_others(ppo, responses, policy, state, control)
        judged = score_rewards(ppo, responses, rows, state, control)
        coefficients = ppo.config.ppo.at(state.step)
        rewarded = reward_responses(responses, scores, judged, coefficients, kl_coef=state.kl_coef)
        metrics = rollout_metrics(responses, scores, rewarded, coefficients)
        metrics |= pass_metrics(responses, rewarded, group_size=k)
        rows = list[dict[str, Any]]()
        if ppo.run.world.is_main:
            path, tokenizer = ppo.run.folder / "samples.jsonl", ppo.models.tokenizer
            rows = append_samples(path, step=state.step, responses=responses, rewarded=rewarded, tokenizer=tokenizer)
        metrics = evaluation_metrics(metrics, num_rows=int(responses.valid.sum()))
        control.recorder.write_evaluation(state.step, metrics, row_values(responses, rewarded, num_prompts=count))
        control.recorder.show_samples(state.step, rows)
        ppo.models.release_gathered()
    state.evaluated = state.step


def save(ppo: PPO, state: State) -> None:
    """Write the model folders. A collective."""
    save_models(ppo.run, ppo.models, step=state.step)


# --- helpers of several steps ----------------------------------------------------------------------------------------


def score_policy(
    ppo: PPO, responses: Responses, state: State, control: RunControl, size: int, *, rows_per_step: int = 0
) -> tuple[Tensor, Tensor]:
    """Run the policy over the responses in micro-batches of `size` rows, like those of the first epoch's updates.

    A collective. Raises Interrupted.
    """
    lengths = responses.lengths(packs=ppo.models.pack_rows)
    rows, rows_per_step = range(len(lengths)), rows_per_step or ppo.schedule.rows_per_step
    steps = micro_batches(rows, lengths, rows_per_step=rows_per_step, world=ppo.run.world, size=size)
    batches = [batch for step in steps for batch in step]
    passes = Passes(responses, batches, partial(between_batches, state, control))
    return policy_log_probs(ppo.models, passes, temperature=ppo.config.sampling.temperature)


def score_others(
    ppo: PPO,
    responses: Responses,
    policy: tuple[Tensor, Tensor | None],
    state: State,
    control: RunControl,
    *,
    with_reference: bool = True,
) -> Scores:
    """Run reference and critic over the responses. A collective; raises Interrupted."""
    passes, temperature = scoring_passes(ppo, responses, state, control), ppo.config.sampling.temperature
    return score_responses(ppo.models, passes, policy, temperature=temperature, with_reference=with_reference)


def scoring_passes(ppo: PPO, responses: Responses, state: State, control: RunControl) -> Passes:
    """Return the passes of scoring; on an out-of-memory error the size of their micro-batches is halved."""
    beat("score", state.step)
    lengths = responses.lengths(packs=ppo.models.pack_rows)
    tokens = control.halving.batch_size(state, "score", SCORING_TOKENS, smallest=max(lengths.whole))
    batches = scoring_batches(lengths, world=ppo.run.world, tokens=tokens)
    return Passes(responses, batches, partial(between_batches, state, control))


def between_batches(state: State, control: RunControl) -> None:
    """Send a heartbeat, and raise Interrupted if the run is to stop."""
    beat("score", state.step)
    control.stopping.within_step()
