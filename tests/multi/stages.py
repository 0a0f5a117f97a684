"""Build and drive the three steps inside a worker: the product's own functions, with the gradients looked at."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad

from pipeline import dist
from pipeline.configuration.flags import parse
from pipeline.data.batching import rows_of_step
from pipeline.engine.engine import TrainingEngine
from pipeline.models.partitions import gathered
from pipeline.run.run import Run, StopRequest
from pipeline.training.steps import step_together
from rlhf.stages import stage_of

Gradients = dict[str, torch.Tensor]


def current_world() -> dist.World:
    return dist.World(dist.rank(), dist.world_size(), torch.device("cpu"))


def make_run(config_class: Any, stage: str, words: Sequence[object]) -> Run:
    """A run in a temporary folder that all ranks share."""
    folder = Path(dist.on_main(lambda: tempfile.mkdtemp(dir=os.getcwd())))
    resolved = parse(config_class, [*map(str, words), "--output-dir", str(folder / "out")], section=stage)
    return Run(current_world(), folder, stage_of(stage), resolved, StopRequest())


def gradients(engine: TrainingEngine) -> Gradients:
    """Whole averaged gradients of all parameters that have one, before clipping."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_grad(parameter)
            if whole is not None:
                found[name] = whole.detach().float().clone()
    return found


def weights(engine: TrainingEngine) -> Gradients:
    """Whole values of all parameters."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with gathered([parameter]):
            found[name] = parameter.detach().float().clone()
    return found


@contextmanager
def watched_steps(module: Any, seen: list[list[Gradients]]) -> Iterator[None]:
    """Before each step that the loop in `module` takes, note the gradients of its engines."""

    def step(engines: Sequence[TrainingEngine], rate_factor: float, *, loss: torch.Tensor) -> bool:
        seen.append([gradients(engine) for engine in engines])
        return step_together(engines, rate_factor, loss=loss)

    module.step_together = step
    try:
        yield
    finally:
        module.step_together = step_together


def training_rows(loader: Any, step: int) -> list[Any]:
    """The rows of an optimizer step over all ranks, from the loader's plan."""
    epoch, within = divmod(step, loader.steps_per_epoch)
    planned = rows_of_step(loader.seed, epoch, within, len(loader.units), loader.rows_per_step)
    return [loader.rows[loader.units[unit][0]] for unit in planned if unit is not None]
