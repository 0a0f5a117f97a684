"""Stage 1's loop: evaluate, save, accumulate gradients, take an optimizer step, log; from build to finish."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.model_folder import is_saved, save_trained
from pipeline.data.batching import Seq2SeqBatch, SFTBatch, pack_rows, packed_sft_batch, seq2seq_batch
from pipeline.data.cache import StageData
from pipeline.data.loader import PrefetchedSteps, Step
from pipeline.engine.build import language_model_engine
from pipeline.errors import InputError
from pipeline.models.forward.packed_attention import enable_packed_attention
from pipeline.preparation.start import start_supervised
from pipeline.run.run import Run
from pipeline.training.run_control import RunControl
from pipeline.training.steps import Counters, step_together
from pipeline.training.supervised import Supervised, assemble, log_best
from step1_sft.config import CARD, SFTConfig
from step1_sft.eval import evaluate, evaluate_answers, forward_log_probs
from step1_sft.loss import token_sum_loss
from step1_sft.metrics import METRICS, SHOWN

log = logging.getLogger(__name__)


@dataclass(slots=True)
class State(Counters):
    """The state of stage 1 that changes, besides the engine.

    best_eval_loss: eval_loss of the model that `--keep-best` has saved; None before.
    best_step: step of that model.
    """

    best_eval_loss: float | None = None
    best_step: int = 0


SFT = Supervised[SFTConfig, SFTBatch | Seq2SeqBatch]


def train(run: Run, config: SFTConfig) -> None:
    """Fine-tune the model and save it in `--output-dir`.

    Raises:
        StoppedRun: the run was asked to stop; its checkpoint is written.
        DivergedError: too many steps in a row were not finite.
    """
    sft = build(run, config)
    state, control = sft.resume(State, METRICS, SHOWN)
    steps = PrefetchedSteps(sft.loader, end=sft.total_steps, device=run.world.device)
    with control.resumable(state, lambda: sft.content(state)), steps:
        while True:
            with control.halving.when_out_of_memory(state):
                is_done = state.step >= sft.total_steps
                if is_done or control.evaluation_is_due(state):
                    evaluate_held_out(sft, state, control)
                if is_done:
                    break
                control.stop_if_requested()
                if control.save_is_due(state):
                    control.save(state, sft.content(state), lambda: save_unless_best_is_saved(sft, state))

                control.begin("train")
                step = steps.step(state.step)
                loss = accumulate_gradients(sft, step, state, control)
                stepped = step_together([sft.engine], sft.rate(state.step), loss=loss)
                sft.end_step(step, state, control, stepped=stepped, loss=loss / step.num_trained)
    control.finish(state, sft.content(state), lambda: save_unless_best_is_saved(sft, state))


def build(run: Run, config: SFTConfig) -> SFT:
    """Create what the loop uses: tokenizer, rows, model under DeepSpeed, learning rate."""
    source, tokenizer, rows = start_supervised(run, config)
    data, seq2seq = config.data, source.is_encoder_decoder
    if seq2seq:
        check_encoder_inputs(rows)
    collate = partial(seq2seq_batch if seq2seq else packed_sft_batch, pad_id=tokenizer.pad_token_id)
    units = pack_rows(rows.train["num_tokens"], data.max_seq_len) if data.packing else None
    engine = language_model_engine(run, source, config.model)
    if data.packing:
        able = enable_packed_attention(engine.module.model, device=run.world.device)
        kind = "uses the variable-length flash kernel" if able else "uses dense masks"
        log.info("packed rows: attention %s", kind)
    return assemble(run, config, tokenizer=tokenizer, data=rows, engine=engine, collate=collate, units=units)


def check_encoder_inputs(data: StageData) -> None:
    """Raise InputError for a row without input for the encoder, such as plain text, whose tokens are all trained."""
    for split in (data.train, data.eval):
        lengths = np.asarray(split["num_tokens"][:]) - np.asarray(split["num_trained"][:])
        if (lengths < 2).any():
            raise InputError(
                "--data-path: got plain text (column text); an encoder-decoder model needs a prompt for its encoder "
                "and a response: columns prompt and response"
            )


def accumulate_gradients(sft: SFT, step: Step[Any], state: State, control: RunControl) -> float:
    """Sum the gradients of a step; returns the loss, summed over the trained tokens of all ranks.

    Raises:
        InputError: no token of the step is trained.
        Interrupted: a stop of the run was requested; the gradients are dropped.
    """
    if step.num_trained == 0:
        raise InputError(f"step {state.step + 1}: none of its {step.num_rows} rows has a trained token")

    def loss_of(batch: SFTBatch | Seq2SeqBatch) -> torch.Tensor:
        return token_sum_loss(*forward_log_probs(sft.engine, batch, packed=sft.config.data.packing))

    return sft.sum_gradients(step, state, control, loss_of=loss_of, count=step.num_trained)


def evaluate_held_out(sft: SFT, state: State, control: RunControl) -> None:
    """Evaluate on the held-out rows, at most once a step; with `--keep-best`, save the best model so far."""
    if state.evaluated == state.step:
        return
    with sft.evaluation(state, control) as batches:
        measured, rows = measure(sft, batches)
    control.recorder.write_evaluation(state.step, measured, rows)
    state.evaluated = state.step
    loss = measured.get("eval_loss")
    if not sft.config.keep_best or loss is None or not math.isfinite(loss):
        return
    is_best = state.best_eval_loss is None or loss < state.best_eval_loss
    # A best model counts once it is saved: the next one must beat the model on the disk.
    if is_best and checkpoint.attempt(lambda: save(sft, state)):
        state.best_eval_loss, state.best_step = loss, state.step


def measure(sft: SFT, batches: list[Callable[[], Any]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the metrics of the evaluation batches, and the values of each row.

    With `--eval-metric` bleu or rouge, the metrics include the score of generated answers.
    """
    measured, rows = evaluate(sft.engine, batches, sft.run.world.device)
    if sft.config.eval_metric != "loss":
        metric, longest = sft.config.eval_metric, sft.config.eval_max_new_tokens
        measured |= evaluate_answers(sft.engine, sft.tokenizer, batches, metric=metric, max_new_tokens=longest)
    return measured, rows


def save_unless_best_is_saved(sft: SFT, state: State) -> None:
    """Write the model folder, unless `--keep-best` has put the best model there."""
    if sft.config.keep_best and state.best_eval_loss is not None and is_saved(sft.config.run.output_dir):
        log_best(sft.run, "eval_loss", step=state.best_step, value=state.best_eval_loss)
    else:
        save(sft, state)


def save(sft: SFT, state: State) -> None:
    """Write the model folder."""
    save_trained(sft.run, sft.engine.module, sft.tokenizer, kind=CARD, step=state.step)
