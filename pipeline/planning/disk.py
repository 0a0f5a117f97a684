"""Count what the outputs of a stage take on a disk: its models as they are saved, and checkpoints of what it trains."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.planning.measurement import model_size
from pipeline.planning.memory import FP32, MOMENTS
from pipeline.planning.needs import ModelUse


@dataclass(frozen=True, slots=True)
class Outputs:
    """Bytes of a stage's outputs.

    models: of each model folder, in the order of `layout.model_folders`. checkpoint: fp32 weights and moments, and
    moving averages. kept: checkpoints at a time, at most.
    """

    models: Sequence[int]
    checkpoint: int
    kept: int


def outputs(models: Sequence[ModelUse], dtype: str, config: Any) -> Outputs:
    """Count the outputs of a stage that holds `models` and trains in `dtype`.

    Raises:
        InputError, EnvironmentFault: see `model_size`.
    """
    run, whole, averages, checkpoint = config.run, list[int](), list[int](), 0
    for use in models:
        if not use.trained:
            continue
        size, copies = model_size(use, dtype), 2 if use.averaged else 1
        element = size.element if run.save_dtype == "auto" else FP32 if run.save_dtype == "fp32" else FP32 // 2
        only_adapter = config.deepspeed.save_adapter_only and not use.has_values or use.settings.quantization != "none"
        whole.append((size.trained if only_adapter else size.weights) * element)
        averages += whole[-1:] if use.averaged else []
        checkpoint += size.trained * (FP32 * copies + MOMENTS)
    kept = run.keep_checkpoints and 1 + (run.keep_checkpoints if run.save_steps else 0)
    return Outputs([*whole, *averages], checkpoint, kept)
