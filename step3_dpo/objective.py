"""The loss of a batch by --method, KTO's reference point z0, and the metrics of a held-out batch."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from pipeline import dist
from pipeline.configuration.rank_rules import evaluated_rows
from pipeline.data.loader import Step, evaluation_batches, to_device
from pipeline.engine.build import compute_dtype
from pipeline.heartbeat import beat
from pipeline.models.loading import DTYPES
from pipeline.run.run import Run
from pipeline.training.run_control import RunControl
from pipeline.training.steps import Counters
from pipeline.training.supervised import Supervised, collated
from step3_dpo.batches import Mismatches, ResponseBatch, response_log_probs, single_responses
from step3_dpo.config import DPOConfig
from step3_dpo.loss import dpo_loss, ipo_loss, kto_loss, kto_point

DPO = Supervised[DPOConfig, ResponseBatch]
# Log-ratios that differ by at most this many roundings are a tie. Measured: passes of SmolLM2-135M in batches of
# different shapes differ by 1.1 roundings.
ROUNDINGS = 2.0


def log_ratios(dpo: DPO, batch: ResponseBatch) -> Tensor:
    """Return the log-ratio of the policy to the reference for each whole response, (N,) fp32 in nats."""
    return response_log_probs(dpo.engine, batch) - batch.reference


def compared(config: DPOConfig, ratios: Tensor, batch: ResponseBatch) -> Tensor:
    """Return the log-ratios (N,) as --method compares them: for IPO by default the mean over a response's tokens."""
    is_mean = config.method == "ipo" and config.ipo_log_ratios == "mean"
    return ratios / batch.num_response_tokens if is_mean else ratios


def loss_of(config: DPOConfig, ratios: Tensor, batch: ResponseBatch, z0: float) -> Tensor:
    """Return the loss of --method, summed over the pairs or responses that count."""
    if config.method == "kto":
        factors = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
        return kto_loss(ratios, batch.labels, batch.weights, z0=z0, beta=config.beta, **factors)
    chosen, rejected = compared(config, ratios, batch).chunk(2)
    weights = batch.weights[: len(chosen)]
    if config.method == "ipo":
        return ipo_loss(chosen, rejected, weights, beta=config.beta)
    return dpo_loss(chosen, rejected, weights, beta=config.beta, label_smoothing=config.label_smoothing)


@torch.no_grad()
def z0_of_step(
    dpo: DPO, mismatches: Mismatches | None, step: Step[ResponseBatch], state: Counters, control: RunControl
) -> float:
    """Return z0 of all rows of an optimizer step under the policy before the step; 0 unless the method is KTO.

    Each rank scores the mismatched rows of its part of the step, in as many forward passes as the other ranks. A
    collective.
    """
    if mismatches is None:
        return 0.0
    rows = mismatches.epochs[step.number // dpo.loader.steps_per_epoch]
    size = control.halving.batch_size(state, "train", dpo.config.optimizer.per_device_train_batch_size)
    numbers: list[int | None] = [*step.rows]
    numbers += [None] * (dpo.loader.rows_per_step // dpo.run.world.size - len(numbers))
    parts = (numbers[start : start + size] for start in range(0, len(numbers), size))

    def mismatched_batch(part: list[int | None]) -> ResponseBatch:
        beat("train", state.step)
        units = [None if row is None else [rows[row]] for row in part]
        return single_responses(units, pad_id=dpo.tokenizer.pad_token_id)

    dpo.engine.module.eval()  # no dropout: its random numbers are keyed by the passes of training
    try:
        return point_of(dpo, map(mismatched_batch, parts))
    finally:
        dpo.engine.module.train()


def z0_of_evaluation(dpo: DPO, mismatches: Mismatches | None, state: Counters, control: RunControl) -> float:
    """Return z0 of the rows of an evaluation over all ranks; 0 unless the method is KTO. A collective."""
    if mismatches is None:
        return 0.0
    world, size = dpo.run.world, dpo.config.optimizer.per_device_eval_batch_size
    batches = evaluation_batches(
        mismatches.eval,
        partial(single_responses, pad_id=dpo.tokenizer.pad_token_id),
        batch_size=control.halving.batch_size(state, "evaluate", size),
        max_rows=evaluated_rows(dpo.run.resolved, len(mismatches.eval), world.size),
        world_size=world.size,
        rank=world.rank,
    )
    return point_of(dpo, (collated(make, state.step) for make in batches))


def point_of(dpo: DPO, batches: Iterable[ResponseBatch]) -> float:
    """Return z0 of the mismatched rows of all ranks. A collective."""
    device = dpo.run.world.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for cpu_batch in batches:
        batch = to_device(cpu_batch, device)
        counted = batch.weights > 0
        sums += torch.stack([torch.where(counted, log_ratios(dpo, batch), 0).double().sum(), counted.sum().double()])
    total, count = dist.sum_over_ranks(sums).tolist()
    return kto_point(total, count)


def eps_of(run: Run) -> float:
    """Return the relative rounding of the dtype in which a run's passes compute."""
    return torch.finfo(DTYPES[compute_dtype(run)]).eps


def rounding(config: DPOConfig, batch: ResponseBatch, eps: float) -> Tensor:
    """Return the rounding error of log-ratios (N,) as --method compares them: a smaller log-ratio has no certain sign.

    Tokens are rounded independently in the passes, whose dtype has this `eps`; their sum is rounded in fp32.
    """
    nats = eps * batch.num_response_tokens.sqrt() + torch.finfo(torch.float32).eps * batch.reference.abs()
    return compared(config, ROUNDINGS * nats, batch)


def measured(config: DPOConfig, ratios: Tensor, batch: ResponseBatch, z0: float, eps: float) -> tuple[Tensor, Tensor]:
    """Return the metrics of a batch as sums (9,) fp64 over the sequences that count, and the values of its rows (N, 4).

    The sums are, in this order:
        loss
        comparisons won, number of comparisons (pairs, or responses with KTO)
        implicit rewards of chosen responses, number of these
        implicit rewards of rejected responses, number of these
        log-ratios, number of response tokens
    A row is a pair, or a response with KTO. Its values are: comparison won; reward (chosen - rejected for a pair,
    negated for a rejected response); label; 1 if the row counts.
    """
    counted, rewards = batch.weights > 0, config.beta * compared(config, ratios, batch)
    errors = rounding(config, batch, eps)
    if config.method == "kto":
        leads, units = torch.where(batch.labels, ratios - z0, z0 - ratios), counted
        margins = torch.where(batch.labels, rewards, -rewards)
    else:
        chosen, rejected = compared(config, ratios, batch).chunk(2)
        leads, units, errors = chosen - rejected, counted[: len(chosen)], torch.stack(errors.chunk(2)).sum(0)
        margins = config.beta * leads
    wins = (leads > errors) + 0.5 * (leads.abs() <= errors)
    sums = [loss_of(config, ratios, batch, z0)]
    of_chosen, of_rejected = counted & batch.labels, counted & ~batch.labels
    for values, which in ((wins, units), (rewards, of_chosen), (rewards, of_rejected), (ratios, counted)):
        sums += [torch.where(which, values, 0).sum(), which.sum()]
    sums[-1] = torch.where(counted, batch.num_response_tokens, 0).sum()
    rows = torch.stack([wins, margins, batch.labels[: len(units)].float(), units.float()], dim=1)
    return torch.stack([value.double() for value in sums]), rows
