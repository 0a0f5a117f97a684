"""Build and drive the three steps inside a worker: the product's own functions, with the gradients looked at."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import load_file
from support.ds_arguments import PARTITIONED_FILE

from pipeline import dist
from pipeline.configuration.flags import parse
from pipeline.data.batching import rows_of_step
from pipeline.engine.engine import TrainingEngine
from pipeline.models.partitions import gathered
from pipeline.run.run import Run, StopRequest
from pipeline.training.steps import step_together
from rlhf.stages import stage_of

Gradients = dict[str, torch.Tensor]
Words = tuple[object, ...]

ROWS_PER_STEP = 8
# Adam's first step is rate * g / (|g| + eps). Gradients summed in another order differ by rounding, and weights by
# at most rate / eps times as much: with this eps by no more than gradients. (With 1e-6 it was 2,000 times as much.)
RATE = 2e-3
PARTIAL_STEP = 2  # 20 rows: the third step of an epoch has 4


def current_world() -> dist.World:
    return dist.World(dist.rank(), dist.world_size(), torch.device("cpu"))


def make_run(config_class: Any, stage: str, words: Sequence[object]) -> Run:
    """A run in a temporary folder that all ranks share."""
    folder = Path(dist.on_main(lambda: tempfile.mkdtemp(dir=os.getcwd())))
    resolved = parse(config_class, [*map(str, words), "--output-dir", str(folder / "out")], section=stage)
    return Run(current_world(), folder, stage_of(stage), resolved, StopRequest())


def supervised_words(inputs: Path, micro: int) -> list[object]:
    """Flags of steps 1 and 2, with `micro` rows a micro-batch and ROWS_PER_STEP rows a step."""
    accumulation = ROWS_PER_STEP // micro // dist.world_size()
    return [
        *("--model-name-or-path", inputs / "base", "--data-path", inputs / "few.jsonl"),
        *("--data-split", "none", "--data-output-path", inputs / "cache"),
        *("--max-seq-len", 96, "--learning-rate", RATE, "--dtype", "fp32", "--adam-eps", RATE),
        *("--deepspeed-config", PARTITIONED_FILE),
        *("--per-device-train-batch-size", micro, "--gradient-accumulation-steps", accumulation),
    ]


def read_back(auto_class: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a folder as transformers reads it; and its weights, its adapter, and what does not fit."""
    model, info = auto_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    adapter = folder / "adapter" / "adapter_model.safetensors"
    return model, {
        "weights": dict(model.state_dict()),
        "adapter": load_file(adapter) if adapter.is_file() else {},
        "problems": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])),
    }


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
