"""The parts that SFT and reward modelling share: the state of a run, its start, gradients of a step, and metrics.

Each stage has its own loop, loss, evaluation and model folder.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from pipeline import dist
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import run_fingerprint
from pipeline.configuration.rank_rules import evaluated_rows
from pipeline.configuration.stage import SupervisedConfig
from pipeline.data.cache import StageData
from pipeline.data.counts import Counts
from pipeline.data.loader import Step, StepLoader, evaluation_batches, to_device
from pipeline.engine.engine import TrainingEngine
from pipeline.heartbeat import beat
from pipeline.models.flops import training_mfu
from pipeline.models.forward.packed_attention import uses_packed_attention
from pipeline.models.loading import base_model
from pipeline.random_numbers import seed_dropout
from pipeline.run.evaluations import beside_last
from pipeline.run.run import Run, take_folder
from pipeline.training.halving import take_halved
from pipeline.training.metrics import Metric
from pipeline.training.run_control import RunControl
from pipeline.training.steps import Counters, note_skipped_step, rate_factor

log = logging.getLogger(__name__)
C = TypeVar("C", bound=SupervisedConfig)
B = TypeVar("B")
S = TypeVar("S", bound=Counters)


@dataclass(frozen=True, slots=True)
class Supervised(Generic[C, B]):
    """Everything that stays as it is while a stage trains.

    run: ranks, folder and settings.
    config: configuration of the stage.
    tokenizer: tokenizer of the model.
    loader: data to train on.
    held_out: batch size -> this rank's evaluation batches, as functions that collate.
    counts: rows of the data set by what became of them.
    engine: model with its optimizer.
    total_steps: optimizer steps of the run.
    rate: step -> share of the peak learning rate.
    """

    run: Run
    config: C
    tokenizer: PreTrainedTokenizerBase
    loader: StepLoader[B]
    held_out: Callable[[int], list[Callable[[], B]]]
    counts: Counts
    engine: TrainingEngine
    total_steps: int
    rate: Callable[[int], float]

    def resume(self, state_type: type[S], metrics: Mapping[str, Metric], shown: Sequence[str]) -> tuple[S, RunControl]:
        """Return the state of the newest checkpoint, else that of the start; and the control of the run from there.

        Args:
            metrics: what the stage declares.
            shown: those of the progress line.
        """
        engines, rows = {"model": self.engine}, {"training rows": self.loader.rows}
        fingerprint = run_fingerprint(self.config, rows, ranks=self.run.world.size, total_steps=self.total_steps)
        resumed = checkpoint.load(self.run, engines, fingerprint)
        state = state_type(**resumed.state) if resumed else state_type()
        take_halved(state, self.config)
        take_folder(self.run)
        return state, RunControl(
            self.run,
            fingerprint,
            resumed_step=state.step if resumed else None,
            metrics=metrics,
            engines=engines,
            counts=self.counts,
            shown=shown,
        )

    def sum_gradients(
        self, step: Step[B], state: Counters, control: RunControl, *, loss_of: Callable[[B], torch.Tensor], count: int
    ) -> float:
        """Sum the gradients of a step's micro-batches; returns the loss, summed over all ranks.

        Args:
            loss_of: batch on the device -> its summed loss.
            count: divisor of the summed loss: tokens or pairs of the step on all ranks.

        Raises:
            Interrupted: there is a stop request; the gradients are dropped, and the state is that before the step.
        """
        world, engine, requested = self.run.world, self.engine, self.config.optimizer.per_device_train_batch_size
        batches = self.loader.resized(step, control.halving.batch_size(state, "train", requested)).micro_batches
        loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
        seed_dropout(self.config.run.seed, step=state.step, rank=world.rank)
        for index, cpu_batch in enumerate(batches):
            beat("train", state.step)
            control.stopping.within_step([engine])
            loss = loss_of(to_device(cpu_batch, world.device))
            # DeepSpeed averages over ranks; here the sum over all ranks is divided by the global count.
            engine.backward(loss * (world.size / count), last=index + 1 == len(batches))
            loss_sum += loss.detach()
        # Read the loss before the update: then the host writes metrics while the device updates the weights.
        return dist.sum_over_ranks(loss_sum).item()

    @contextmanager
    def evaluation(self, state: Counters, control: RunControl) -> Iterator[list[Callable[[], B]]]:
        """Yield this rank's held-out batches as functions that collate them; the model is in evaluation mode inside."""
        beat("evaluate", state.step)
        size = control.halving.batch_size(state, "evaluate", self.config.optimizer.per_device_eval_batch_size)
        self.engine.module.eval()
        try:
            yield [partial(collated, make, state.step) for make in self.held_out(size)]
        finally:
            self.engine.module.train()

    def content(self, state: Counters) -> checkpoint.Content:
        """Return the content of a checkpoint."""
        return checkpoint.Content(state=asdict(state), engines={"model": self.engine})

    def end_step(
        self,
        step: Step[Any],
        state: Counters,
        control: RunControl,
        *,
        stepped: bool,
        loss: float,
        shared: Sequence[torch.Tensor] = (),
        **more: float,
    ) -> None:
        """Count an optimizer step, and write its metrics and `more`; if the engine has not stepped, log the rows.

        shared: this rank's lengths, (n,) int64, of first tokens that rows take from others if the model packs rows.

        Raises:
            DivergedError: too many steps in a row were skipped.
        """
        state.num_tokens += step.num_tokens
        state.count_step(stepped=stepped, engines=[self.engine])
        seconds, world = control.recorder.seconds("train"), self.run.world
        packs = uses_packed_attention(base_model(self.engine.module.model).config)
        taken = torch.cat(list(shared)) if shared and packs else torch.zeros(1, dtype=torch.int64)
        flops = self.engine.work.flops(
            num_tokens=step.num_tokens - world.size * int(taken.sum()),  # ranks have nearly the same tokens
            num_squares=step.num_squares - world.size * int(taken.square().sum()),
            num_head_tokens=step.num_trained,
        )
        values = training_mfu(flops, seconds=seconds, world_size=world.size, device=world.device) | {
            "loss": loss,
            "grad_norm": self.engine.last_gradient_norm,
            "learning_rate": self.engine.learning_rate,
            "epoch": state.step / self.loader.steps_per_epoch,
            "num_tokens": state.num_tokens,
            "skipped_updates": state.skipped_updates,
            **more,
        }
        control.log(state, values, seconds=seconds, num_tokens=step.num_tokens, num_rows=step.num_rows)
        if not stepped:
            ids = [batch.input_ids for batch in step.micro_batches]
            note_skipped_step(self.run, state, rows=step.rows, input_ids=ids, cause="loss or gradient not finite")


def collated(make: Callable[[], B], step: int) -> B:
    """Collate an evaluation batch, with a heartbeat."""
    beat("evaluate", step)
    return make()


def assemble(
    run: Run,
    config: C,
    *,
    tokenizer: PreTrainedTokenizerBase,
    data: StageData,
    engine: TrainingEngine,
    collate: Callable[[list[Any]], B],
    units: Sequence[Sequence[int]] | None = None,
    lengths: Sequence[int] | None = None,
) -> Supervised[C, B]:
    """Split the rows into steps and evaluation batches, and return the parts of a run.

    Args:
        units: rows that are packed into one sequence; None: each row by itself.
        lengths: tokens of each unit's longest sequence; None: all tokens of the unit.
    """
    optimizer, settings, world = config.optimizer, config.run, run.world
    loader = StepLoader(
        data.train,
        units or [[row] for row in range(len(data.train))],
        collate,
        micro_batch_size=optimizer.per_device_train_batch_size,
        accumulation=optimizer.gradient_accumulation_steps,
        world_size=world.size,
        rank=world.rank,
        seed=settings.seed,
        lengths=lengths,
    )

    def held_out(size: int) -> list[Callable[[], B]]:
        max_rows = evaluated_rows(run.resolved, len(data.eval), world.size)
        ranks = {"world_size": world.size, "rank": world.rank}
        return evaluation_batches(data.eval, collate, batch_size=size, max_rows=max_rows, **ranks)

    total_steps = loader.total_steps(settings.num_train_epochs, settings.max_steps)
    rate = rate_factor(optimizer, total_steps=total_steps)
    return Supervised(run, config, tokenizer, loader, held_out, data.counts, engine, total_steps, rate)


def log_best(run: Run, name: str, *, step: int, value: float) -> None:
    """Log the step whose model --keep-best saved, and whether the last model differs by more than noise."""
    words = beside_last(run.folder, name, step)
    log.info("--keep-best: the saved model is that of step %d, %s %.4g%s", step, name, value, words)
