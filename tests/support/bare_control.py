"""What a step's gradients take of a run's RunControl, without its metrics, checkpoints and intervals."""

from types import SimpleNamespace
from typing import Any

from pipeline.engine.engine import TrainingEngine
from pipeline.run.run import Run
from pipeline.training.halving import Halving
from pipeline.training.steps import Stopping


def bare_control(run: Run, engine: TrainingEngine) -> Any:
    return SimpleNamespace(stopping=Stopping(run), halving=Halving(run, [engine]))
