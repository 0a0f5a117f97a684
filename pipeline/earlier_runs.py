"""What an earlier run left in the output folders: finished, to be continued, to be cleared, or not ours at all."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config import RunConfig
from pipeline.errors import InputError
from pipeline.flags import flat_items
from pipeline.layout import done_file
from pipeline.model_paths import has_config

log = logging.getLogger(__name__)

OURS = "training_config.json"  # every model folder of this project has one
RUN_FILES = ("checkpoints", "tensorboard", "metrics.jsonl", "metrics.csv", "samples.jsonl", "done.json")
# Flags that a resumed run may change: they decide how long it is and what it writes, not what it learns.
CHANGEABLE = frozenset(
    "output_dir run_dir max_steps num_train_epochs save_steps keep_checkpoints resume overwrite save_dtype print_steps "
    "eval_interval eval_iters enable_tensorboard enable_csv enable_wandb process_group_timeout_s debug local_rank "
    "deepspeed data_output_path deepspeed_monitor wall_clock_breakdown per_device_eval_batch_size keep_best "
    "save_adapter_only max_bad_steps".split()
)


def model_folders(config: Any, stage: str) -> list[Path]:
    """The model folders that a stage writes."""
    output = Path(config.run.output_dir)
    if stage != "ppo":
        return [output]
    names = ["actor", "critic", "actor_ema"] if config.ppo.enable_ema else ["actor", "critic"]
    return [output / name for name in names]


def check_replaceable(folder: Path) -> None:
    """Raise InputError for a folder that is not empty and was not written by this project: saving replaces folders."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / OURS).is_file():
        first = min(path.name for path in folder.iterdir())
        raise InputError(
            f"--output_dir: {folder} holds other files ({first}) and no {OURS}; a model folder is replaced as a whole: "
            "name one that is new or empty"
        )


def starts_afresh(run: RunConfig) -> bool:
    return run.overwrite or run.resume == "never"


def clear(run_folder: Path) -> None:
    """Delete what an earlier run left, so that nothing of it can be mistaken for this run's."""
    for name in RUN_FILES:
        path = run_folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finished_steps(run_folder: Path, config: Any, stage: str) -> int | None:
    """Steps of the finished run in these folders if nothing is to be done; None where the stage has to run.

    Raises:
        InputError: the run folder belongs to another stage.
    """
    done = done_file(run_folder)
    if not done.is_file():
        return None
    content = json.loads(done.read_text(encoding="utf-8"))
    if content["stage"] != stage:
        raise InputError(f"{run_folder}: holds a run of {content['stage']}, this is {stage}; name another --run_dir")
    if missing := [folder for folder in model_folders(config, stage) if not has_config(folder)]:
        log.info("%s: its run is finished, but the model is gone; going on from the last checkpoint", missing[0])
        return None
    if config.run.max_steps > content["steps"]:
        return None
    log.info("%s: finished after %d steps; nothing to do (--overwrite starts over)", run_folder, content["steps"])
    return content["steps"]


def settings_of(config: BaseModel) -> dict[str, Any]:
    """The flags that a resumed run must share, as JSON values."""
    return {name: value for name, value in flat_items(config) if name not in CHANGEABLE}


def check_same_settings(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise InputError, a line for each flag, where a checkpoint was written under other settings."""
    names = sorted(saved.keys() | current.keys())
    changed = [name for name in names if saved.get(name) != current.get(name)]
    if changed:
        lines = [f"--{name}: found {current.get(name)!r}, the checkpoint has {saved.get(name)!r}" for name in changed]
        raise InputError("\n".join([*lines, f"{folder}: resume with the same flags, or start over with --overwrite"]))
