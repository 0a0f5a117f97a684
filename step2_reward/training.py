"""Step 2's loop: evaluate, save, accumulate gradients, take an optimizer step, log; from build to finish."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import dist
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import run_fingerprint
from pipeline.checkpoints.model_folder import is_saved, model_documents, save_model, saved_dtype
from pipeline.configuration.ds_config import training_json
from pipeline.data.batching import PairBatch
from pipeline.data.loader import PrefetchedSteps, Step, StepLoader, each, evaluation_batches, pair_lengths, to_device
from pipeline.engine.build import compute_dtype, placement, training_engine, with_lora
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.start import partitioned_loading, start_deepspeed
from pipeline.models.loading import DTYPES, check_positions
from pipeline.models.reward_model import initialise_head, load_reward_model, pad_id_for_pooling
from pipeline.random_numbers import seed_dropout
from pipeline.run.heartbeat import beat
from pipeline.run.run import Run
from pipeline.training.course import Course
from pipeline.training.flops import ForwardWork, forward_work, training_mfu
from pipeline.training.inputs import prepare_data, prepare_tokenizer
from pipeline.training.steps import Counters, Stopping, note_skipped_step, rate_factor, step_together
from step2_reward.config import RewardConfig
from step2_reward.eval import batch_loss, pair_collator, score_pairs, score_statistics, summary

log = logging.getLogger(__name__)


@dataclass(slots=True)
class State(Counters):
    """Everything of step 2 that evolves, besides the engine; the moments are those of the last evaluation's scores."""

    best_accuracy: float | None = None
    score_mean: float = 0.0
    score_std: float = 1.0


@dataclass(frozen=True, slots=True)
class Reward:
    """Everything of step 2 that stays as it is while it trains."""

    run: Run
    config: RewardConfig
    tokenizer: Any
    loader: StepLoader[PairBatch]
    held_out: list[Callable[[], PairBatch]]
    engine: TrainingEngine
    work: ForwardWork
    total_steps: int
    rate: Callable[[int], float]


def train(run: Run, config: RewardConfig) -> None:
    """Train the reward model, and leave it in `--output_dir` with the mean and std of its scores.

    Raises:
        StoppedRun: asked to stop; the checkpoint is written.
        DivergedError: too many steps in a row were not finite.
    """
    reward = build(run, config)
    state, course = resume(reward)
    steps = PrefetchedSteps(reward.loader, end=reward.total_steps, device=run.world.device)
    with course.resumable(state, lambda: content(reward, state)), steps:
        while state.step < reward.total_steps:
            # A model that is saved holds the constants that normalise its scores: they are measured before.
            if course.evaluation_is_due(state) or course.save_is_due(state):
                evaluate(reward, state, course)
            course.stop_if_asked()
            if course.save_is_due(state):
                course.save(state, content(reward, state), lambda: save_unless_best(reward, state))

            course.begin("train")
            step = steps.step(state.step)
            loss = accumulate_gradients(reward, step, state, course.stopping)
            stepped = step_together([reward.engine], reward.rate(state.step), loss=loss)
            state.num_tokens += step.num_tokens
            state.count_step(stepped=stepped, engines=[reward.engine])
            if not stepped:
                note_skipped(reward, step, state)
            log_step(reward, step, state, course, loss=loss / step.num_rows)
        evaluate(reward, state, course)
    course.finish(state, content(reward, state), lambda: save_unless_best(reward, state))


def build(run: Run, config: RewardConfig) -> Reward:
    """Everything that the loop works on: tokenizer, pairs, model under DeepSpeed, learning rate."""
    start_deepspeed(deterministic=config.run.deterministic)
    tokenizer = prepare_tokenizer(config.model.model_name_or_path, config.data.template)
    check_positions(config.model.model_name_or_path, config.data.max_seq_len, "--max_seq_len")
    loader, held_out = make_batches(run, config, tokenizer)
    engine = make_engine(run, config)
    total_steps = loader.total_steps(config.run.num_train_epochs, config.run.max_steps)
    return Reward(
        run,
        config,
        tokenizer,
        loader,
        held_out,
        engine,
        work=forward_work(engine.module.model),
        total_steps=total_steps,
        rate=rate_factor(config.optimizer, total_steps=total_steps),
    )


def resume(reward: Reward) -> tuple[State, Course]:
    """The state of the newest checkpoint, else that of the start; and the course of the run from there."""
    run, settings, engines = reward.run, reward.config.run, {"model": reward.engine}
    fingerprint = run_fingerprint(
        reward.config,
        models={"model": reward.config.model.model_name_or_path},
        data={"training rows": reward.loader.rows},
        sizes={"rows of an optimizer step": reward.loader.rows_per_step},
    )
    resumed = checkpoint.load(run, settings.resume, engines, fingerprint, force=settings.force_resume)
    state = State(**resumed.state) if resumed else State()
    resumed_step = state.step if resumed else None
    return state, Course(run, fingerprint, resumed_step=resumed_step, total_steps=reward.total_steps, engines=engines)


def content(reward: Reward, state: State) -> checkpoint.Content:
    """What a checkpoint holds."""
    return checkpoint.Content(state=asdict(state), engines={"model": reward.engine})


def make_batches(
    run: Run, config: RewardConfig, tokenizer: Any
) -> tuple[StepLoader[PairBatch], list[Callable[[], PairBatch]]]:
    """Training steps, and evaluation batches, of this rank."""
    data, optimizer, world = config.data, config.optimizer, run.world
    built = prepare_data(
        "reward",
        data,
        tokenizer=tokenizer,
        max_seq_len=data.max_seq_len,
        long_pairs=data.long_pairs,
    )
    collate = pair_collator(tokenizer.pad_token_id)
    loader = StepLoader(
        built.train,
        [[row] for row in range(len(built.train))],
        collate,
        micro_batch_size=optimizer.per_device_train_batch_size,
        accumulation=optimizer.gradient_accumulation_steps,
        world_size=world.size,
        rank=world.rank,
        seed=config.run.seed,
        lengths=pair_lengths(built.train),
    )
    held_out = evaluation_batches(
        built.eval,
        collate,
        batch_size=optimizer.per_device_eval_batch_size,
        world_size=world.size,
        rank=world.rank,
        max_batches=config.run.eval_iters,
    )
    return loader, held_out


def make_engine(run: Run, config: RewardConfig) -> TrainingEngine:
    """The base model with a fresh scalar head under DeepSpeed, with LoRA where asked."""
    ds_json = training_json(run.resolved, config.model, placement(run))
    dtype = DTYPES[compute_dtype(config.deepspeed, run.world.device)]
    with partitioned_loading(ds_json):
        model = load_reward_model(
            config.model.model_name_or_path,
            dtype=dtype,
            attn_implementation=config.model.attn_implementation,
            new_head=True,
        )
    initialise_head(model.model.score, seed=config.run.seed)
    model.model = with_lora(model.model, config.model, config.deepspeed, task="SEQ_CLS", seed=config.run.seed)
    return training_engine(model, config.model, config.optimizer, ds_json, gather=config.deepspeed.zero3_gather)


def accumulate_gradients(reward: Reward, step: Step[PairBatch], state: State, stopping: Stopping) -> float:
    """Sum the gradients of a step's micro-batches; returns the loss, summed over the pairs of all ranks.

    Raises:
        Interrupted: the run is to stop; the gradients are dropped and the state is that before the step.
    """
    world, config = reward.run.world, reward.config
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    seed_dropout(config.run.seed, step=state.step, rank=world.rank)
    for index, cpu_batch in enumerate(step.micro_batches):
        beat("train", state.step)
        stopping.within_step([reward.engine])
        batch = to_device(cpu_batch, world.device)
        values = reward.engine(batch.input_ids, batch.attention_mask, batch.position_ids)
        loss = batch_loss(
            values, batch, per_token=config.reward_loss == "per_token", centering_coef=config.centering_coef
        )
        # DeepSpeed averages over ranks; the sum over all ranks is what is divided by the global count.
        reward.engine.backward(loss * (world.size / step.num_rows), last=index + 1 == len(step.micro_batches))
        loss_sum += loss.detach()
    # Read before the update is launched: the host then writes its metrics while the device updates the weights.
    return dist.sum_over_ranks(loss_sum).item()


def log_step(reward: Reward, step: Step[PairBatch], state: State, course: Course, *, loss: float) -> None:
    """Write the metrics of an optimizer step; `loss` is that of a pair."""
    seconds, world = course.recorder.seconds("train"), reward.run.world
    flops = reward.work.flops(num_tokens=step.num_tokens, num_rows=2 * step.num_rows)
    values = training_mfu(flops, seconds=seconds, world_size=world.size, device=world.device) | {
        "loss": loss,
        "grad_norm": reward.engine.last_gradient_norm,
        "learning_rate": reward.engine.learning_rate,
        "epoch": reward.loader.epoch_of(state.step),
        "num_tokens": state.num_tokens,
        "skipped_updates": state.skipped_updates,
    }
    course.log(state, values, seconds=seconds, num_tokens=step.num_tokens, num_rows=step.num_rows)


def note_skipped(reward: Reward, step: Step[PairBatch], state: State) -> None:
    """Write down the pairs of a step that was skipped. Raises DivergedError after too many in a row."""
    ids = [batch.input_ids for batch in step.micro_batches]
    cause = "loss or gradient not finite"
    note_skipped_step(reward.run, state, rows=step.rows, input_ids=ids, cause=cause, rate_flag="--learning_rate")


def evaluate(reward: Reward, state: State, course: Course) -> None:
    """Score the held-out pairs, once a step; with `--keep_best`, save the most accurate model so far."""
    if state.evaluated == state.step:
        return
    beat("evaluate", state.step)
    reward.engine.module.eval()
    scores = score_pairs(
        reward.engine,
        each(reward.held_out, lambda: beat("evaluate", state.step)),
        reward.run.world.device,
        per_token=reward.config.reward_loss == "per_token",
        centering_coef=reward.config.centering_coef,
    )
    reward.engine.module.train()
    measured = summary(scores)
    course.recorder.write(state.step, measured)
    state.evaluated = state.step
    state.score_mean, state.score_std = score_statistics(scores)
    accuracy = measured.get("eval_accuracy")
    if accuracy is None or not state.step:
        return
    is_best = state.best_accuracy is None or accuracy > state.best_accuracy
    # A model that cannot be saved does not count: the next one has to beat what is on the disk.
    if is_best and (not reward.config.keep_best or checkpoint.attempt(lambda: save(reward, state))):
        state.best_accuracy = accuracy


def save_unless_best(reward: Reward, state: State) -> None:
    """Write the model folder, unless `--keep_best` has put the best model there."""
    best_is_saved = state.best_accuracy is not None and is_saved(reward.config.run.output_dir)
    if not (reward.config.keep_best and best_is_saved):
        save(reward, state)


def save(reward: Reward, state: State) -> None:
    """Write the model folder, with the constants that normalise its scores."""
    run, config = reward.run, reward.config
    save_model(
        reward.engine.module.model,
        reward.tokenizer,
        Path(config.run.output_dir),
        dtype=saved_dtype(run),
        documents=model_documents(run, base=config.model.model_name_or_path, kind="Reward model"),
        config_changes={
            "num_labels": 1,
            "pad_token_id": pad_id_for_pooling(reward.tokenizer),
            "score_mean": state.score_mean,
            "score_std": state.score_std,
        },
    )
