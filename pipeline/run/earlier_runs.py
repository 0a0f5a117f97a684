"""Run folders of earlier runs: nothing to do if finished, cleared for a run that starts afresh.

The settings of an earlier run are compared in pipeline/configuration/resume_rules.py. Imports no torch.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from pipeline.configuration.groups import RunConfig
from pipeline.errors import InputError
from pipeline.files import has_config
from pipeline.run.layout import done_file

log = logging.getLogger(__name__)

RUN_FILES = ("checkpoints", "tensorboard", "metrics.jsonl", "metrics.csv", "samples.jsonl", "done.json")


def model_folders(config: Any, stage: str) -> list[Path]:
    """Return the model folders that a stage writes."""
    output = Path(config.run.output_dir)
    if stage != "ppo":
        return [output]
    names = ["actor", "critic", "actor_ema"] if config.ppo.enable_ema else ["actor", "critic"]
    return [output / name for name in names]


def starts_afresh(run: RunConfig) -> bool:
    return run.overwrite or run.resume == "never"


def clear(run_folder: Path) -> None:
    """Delete the files of an earlier run, so that none can be mistaken for this run's."""
    for name in RUN_FILES:
        path = run_folder / name
        if path.is_symlink() and path.is_dir():
            for child in path.iterdir():  # the link may lead to a larger disk: it stays
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def finished_steps(run_folder: Path, config: Any, stage: str) -> int | None:
    """Return the steps of the finished run in these folders; None if the stage has work to do.

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
    if config.run.max_steps > content["steps"] or config.run.resume not in ("auto", "never"):
        return None
    log.info("%s: finished after %d steps; nothing to do (--overwrite starts over)", run_folder, content["steps"])
    return content["steps"]
