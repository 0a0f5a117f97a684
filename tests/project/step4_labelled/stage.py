"""Stage 4 as an object."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from pipeline.configuration.stage import Stage, Start
from step4_labelled.config import LabelledConfig

if TYPE_CHECKING:
    from pipeline.checkpoints.offline import OfflineCheckpoint
    from pipeline.engine.start_models import StartModel
    from pipeline.planning.needs import StageNeeds
    from pipeline.run.run import Run


def loop() -> "Callable[[Run, LabelledConfig], None]":
    """Import and return the loop of the stage."""
    from step4_labelled.training import train

    return train


def start_models(config: LabelledConfig, base_of_output: Mapping[str, str]) -> "list[StartModel]":
    """Return the start model with its checks."""
    from pipeline.engine.start_models import StartModel, check_settings
    from pipeline.models.paths import check_language_model
    from pipeline.models.source import ModelSource, check_positions

    path = config.model.model_name_or_path
    source = ModelSource(base_of_output.get(path, path))
    fits = [
        partial(check_positions, source, config.data.max_seq_len, "--max-seq-len"),
        partial(check_settings, source, config.model),
    ]
    return [StartModel("--model-name-or-path", path, source, check_language_model, fits=fits)]


def needs(config: LabelledConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> "StageNeeds":
    """Return what a rank needs, for the planner."""
    from pipeline.data.batching import total_steps
    from pipeline.planning.needs import ModelUse, Pass, StageNeeds, step_arithmetic

    path, length, optimizer = config.model.model_name_or_path, config.data.max_seq_len, config.optimizer
    rows, times, run = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps, config.run
    passes = [Pass("model", rows, length, rows * length, trains=True, times=times)]
    return StageNeeds(
        models=[ModelUse("model", base_of_output.get(path, path), config.model)],
        phases={"train": passes},
        batch=[step_arithmetic(optimizer, ranks, f"rows of {length} tokens")],
        num_steps=lambda given: total_steps(
            given, rows * times * ranks, epochs=run.num_train_epochs, max_steps=run.max_steps
        ),
    )


def export(checkpoint: "OfflineCheckpoint") -> None:
    """Write the model folder of a checkpoint."""
    from step4_labelled.training import export

    export(checkpoint)


STAGE = Stage(
    number=4,
    methods={"labelled": "answers with a label"},
    section="labelled",
    title="answers with a label",
    package="step4_labelled",
    config=LabelledConfig,
    starts=lambda _: {"": Start("actor", "sft")},
    loop=loop,
    start_models=start_models,
    needs=needs,
    export=export,
)
