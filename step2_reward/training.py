"""Stage 2's loop: evaluate, save, accumulate gradients, take an optimizer step, log; from build to finish."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.model_folder import is_saved, save_trained
from pipeline.data.batching import PairBatch
from pipeline.data.loader import PrefetchedSteps, Step, evaluation_batches, sequence_lengths
from pipeline.engine.build import value_model_engine
from pipeline.models.forward.packed_attention import enable_packed_attention
from pipeline.models.forward.shared_prompts import settings_of_pairs
from pipeline.models.reward_model import score_head_fields
from pipeline.preparation.start import start_supervised
from pipeline.run.run import Run
from pipeline.training.run_control import RunControl
from pipeline.training.steps import Counters, step_together
from pipeline.training.supervised import Supervised, assemble, log_best
from step2_reward.config import RewardConfig
from step2_reward.metrics import METRICS, SHOWN
from step2_reward.pair_scores import batch_loss, of_pairs, pair_collator, score_pairs, score_statistics, summary

log = logging.getLogger(__name__)

SCORED_PAIRS = 1_000  # training pairs that the mean and std of scores are measured on if no pair is held out


@dataclass(slots=True)
class State(Counters):
    """The state of stage 2 that changes, besides the engine.

    best_accuracy: accuracy of the model that `--keep-best` has saved; None before.
    best_step: step of that model.
    score_mean: mean of the scores of the pairs that were scored last.
    score_std: standard deviation of these scores.
    score_pairs: number and kind of these pairs in words; "" before.
    """

    best_accuracy: float | None = None
    best_step: int = 0
    score_mean: float = 0.0
    score_std: float = 1.0
    score_pairs: str = ""


Reward = Supervised[RewardConfig, PairBatch]


def train(run: Run, config: RewardConfig) -> None:
    """Train the reward model and save it in `--output-dir` with the mean and std of its scores.

    Raises:
        StoppedRun: the run was asked to stop; its checkpoint is written.
        DivergedError: too many steps in a row were not finite.
    """
    reward = build(run, config)
    state, control = reward.resume(State, METRICS, SHOWN)
    steps = PrefetchedSteps(reward.loader, end=reward.total_steps, device=run.world.device)
    with control.resumable(state, lambda: reward.content(state)), steps:
        while True:
            with control.halving.when_out_of_memory(state):
                is_done = state.step >= reward.total_steps
                # A saved model holds the constants that normalise its scores, so they are measured before each save.
                if is_done or control.evaluation_is_due(state) or control.save_is_due(state):
                    evaluate(reward, state, control)
                if is_done:
                    break
                control.stop_if_requested()
                if control.save_is_due(state):
                    control.save(state, reward.content(state), lambda: save_unless_best_is_saved(reward, state))

                control.begin("train")
                step = steps.step(state.step)
                loss = accumulate_gradients(reward, step, state, control)
                stepped = step_together([reward.engine], reward.rate(state.step), loss=loss)
                shared = [batch.shared.lengths for batch in step.micro_batches]
                reward.end_step(step, state, control, stepped=stepped, loss=loss / step.num_rows, shared=shared)
    control.finish(state, reward.content(state), lambda: save_unless_best_is_saved(reward, state))


def build(run: Run, config: RewardConfig) -> Reward:
    """Create what the loop uses: tokenizer, pairs, model under DeepSpeed, learning rate."""
    source, tokenizer, pairs = start_supervised(run, config)
    collate, lengths = pair_collator(tokenizer.pad_token_id), sequence_lengths(pairs.train).max(1).tolist()
    engine = value_model_engine(run, source, config.model, new_head=True)
    if config.reward_loss != "per_token":  # which reads values at padding
        enable_packed_attention(engine.module.model, device=run.world.device)
    return assemble(run, config, tokenizer=tokenizer, data=pairs, engine=engine, collate=collate, lengths=lengths)


def accumulate_gradients(reward: Reward, step: Step[PairBatch], state: State, control: RunControl) -> float:
    """Sum the gradients of a step; returns the loss, summed over the pairs of all ranks.

    Raises:
        Interrupted: see `Supervised.sum_gradients`.
    """

    per_token = reward.config.reward_loss == "per_token"

    def loss_of(batch: PairBatch) -> torch.Tensor:
        values = reward.engine(batch.input_ids, batch.attention_mask, **settings_of_pairs(batch.shared))
        return batch_loss(values, batch, per_token=per_token, centering_coef=reward.config.centering_coef)

    return reward.sum_gradients(step, state, control, loss_of=loss_of, count=step.num_rows)


def evaluate(reward: Reward, state: State, control: RunControl) -> None:
    """Score the held-out pairs, at most once a step; with `--keep-best`, save the most accurate model so far.

    If no pair is held out, the last training pairs give the constants of a saved model, and no metrics.
    """
    if state.evaluated == state.step:
        return
    per_token, centering_coef = reward.config.reward_loss == "per_token", reward.config.centering_coef
    saves = state.step >= reward.total_steps or control.save_is_due(state)
    with reward.evaluation(state, control) as held_out:
        batches = held_out or (last_training_pairs(reward, state) if saves else [])
        scores = score_pairs(
            reward.engine, batches, reward.run.world.device, per_token=per_token, centering_coef=centering_coef
        )
    state.evaluated = state.step
    if not batches:
        return
    state.score_mean, state.score_std = score_statistics(scores)
    state.score_pairs = f"{len(scores.chosen)} {'held-out' if held_out else 'training'} pairs"
    if not held_out:
        log.warning("no pair is held out: the mean and std of scores come from the last %s", state.score_pairs)
        return
    measured = summary(scores)
    control.recorder.write_evaluation(
        state.step, measured, {name: values.tolist() for name, values in of_pairs(scores).items()}
    )
    accuracy = measured.get("eval_accuracy")
    if not reward.config.keep_best or accuracy is None:
        return
    is_best = state.best_accuracy is None or accuracy > state.best_accuracy
    # A best model counts once it is saved: the next one must beat the model on the disk.
    if is_best and checkpoint.attempt(lambda: save(reward, state)):
        state.best_accuracy, state.best_step = accuracy, state.step


def last_training_pairs(reward: Reward, state: State) -> list[Callable[[], PairBatch]]:
    """Return this rank's batches of the last SCORED_PAIRS pairs to train on."""
    rows, world = reward.loader.rows, reward.run.world
    last = rows.select(range(max(0, len(rows) - SCORED_PAIRS), len(rows)))
    size = state.batch_size("evaluate", reward.config.optimizer.per_device_eval_batch_size)
    collate, ranks = reward.loader.collate, {"world_size": world.size, "rank": world.rank}
    return evaluation_batches(last, collate, batch_size=size, **ranks)


def save_unless_best_is_saved(reward: Reward, state: State) -> None:
    """Write the model folder, unless `--keep-best` has put the best model there."""
    if reward.config.keep_best and state.best_accuracy is not None and is_saved(reward.config.run.output_dir):
        log_best(reward.run, "eval_accuracy", step=state.best_step, value=state.best_accuracy)
    else:
        save(reward, state)


def save(reward: Reward, state: State) -> None:
    """Write the model folder."""
    save_module(reward.run, reward.engine.module, reward.tokenizer, state)


def save_module(run: Run, module: Any, tokenizer: PreTrainedTokenizerBase, state: State) -> None:
    """Write the model folder of a trained module, with the constants that normalise its scores. A collective."""
    is_measured = (state.score_mean, state.score_std) != (0.0, 1.0)  # also if a checkpoint names no pairs
    names = ("score_mean", "score_std", "score_pairs") if is_measured else ()
    fields = score_head_fields(tokenizer, label="reward", **{name: getattr(state, name) for name in names})
    save_trained(run, module, tokenizer, kind="Reward model", step=state.step, score_fields=fields)
