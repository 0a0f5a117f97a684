"""The dry run of a stage prints its flags with their origins and the DeepSpeed JSON of its engines, and starts nothing.

`rlhf train --dry-run`, the supervisor of a launch script and a stage's own `--dry-run` call it. Imports no torch.
"""

import json
import os

from pipeline.configuration.ds_config import EngineDtype, Json, Placement
from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import Resolved
from pipeline.configuration.global_batch import with_ranks
from pipeline.launching.machine import device_kind
from pipeline.launching.preflight import look_before_start
from pipeline.run.layout import run_folder

NOTHING_STARTED = "dry run: nothing was started"


def engine_jsons(resolved: Resolved, section: str, *, ranks: int | None) -> dict[str, Json]:
    """Return the DeepSpeed JSON of each engine of a stage, by the engine's name.

    Args:
        section: the stage: sft, reward or ppo.
        ranks: None where only the launcher will know.

    Raises:
        InputError: settings that contradict each other, one per line.
    """
    resolved, device = with_ranks(resolved, ranks), device_kind()
    config = resolved.config
    asked = config.deepspeed.dtype
    dtype: EngineDtype = ("bf16" if device == "cuda" else "fp32") if asked == "auto" else asked
    placement = Placement(device=device, dtype=dtype, ranks=ranks, run_dir=run_folder(config.run, section))
    jsons: dict[str, Json] = config.engine_jsons(resolved.origins, placement)
    return jsons


def show_stage(resolved: Resolved, section: str, *, ranks: int | None) -> None:
    """Print value and origin of each flag, then the DeepSpeed JSON of each engine. Raises InputError."""
    resolved = with_ranks(resolved, ranks)
    jsons = engine_jsons(resolved, section, ranks=ranks)
    for name, value in flat_items(resolved.config):
        print(f"  {name:<34} {value!s:<30} {resolved.origins[name]}")
    for line in resolved.notes:
        print(f"  note: {line}")
    for name, content in jsons.items():
        print(f"  DeepSpeed JSON of the {name}: {json.dumps(content)}")


def dry_run_stage(resolved: Resolved, section: str, *, ranks: int | None) -> None:
    """Print what a stage would run with, and look at its models, data and disk.

    Raises:
        InputError, EnvironmentFault: what would end the run.
    """
    show_stage(resolved, section, ranks=ranks)
    try:
        for line in look_before_start({section: resolved.config}, dry_run=True):
            print(f"  note: {line}")
    finally:
        print(NOTHING_STARTED)


def dry_run_own_stage(resolved: Resolved, section: str) -> None:
    """Make the dry run of the stage that this process is a rank of. Raises InputError, EnvironmentFault."""
    dry_run_stage(resolved, section, ranks=int(os.environ.get("WORLD_SIZE", "1")))
