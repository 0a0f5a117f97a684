"""Step 1's loop: build, resume, evaluate, train, save; readable from top to bottom."""

import logging
import math
import time
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
from pipeline.data.batching import SFTBatch, pack_rows, packed_sft_batch
from pipeline.data.loader import PrefetchedSteps, Step, StepLoader, each, evaluation_batches, to_device
from pipeline.engine.build import compute_dtype, placement, training_engine, with_lora
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.start import partitioned_loading, start_deepspeed
from pipeline.errors import InputError
from pipeline.models.causal_lm import CausalLM
from pipeline.models.loading import DTYPES, check_positions, load_causal_lm
from pipeline.models.packed_attention import enable_packed_attention
from pipeline.models.paths import check_language_model
from pipeline.random_numbers import seed_dropout
from pipeline.run.heartbeat import beat
from pipeline.run.run import Run, write_done
from pipeline.training.flops import forward_work, training_mfu
from pipeline.training.inputs import prepare_data, prepare_tokenizer
from pipeline.training.recorder import Recorder
from pipeline.training.steps import (
    Interrupted,
    Stopping,
    check_still_converging,
    note_bad_step,
    rate_factor,
    step_together,
)
from step1_sft.config import SFTConfig
from step1_sft.eval import evaluate, forward_log_probs
from step1_sft.loss import token_sum_loss

log = logging.getLogger(__name__)


@dataclass(slots=True)
class State:
    """Everything of step 1 that evolves, besides the engine."""

    step: int = 0
    num_tokens: int = 0
    skipped_updates: int = 0
    bad_in_a_row: int = 0
    best_eval_loss: float | None = None
    evaluated: int = -1  # the step of the last evaluation


def train(run: Run, config: SFTConfig) -> None:
    """Fine-tune, and leave the model in `--output_dir`.

    Raises:
        StoppedRun: asked to stop; the checkpoint is written.
        DivergedError: too many steps in a row were not finite.
    """
    start_deepspeed(deterministic=config.run.deterministic)
    check_language_model(config.model.model_name_or_path, "--model_name_or_path")
    tokenizer = prepare_tokenizer(config.model.model_name_or_path, config.data.template)
    check_positions(config.model.model_name_or_path, config.data.max_seq_len, "--max_seq_len")
    loader, held_out = make_batches(run, config, tokenizer)
    engine = make_engine(run, config)
    work = forward_work(engine.module.model)
    total_steps = loader.total_steps(config.run.num_train_epochs, config.run.max_steps)
    rate = rate_factor(
        config.optimizer.lr_scheduler_type,
        num_warmup_steps=config.optimizer.num_warmup_steps,
        num_training_steps=total_steps,
        floor=config.optimizer.min_learning_rate_ratio,
    )
    fingerprint = run_fingerprint(config, loader)
    resumed = checkpoint.load(run, config.run.resume, {"model": engine}, fingerprint, force=config.run.force_resume)
    state = State(**resumed.state) if resumed else State()
    begun = state.step if resumed else -1
    recorder = Recorder(run, config.run, start_step=begun, total_steps=total_steps, models={"model": engine})
    stopping = Stopping(run)
    saver = checkpoint.Saver(
        run, fingerprint, keep=config.run.keep_checkpoints, background=config.run.save_in_background
    )

    def measure() -> None:
        if state.evaluated == state.step:
            return
        beat("evaluate", state.step)
        engine.module.eval()
        batches = each(held_out, lambda: beat("evaluate", state.step))
        measured = evaluate(engine, batches, run.world.device)
        engine.module.train()
        recorder.write(state.step, measured)
        state.evaluated = state.step
        keep_if_best(measured.get("eval_loss"))

    def keep_if_best(loss: float | None) -> None:
        if loss is None or not math.isfinite(loss) or not state.step:
            return
        is_best = state.best_eval_loss is None or loss < state.best_eval_loss
        # One that cannot be saved does not count: the next one has to beat what is on the disk.
        if is_best and (not config.keep_best or checkpoint.attempt(save_model_folder)):
            state.best_eval_loss = loss

    def save_model_folder() -> None:
        save(run, config, engine, tokenizer)

    def save_checkpoint() -> None:
        recorder.sync()
        saver.save(checkpoint.Content(state=asdict(state), engines={"model": engine}), step=state.step)

    def save_everything() -> None:
        beat("save", state.step)
        checkpoint.attempt(save_checkpoint)
        if not config.keep_best or state.best_eval_loss is None:
            checkpoint.attempt(save_model_folder)

    if state.step == 0:
        measure()
    with PrefetchedSteps(loader, end=total_steps, device=run.world.device) as steps:
        while state.step < total_steps:
            started = recorder.begin("train")
            step = steps.step(state.step)
            try:
                loss = train_step(run, config, engine, step, rate=rate(state.step), state=state, stopping=stopping)
            except Interrupted:
                break
            seconds = time.monotonic() - started
            flops = work.flops(num_tokens=step.num_tokens, num_rows=step.num_rows, num_head_tokens=step.num_trained)
            recorder.write_training(
                state.step,
                training_mfu(flops, seconds=seconds, world_size=run.world.size, device=run.world.device)
                | {
                    "loss": loss,
                    "grad_norm": engine.last_gradient_norm,
                    "learning_rate": engine.learning_rate,
                    "epoch": loader.epoch_of(state.step),
                    "num_tokens": state.num_tokens,
                    "skipped_updates": state.skipped_updates,
                },
                seconds=seconds,
                num_tokens=step.num_tokens,
                num_rows=step.num_rows,
            )
            checkpoint.attempt(saver.poll)
            if state.step == total_steps:
                break
            if config.run.eval_interval and state.step % config.run.eval_interval == 0:
                measure()
            if stopping.after_step():
                break
            if config.run.save_steps and state.step % config.run.save_steps == 0:
                save_everything()
    if state.step < total_steps:
        beat("save", state.step)
        save_checkpoint()
        saver.finish()
        raise run.stopped(state.step, total_steps)
    measure()
    beat("save", state.step)
    checkpoint.attempt(save_checkpoint)
    checkpoint.attempt(saver.finish)
    if not config.keep_best or state.best_eval_loss is None or not is_saved(config.run.output_dir):
        save_model_folder()
    write_done(run, steps=state.step)


def make_batches(
    run: Run, config: SFTConfig, tokenizer: Any
) -> tuple[StepLoader[SFTBatch], list[Callable[[], SFTBatch]]]:
    """Training steps, and evaluation batches, of this rank."""
    data, optimizer, world = config.data, config.optimizer, run.world
    built = prepare_data(
        "sft",
        data,
        tokenizer=tokenizer,
        max_seq_len=data.max_seq_len,
        train_on_prompt=data.train_on_prompt,
        train_turns=data.train_turns,
        sft_only_data_path=tuple(data.sft_only_data_path),
    )
    pad_id = tokenizer.pad_token_id
    units = (
        pack_rows(built.train["num_tokens"], data.max_seq_len)
        if data.packing
        else [[i] for i in range(len(built.train))]
    )
    loader = StepLoader(
        built.train,
        units,
        lambda packs: packed_sft_batch(packs, pad_id=pad_id),
        micro_batch_size=optimizer.per_device_train_batch_size,
        accumulation=optimizer.gradient_accumulation_steps,
        world_size=world.size,
        rank=world.rank,
        seed=config.run.seed,
    )
    held_out = evaluation_batches(
        built.eval,
        lambda packs: packed_sft_batch(packs, pad_id=pad_id),
        batch_size=optimizer.per_device_eval_batch_size,
        world_size=world.size,
        rank=world.rank,
        max_batches=config.run.eval_iters,
    )
    return loader, held_out


def make_engine(run: Run, config: SFTConfig) -> TrainingEngine:
    """The model under DeepSpeed, with LoRA where asked."""
    ds_json = training_json(run.resolved, config.model, placement(run))
    dtype = DTYPES[compute_dtype(config.deepspeed, run.world.device)]
    with partitioned_loading(ds_json):
        model = load_causal_lm(
            config.model.model_name_or_path, dtype=dtype, attn_implementation=config.model.attn_implementation
        )
    if config.data.packing:
        able = enable_packed_attention(model, device=run.world.device)
        kind = "by the variable-length flash kernel" if able else "under dense masks"
        log.info("packed rows: attention %s", kind)
    model = with_lora(model, config.model, config.deepspeed, task="CAUSAL_LM", seed=config.run.seed)
    return training_engine(
        CausalLM(model), config.model, config.optimizer, ds_json, gather=config.deepspeed.zero3_gather
    )


def train_step(
    run: Run,
    config: SFTConfig,
    engine: TrainingEngine,
    step: Step[SFTBatch],
    *,
    rate: float,
    state: State,
    stopping: Stopping,
) -> float:
    """One optimizer step; returns the loss per trained token over all ranks. Non-finite numbers change nothing.

    Raises:
        Interrupted: the run is to stop; the gradients are dropped and the state is that before the step.
    """
    if step.num_trained == 0:
        raise InputError(f"step {state.step + 1}: no trained token in {step.num_rows} rows")
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.world.device)
    seed_dropout(config.run.seed, step=state.step, rank=run.world.rank)
    for index, cpu_batch in enumerate(step.micro_batches):
        beat("train", state.step)
        stopping.check([engine])
        batch = to_device(cpu_batch, run.world.device)
        log_probs, trained = forward_log_probs(engine, batch, packed=config.data.packing)
        loss = token_sum_loss(log_probs, trained)
        # DeepSpeed averages over ranks; the sum over all ranks is what is divided by the global count.
        engine.backward(loss * (run.world.size / step.num_trained), last=index + 1 == len(step.micro_batches))
        loss_sum += loss.detach()
    # Read before the update is launched: the host then writes its metrics while the device updates the weights.
    total_loss = dist.sum_over_ranks(loss_sum).item()
    stepped = step_together([engine], rate, loss=total_loss)
    state.step += 1
    state.num_tokens += step.num_tokens
    state.skipped_updates += not stepped
    state.bad_in_a_row = 0 if stepped or engine.loss_scale_can_fall else state.bad_in_a_row + 1
    if not stepped:
        ids = [batch.input_ids for batch in step.micro_batches]
        note_bad_step(run, step=state.step, rows=step.rows, input_ids=ids, cause="loss or gradient not finite")
    limit = config.optimizer.max_bad_steps
    check_still_converging(run, state.bad_in_a_row, limit=limit, rate_flag="--learning_rate")
    return total_loss / step.num_trained


def save(run: Run, config: SFTConfig, engine: TrainingEngine, tokenizer: Any) -> None:
    """The model folder."""
    save_model(
        engine.module.model,
        tokenizer,
        Path(config.run.output_dir),
        dtype=saved_dtype(run),
        documents=model_documents(run, base=config.model.model_name_or_path, kind="Supervised fine-tuned model"),
        merged=not config.deepspeed.save_adapter_only,
    )
