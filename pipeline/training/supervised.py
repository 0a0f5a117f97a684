"""The parts that SFT and reward modelling share: what stays as it is during a run, how a run begins, a step's metrics.

Loops, losses, evaluations and model folders are the stages' own.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.fingerprint import run_fingerprint
from pipeline.configuration.groups import Group, ModelConfig, OptimizerConfig
from pipeline.configuration.run_flags import RunConfig
from pipeline.data.cache import StageData
from pipeline.data.loader import Step, StepLoader, evaluation_batches
from pipeline.engine.engine import TrainingEngine
from pipeline.models.flops import TrainingWork, training_mfu, training_work
from pipeline.run.run import Run, take_folder
from pipeline.training.course import Course
from pipeline.training.halving import in_batches_that_fit, take_halved
from pipeline.training.steps import Counters, note_skipped_step, rate_factor


class SupervisedConfig(Protocol):
    """The groups of flags that both stages have."""

    model: ModelConfig
    optimizer: OptimizerConfig
    run: RunConfig


C = TypeVar("C", bound=Group)
B = TypeVar("B")
S = TypeVar("S", bound=Counters)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Supervised(Generic[C, B]):
    """Everything that stays as it is while a stage trains.

    held_out: batch size -> this rank's evaluation batches, as functions that collate. rate: step -> share of the peak
    learning rate.
    """

    run: Run
    config: C
    tokenizer: Any
    loader: StepLoader[B]
    held_out: Callable[[int], list[Callable[[], B]]]
    engine: TrainingEngine
    work: TrainingWork
    total_steps: int
    rate: Callable[[int], float]

    @property
    def shared(self) -> SupervisedConfig:
        """The configuration, of which both stages have the same groups."""
        return self.config  # type: ignore[return-value]

    def resume(self, state_type: type[S]) -> tuple[S, Course]:
        """Return the state of the newest checkpoint, else that of the start; and the course of the run from there."""
        settings, engines = self.shared.run, {"model": self.engine}
        fingerprint = run_fingerprint(
            self.config,
            models={"model": self.shared.model.model_name_or_path},
            data={"training rows": self.loader.rows},
            ranks=self.run.world.size,
        )
        resumed = checkpoint.load(self.run, settings.resumes_from, engines, fingerprint, force=settings.force_resume)
        state = state_type(**resumed.state) if resumed else state_type()
        take_halved(state, self.config)
        resumed_step = state.step if resumed else None
        take_folder(self.run)
        course = Course(self.run, fingerprint, resumed_step=resumed_step, total_steps=self.total_steps, engines=engines)
        return state, course

    def in_micro_batches_that_fit(self, step: Step[B], state: Counters, compute: Callable[[Step[B]], T]) -> T:
        """Return `compute(step)`, again in halved micro-batches after an out-of-memory error."""
        asked = self.shared.optimizer.per_device_train_batch_size
        return in_batches_that_fit(
            self.run, state, "train", asked, lambda size: compute(self.loader.cut(step, size)), engines=[self.engine]
        )

    def in_evaluation_batches_that_fit(self, state: Counters, compute: Callable[[list[Callable[[], B]]], T]) -> T:
        """Return `compute(batches)` of the held-out rows, again in halved batches after an out-of-memory error."""
        asked = self.shared.optimizer.per_device_eval_batch_size
        return in_batches_that_fit(
            self.run, state, "evaluate", asked, lambda size: compute(self.held_out(size)), engines=[self.engine]
        )

    def content(self, state: Counters) -> checkpoint.Content:
        """Return what a checkpoint holds."""
        return checkpoint.Content(state=asdict(state), engines={"model": self.engine})

    def log_step(self, step: Step[B], state: Counters, course: Course, *, loss: float, flops: float) -> None:
        """Write the metrics of an optimizer step that took `flops` matrix operations on all ranks."""
        seconds, world = course.recorder.seconds("train"), self.run.world
        values = training_mfu(flops, seconds=seconds, world_size=world.size, device=world.device) | {
            "loss": loss,
            "grad_norm": self.engine.last_gradient_norm,
            "learning_rate": self.engine.learning_rate,
            "epoch": state.step / self.loader.steps_per_epoch,
            "num_tokens": state.num_tokens,
            "skipped_updates": state.skipped_updates,
        }
        course.log(state, values, seconds=seconds, num_tokens=step.num_tokens, num_rows=step.num_rows)

    def note_skipped(self, step: Step[Any], state: Counters) -> None:
        """Write down the rows of a step that was skipped. Raises DivergedError after too many in a row."""
        ids = [batch.input_ids for batch in step.micro_batches]
        cause = "loss or gradient not finite"
        note_skipped_step(self.run, state, rows=step.rows, input_ids=ids, cause=cause, rate_flag="--learning_rate")


def assemble(
    run: Run,
    config: C,
    *,
    tokenizer: Any,
    data: StageData,
    engine: TrainingEngine,
    collate: Callable[[list[Any]], B],
    units: Sequence[Sequence[int]] | None = None,
    lengths: Sequence[int] | None = None,
) -> Supervised[C, B]:
    """Cut the rows into steps and evaluation batches, and put everything together.

    Args:
        units: rows that belong together (packed into one sequence); None: each row by itself.
        lengths: tokens of each unit's longest sequence; None: all tokens of the unit.
    """
    optimizer, settings, world = config.optimizer, config.run, run.world  # type: ignore[attr-defined]
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
        max_rows = settings.eval_iters * optimizer.per_device_eval_batch_size * world.size
        ranks = {"world_size": world.size, "rank": world.rank}
        return evaluation_batches(data.eval, collate, batch_size=size, max_rows=max_rows, **ranks)

    total_steps = loader.total_steps(settings.num_train_epochs, settings.max_steps)
    work, rate = training_work(engine.module.model), rate_factor(optimizer, total_steps=total_steps)
    return Supervised(run, config, tokenizer, loader, held_out, engine, work, total_steps, rate)
