"""The loop of DPO and IPO: evaluate, save, accumulate gradients, take an optimizer step, log; from build to finish."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline import dist
from pipeline.checkpoints.model_folder import save_trained
from pipeline.configuration.global_batch import evaluated_rows
from pipeline.data.batching import PairBatch, num_steps, pair_batch, rows_of_step, total_steps
from pipeline.data.loader import PrefetchedSteps, Step, pair_lengths, to_device
from pipeline.engine.build import language_model_engine, start_engines
from pipeline.engine.start_models import check_start_models
from pipeline.models.source import prepare_tokenizer
from pipeline.planning.room import make_room
from pipeline.run.run import Run
from pipeline.training.course import Course
from pipeline.training.inputs import prepare_stage
from pipeline.training.steps import Counters, step_together
from pipeline.training.supervised import Supervised, assemble
from step3_dpo.config import DPOConfig
from step3_dpo.loss import dpo_loss, ipo_loss
from step3_dpo.metrics import METRICS, SHOWN
from step3_dpo.reference import COLUMNS, response_log_probs, with_reference


@dataclass(frozen=True, slots=True)
class ComparisonBatch(PairBatch):
    """A batch of B preference pairs with the log-probabilities of their responses under the reference.

    reference: (2B,) fp32, in nats, each summed over the tokens of a response; all chosen first.
    """

    reference: Tensor


DPO = Supervised[DPOConfig, ComparisonBatch]


def train(run: Run, config: DPOConfig) -> None:
    """Train the policy, and leave it in `--output_dir`.

    Raises:
        StoppedRun: asked to stop; the checkpoint is written.
        DivergedError: too many steps in a row were not finite.
    """
    dpo = build(run, config)
    state, course = dpo.resume(Counters, METRICS, SHOWN)
    steps = PrefetchedSteps(dpo.loader, end=dpo.total_steps, device=run.world.device)
    with course.resumable(state, lambda: dpo.content(state)), steps:
        while True:
            with course.halving.when_out_of_memory(state):
                is_done = state.step >= dpo.total_steps
                if is_done or course.evaluation_is_due(state):
                    evaluate(dpo, state, course)
                if is_done:
                    break
                course.stop_if_asked()
                if course.save_is_due(state):
                    course.save(state, dpo.content(state), lambda: save(dpo, state))

                course.begin("train")
                step = steps.step(state.step)
                loss = accumulate_gradients(dpo, step, state, course)
                stepped = step_together([dpo.engine], dpo.rate(state.step), loss=loss)
                state.num_tokens += step.num_tokens
                state.count_step(stepped=stepped, engines=[dpo.engine])
                flops = dpo.work.flops(
                    num_tokens=step.num_tokens, num_squares=step.num_squares, num_head_tokens=step.num_trained
                )
                dpo.log_step(step, state, course, loss=loss / step.num_rows, flops=flops)
                if not stepped:
                    dpo.note_skipped(step, state)
    course.finish(state, dpo.content(state), lambda: save(dpo, state))


def build(run: Run, config: DPOConfig) -> DPO:
    """Make everything that the loop works on: tokenizer, pairs with their reference, model under DeepSpeed."""
    start_engines(run)
    (source,) = check_start_models(run.stage.start_models(config, {}))
    make_room(run)
    tokenizer = prepare_tokenizer(source, config.data.template, config.data.chat_template_kwargs)
    (pairs,) = prepare_stage(run, config, tokenizer)
    read = {
        "train": (pairs.train, rows_read(run, config, len(pairs.train))),
        "eval": (pairs.eval, range(evaluated_rows(run.resolved, len(pairs.eval), run.world.size))),
    }
    collate = partial(compared, pad_id=tokenizer.pad_token_id)
    found = with_reference(run, config, source, collate, read)
    data = replace(pairs, train=found["train"], eval=found["eval"])
    engine = language_model_engine(run, source, config.model)
    lengths = pair_lengths(pairs.train)
    return assemble(run, config, tokenizer=tokenizer, data=data, engine=engine, collate=collate, lengths=lengths)


def rows_read(run: Run, config: DPOConfig, num_rows: int) -> Iterable[int]:
    """Return the rows that the steps of a run train on: all, or those of a run that ends before."""
    optimizer, settings = config.optimizer, config.run
    rows = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * run.world.size
    steps = total_steps(num_rows, rows, epochs=settings.num_train_epochs, max_steps=settings.max_steps)
    if steps >= num_steps(num_rows, rows):
        return range(num_rows)
    chosen = (row for step in range(steps) for row in rows_of_step(settings.seed, 0, step, num_rows, rows))
    return [row for row in chosen if row is not None]


def compared(units: list[Any], *, pad_id: int) -> ComparisonBatch:
    """Collate units of one pair each; None is a pair that only fills the batch."""
    rows = [None if unit is None else unit[0] for unit in units]
    pairs = pair_batch(rows, pad_id=pad_id)
    reference = [0.0 if row is None else row.get(name, 0.0) for name in COLUMNS for row in rows]
    values = {field.name: getattr(pairs, field.name) for field in fields(pairs)}
    return ComparisonBatch(**values, reference=torch.tensor(reference, dtype=torch.float32))


def log_ratios(dpo: DPO, batch: ComparisonBatch) -> tuple[Tensor, Tensor]:
    """Return the log-ratios to the reference of chosen and rejected responses, (B,) fp32 each."""
    ratios = response_log_probs(dpo.engine, batch) - batch.reference
    if dpo.config.method == "ipo" and dpo.config.ipo_log_ratios == "mean":
        ratios = ratios / (batch.lengths - batch.prompt_lengths.repeat(2)).clamp(min=1)
    chosen, rejected = ratios.chunk(2)
    return chosen, rejected


def loss_of(config: DPOConfig, chosen: Tensor, rejected: Tensor, weights: Tensor) -> Tensor:
    """Return the loss of --method, summed over the pairs that count."""
    if config.method == "ipo":
        return ipo_loss(chosen, rejected, weights, beta=config.beta)
    return dpo_loss(chosen, rejected, weights, beta=config.beta, label_smoothing=config.label_smoothing)


def accumulate_gradients(dpo: DPO, step: Step[ComparisonBatch], state: Counters, course: Course) -> float:
    """Sum the gradients of a step; returns the loss, summed over the pairs of all ranks.

    Raises:
        Interrupted: see `Supervised.sum_gradients`.
    """

    def loss(batch: ComparisonBatch) -> Tensor:
        return loss_of(dpo.config, *log_ratios(dpo, batch), batch.weights)

    return dpo.sum_gradients(step, state, course, loss_of=loss, count=step.num_rows)


@torch.no_grad()
def evaluate(dpo: DPO, state: Counters, course: Course) -> None:
    """Measure the held-out pairs, once a step. A collective."""
    if state.evaluated == state.step:
        return
    device, beta = dpo.run.world.device, dpo.config.beta
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    with dpo.evaluation(state, course) as batches:
        for make in batches:
            batch = to_device(make(), device)
            chosen, rejected = log_ratios(dpo, batch)
            loss, counted = loss_of(dpo.config, chosen, rejected, batch.weights), batch.weights > 0
            wins = (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
            columns = [torch.where(counted, values, 0).sum() for values in (wins, beta * chosen, beta * rejected)]
            sums += torch.stack([loss, *columns, counted.sum()]).double()
    state.evaluated = state.step
    loss_sum, wins_sum, chosen_sum, rejected_sum, count = dist.sum_over_ranks(sums).tolist()
    if not count:
        return
    measured = {
        "eval_loss": loss_sum / count,
        "eval_accuracy": wins_sum / count,
        "eval_margin": (chosen_sum - rejected_sum) / count,
        "eval_mean_chosen_reward": chosen_sum / count,
        "eval_mean_rejected_reward": rejected_sum / count,
        "eval_rows": count,
    }
    course.recorder.write(state.step, measured)


def save(dpo: DPO, state: Counters) -> None:
    """Write the model folder."""
    save_module(dpo.run, dpo.engine.module, dpo.tokenizer, step=state.step)


def save_module(run: Run, module: Any, tokenizer: PreTrainedTokenizerBase, *, step: int) -> None:
    """Write the model folder of a trained module. A collective."""
    config: DPOConfig = run.resolved.config
    folder, kind = Path(config.run.output_dir), f"Policy trained by {config.method.upper()}"
    save_trained(run, module, tokenizer, folder, model=config.model, kind=kind, step=step)
