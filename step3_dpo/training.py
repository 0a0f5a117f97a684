"""The loop of DPO, IPO and KTO: evaluate, save, accumulate gradients, step, log; from build to finish."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pipeline import dist
from pipeline.checkpoints.model_folder import save_trained
from pipeline.configuration.rank_rules import evaluated_rows
from pipeline.data.batching import epoch_order, num_steps, total_steps
from pipeline.data.cache import StageData
from pipeline.data.loader import PrefetchedSteps, Step, sequence_lengths, to_device
from pipeline.engine.build import language_model_engine
from pipeline.models.forward.packed_attention import enable_packed_attention
from pipeline.preparation.start import start_supervised
from pipeline.run.run import Run
from pipeline.training.run_control import RunControl
from pipeline.training.steps import Counters, step_together
from pipeline.training.supervised import assemble
from step3_dpo.batches import Mismatches, ResponseBatch, pair_responses, single_responses
from step3_dpo.config import DPOConfig
from step3_dpo.metrics import METRICS, SHOWN
from step3_dpo.objective import DPO, eps_of, log_ratios, loss_of, measured, z0_of_evaluation, z0_of_step
from step3_dpo.reference import RowSet, key_of, reference_log_probs, with_columns


def train(run: Run, config: DPOConfig) -> None:
    """Train the policy and save it in `--output-dir`.

    Raises:
        StoppedRun: the run was asked to stop; its checkpoint is written.
        DivergedError: too many steps in a row were not finite.
    """
    dpo, mismatches = build(run, config)
    state, control = dpo.resume(Counters, METRICS, SHOWN)
    steps = PrefetchedSteps(dpo.loader, end=dpo.total_steps, device=run.world.device)
    with control.resumable(state, lambda: dpo.content(state)), steps:
        while True:
            with control.halving.when_out_of_memory(state):
                is_done = state.step >= dpo.total_steps
                if is_done or control.evaluation_is_due(state):
                    evaluate(dpo, mismatches, state, control)
                if is_done:
                    break
                control.stop_if_requested()
                if control.save_is_due(state):
                    control.save(state, dpo.content(state), lambda: save(dpo, state))

                control.begin("train")
                step = steps.step(state.step)
                z0 = z0_of_step(dpo, mismatches, step, state, control)
                loss = accumulate_gradients(dpo, step, state, control, z0)
                stepped = step_together([dpo.engine], dpo.rate(state.step), loss=loss)
                shown = {} if mismatches is None else {"z0": z0}
                taken = [batch.shared.lengths for batch in step.micro_batches if batch.shared is not None]
                dpo.end_step(step, state, control, stepped=stepped, loss=loss / step.num_rows, shared=taken, **shown)
    control.finish(state, dpo.content(state), lambda: save(dpo, state))


def build(run: Run, config: DPOConfig) -> tuple[DPO, Mismatches | None]:
    """Create what the loop uses: tokenizer, rows with the reference's log-probabilities, model under DeepSpeed."""
    source, tokenizer, rows = start_supervised(run, config)
    mismatches, facts = None, dict[str, int]()
    if config.method == "kto":
        num_epochs = len(rows_of_epochs(run, config, len(rows.train)))
        facts = {"seed": config.run.seed, "rows_per_step": rows_per_step(run, config), "limit": config.data.max_seq_len}
        mismatches = Mismatches.of(rows.train, rows.eval, num_epochs=num_epochs, **facts)
    collate = partial(pair_responses if mismatches is None else single_responses, pad_id=tokenizer.pad_token_id)
    key = key_of(run, config, {"train": rows.train, "eval": rows.eval}, **facts)
    tables = reference_log_probs(run, config, source, collate, rows_to_score(run, config, rows, mismatches), key=key)
    engine = language_model_engine(run, source, config.model)
    enable_packed_attention(engine.module.model, device=run.world.device)
    train, held_out = (with_columns(part, tables[name]) for name, part in (("train", rows.train), ("eval", rows.eval)))
    dpo = assemble(
        run,
        config,
        tokenizer=tokenizer,
        data=replace(rows, train=train, eval=held_out),
        engine=engine,
        collate=collate,
        lengths=sequence_lengths(rows.train).max(1).tolist(),
    )
    return dpo, mismatches and mismatches.with_reference(tables)


def rows_to_score(run: Run, config: DPOConfig, rows: StageData, mismatches: Mismatches | None) -> dict[str, RowSet]:
    """Return the rows whose responses the reference scores, by their names in its file."""
    held_out = list(range(evaluated_rows(run.resolved, len(rows.eval), run.world.size)))
    read = rows_of_epochs(run, config, len(rows.train))
    row_sets = {
        "train": RowSet(rows.train, sequence_lengths(rows.train), read[0]),  # all rows, unless the run ends earlier
        "eval": RowSet(rows.eval, sequence_lengths(rows.eval), held_out),
    }
    parts = mismatches.parts() if mismatches else {}
    for (name, part), numbers in zip(parts.items(), [held_out, *read][: len(parts)], strict=True):
        row_sets[name] = RowSet(part, part.lengths, numbers)
    return row_sets


def rows_per_step(run: Run, config: DPOConfig) -> int:
    """Return the rows of an optimizer step over all ranks."""
    return config.optimizer.per_device_train_batch_size * config.optimizer.gradient_accumulation_steps * run.world.size


def rows_of_epochs(run: Run, config: DPOConfig, num_rows: int) -> list[list[int]]:
    """Return the rows that a run trains on in each epoch, in the order of its steps."""
    rows, settings = rows_per_step(run, config), config.run
    steps = total_steps(num_rows, rows, epochs=settings.num_train_epochs, max_steps=settings.max_steps)
    starts = range(0, steps, num_steps(num_rows, rows))
    orders = (epoch_order(settings.seed, epoch, num_rows) for epoch in range(len(starts)))
    return [order[: (steps - start) * rows].tolist() for order, start in zip(orders, starts, strict=True)]


def accumulate_gradients(dpo: DPO, step: Step[ResponseBatch], state: Counters, control: RunControl, z0: float) -> float:
    """Sum the gradients of a step; returns the loss, summed over the pairs or responses of all ranks.

    Raises:
        Interrupted: see `Supervised.sum_gradients`.
    """

    def loss(batch: ResponseBatch) -> Tensor:
        return loss_of(dpo.config, log_ratios(dpo, batch), batch, z0)

    return dpo.sum_gradients(step, state, control, loss_of=loss, count=step.num_rows)


@torch.no_grad()
def evaluate(dpo: DPO, mismatches: Mismatches | None, state: Counters, control: RunControl) -> None:
    """Evaluate on the held-out rows, at most once a step. A collective."""
    if state.evaluated == state.step:
        return
    device = dpo.run.world.device
    sums, parts = torch.zeros(9, dtype=torch.float64, device=device), list[Tensor]()
    eps = eps_of(dpo.run)
    with dpo.evaluation(state, control) as batches:
        z0 = z0_of_evaluation(dpo, mismatches, state, control)
        for make in batches:
            batch = to_device(make(), device)
            batch_sums, rows = measured(dpo.config, log_ratios(dpo, batch), batch, z0, eps)
            sums += batch_sums
            parts.append(rows)
    state.evaluated = state.step
    loss, wins, num_rows, chosen, num_chosen, rejected, num_rejected, kl, tokens = dist.sum_over_ranks(sums).tolist()
    if not num_rows:
        return
    values = {"loss": loss / num_rows, "accuracy": wins / num_rows, "kl": kl / tokens, "rows": num_rows}
    if num_chosen:
        values["mean_chosen_reward"] = chosen / num_chosen
    if num_rejected:
        values["mean_rejected_reward"] = rejected / num_rejected
    if num_chosen and num_rejected:
        values["margin"] = values["mean_chosen_reward"] - values["mean_rejected_reward"]
    if mismatches is not None:
        values["z0"] = z0
    won, margins, is_chosen, _ = dist.in_row_order(parts).unbind(1)
    # KTO's margin is a difference of two means; with these weights it is one mean over all responses.
    margins *= torch.where(is_chosen > 0, num_rows / max(num_chosen, 1), num_rows / max(num_rejected, 1))
    of_rows = {"eval_accuracy": won.tolist(), "eval_margin": margins.tolist()}
    control.recorder.write_evaluation(state.step, {f"eval_{name}": value for name, value in values.items()}, of_rows)


def save(dpo: DPO, state: Counters) -> None:
    """Write the model folder."""
    save_trained(dpo.run, dpo.engine.module, dpo.tokenizer, kind=dpo.config.card, step=state.step)
