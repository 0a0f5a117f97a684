"""Check whether a run is finished already, and clear the folder of one that starts afresh. It imports no torch.

`done.json` holds the settings, inputs and length of the run that wrote it, so that no other run is taken for it. It is
compared as checkpoints are: in `pipeline/configuration/resume_rules.py`.
"""

import logging
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.origins import DEFAULT, Kind, Origin
from pipeline.configuration.rank_rules import MICRO, STEPS, with_micro_batch
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import check_resumed, differences, record_of, values_by_rule
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.data.sources import fingerprint, is_local, parse_path
from pipeline.errors import InputError
from pipeline.files import digest, has_config, model_fingerprint, read_object, refused_by_disk, write_json
from pipeline.run.evaluations import run_settings
from pipeline.run.layout import candidates, done_file

log = logging.getLogger(__name__)

DONE = {"steps": int, "max_steps": int, "settings": dict, "inputs": dict, "sizes": dict}  # types of a complete record
FIRST_WITH_KINDS = "d0a9914c"  # the first commit whose config.json has the kind of each origin
RUN_FILES = (
    "checkpoints", "tensorboard", "metrics.jsonl", "metrics.csv", "samples.jsonl", "row_values.jsonl", "rows.json",
    "done.json", "meaning.json", "plan.json", "report.html", "report.md", "curves",
)  # fmt: skip


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


def check_resume(resume: str) -> None:
    """Raise InputError for the value of --resume that names a folder which does not exist."""
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise InputError(f"--resume {resume}: no such folder; expected auto, never, or a checkpoint folder")


def checkpoint_state(run_folder: Path, resume: str) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that `resume` (auto, never or a folder) resumes from, and its state.json; {} for none.

    One whose state.json is not as it was written is passed over, as it is when a run resumes.
    """
    named = {"auto": candidates(run_folder / "checkpoints"), "never": []}.get(resume, [Path(resume)])
    for folder in named:
        with suppress(OSError, KeyError, TypeError):
            entry, file = read_object(folder / "manifest.json")["files"]["state.json"], folder / "state.json"
            if file.is_file() and entry["sha256"] == digest(file):
                return folder, read_object(file)
    return run_folder, {}


def check_format(checkpoint: Path) -> None:
    """Raise InputError for a checkpoint of a commit that had other defaults and recorded no kinds of origins."""
    flags = read_object(checkpoint.resolve().parents[1] / "config.json").values()
    if any(isinstance(flag, dict) and "value" in flag and "origin" not in flag for flag in flags):
        raise InputError(
            f"{checkpoint}: written by an earlier commit, before {FIRST_WITH_KINDS}; resume it with that commit, which "
            "env.json names, or start over with --overwrite"
        )


def earlier_settings(run_folder: Path, resume: str) -> dict[str, Any]:
    """Return the settings of the finished run of a folder, else of the checkpoint to resume from; {} for neither."""
    records = [read_object(done_file(run_folder))] if resume == "auto" else []
    records.append(checkpoint_state(run_folder, resume)[1])
    return next((record["settings"] for record in records if isinstance(record.get("settings"), dict)), {})


def preset_of_run(stage: Stage, resolved: Resolved, default: str) -> str:
    """Return the preset that the finished run, or the one to resume from, began with ("" for none); else `default`."""
    run: RunConfig = resolved.config.run
    folder = stage.run_folder(run) if run.resumes_from == "auto" else Path(run.resumes_from).resolve().parents[1]
    settings = run_settings(folder) if earlier_settings(folder, run.resumes_from) else {}
    presets = (origin.source for _, origin in settings.values() if origin.kind is Kind.PRESET)
    match = re.search(r"presets/([\w.-]+)\.yaml", next(presets, ""))
    return match[1] if match else "" if settings else default


def chosen_before(stage: Stage, resolved: Resolved) -> dict[str, tuple[Any, Origin]]:
    """Return value and origin of what the resumed run chose for flags that are unset now; {} for a new run.

    {} too where its micro-batch does not divide the rows of an optimizer step, and where a flag was given that is
    `auto` now: the others were chosen beside it.
    """
    folder, state = checkpoint_state(stage.run_folder(resolved.config.run), resolved.config.run.resumes_from)
    table, settings = flag_table(type(resolved.config)), run_settings(folder.resolve().parents[1]) if state else {}
    unset = {name: settings[name] for name in table if name in settings and is_unset(resolved, name, settings[name][1])}
    hardware = next((origin for _, origin in unset.values() if origin.kind is Kind.PLAN), DEFAULT)
    if any(origin.is_given for name, (_, origin) in unset.items() if table[name].auto):
        return {}
    chosen = {name: (value, origin) for name, (value, origin) in unset.items() if origin.kind is Kind.PLAN}
    if MICRO not in chosen:
        return {name: one for name, one in chosen.items() if name != STEPS}  # which belong to the micro-batch
    size, _ = chosen[MICRO]
    parts = {name: (value, hardware) for name, value in with_micro_batch(resolved, size).items()}
    return {**chosen, **parts} if parts else {}


def is_unset(resolved: Resolved, name: str, origin: Origin) -> bool:
    """Tell whether a flag is left to what an earlier run had: nobody gives it, or --auto fit replaces it as it did."""
    if not resolved.is_given(name):
        return True
    is_replaced = resolved.config.run.auto != "plan" and origin.replaced is not None
    return is_replaced and origin.replaced == resolved.values[name]


def input_contents(config: StageConfig, *, models: bool = True) -> dict[str, Any]:
    """Return {flag: contents} of all data, and {flag: content} of start `models`; a hub id stands for its content."""
    starts = values_by_rule(config, "model") if models else {}
    data = {name: [data_content(path) for path in paths] for name, paths in values_by_rule(config, "data").items()}
    return data | {name: model_fingerprint(path) for name, path in starts.items()}


def data_content(text: str) -> str:
    """Return the hash of a local source with its weight, or a hub id with its weight. Raises InputError."""
    path, weight = parse_path(text)
    return f"{fingerprint(path) if is_local(path) else path}:{weight:g}"


def write_done(
    run_folder: Path, config: StageConfig, stage: Stage, *, steps: int, ranks: int, inputs: Mapping[str, Any]
) -> None:
    """Mark a run as finished.

    Args:
        inputs: the contents of data and start models when the run began (`input_contents`).
    """
    content = {
        "stage": stage.section,
        "steps": steps,
        "time": time.time(),
        "max_steps": config.run.max_steps,
        "num_train_epochs": config.run.num_train_epochs,
        **record_of(config, ranks, "same", "output"),
        "inputs": inputs,
    }
    with refused_by_disk(done_file(run_folder)):
        write_json(done_file(run_folder), content)


def is_finished(run_folder: Path, config: StageConfig, *, ranks: int | None) -> bool:
    """Return True if the very run that `config` asks for is finished; False if there are steps to take.

    Args:
        ranks: None where only the launcher will know; then sizes of batches are not compared.

    Raises:
        InputError: another run is finished here, or has left the checkpoint to resume from; a line for each difference,
            and how to continue; or the checkpoint is beyond --max-steps; or --resume names no folder.
    """
    run: RunConfig = config.run
    check_resume(run.resumes_from)
    done = read_object(done_file(run_folder))
    # Without a complete record the last checkpoint decides.
    is_whole = all(isinstance(done.get(name), kind) for name, kind in DONE.items())
    goes_on = run.resumes_from != "auto" or not is_whole or run.max_steps > done["steps"]
    missing = [] if goes_on else [folder for folder in config.outputs if not has_config(folder)]
    if missing:
        log.info("%s: its run is finished, but the model is gone; resuming from the last checkpoint", missing[0])
    if goes_on or missing:
        folder, state = checkpoint_state(run_folder, run.resumes_from)
        if state:
            check_format(folder)
        if 0 < run.max_steps < (step := state.get("step", 0)):
            raise InputError(
                f"--max-steps {run.max_steps}: {folder} is of step {step} already; give a larger number, or take the "
                f"model as it is there by `rlhf export {folder} --output FOLDER`"
            )
        if not run.force_resume:  # else the differences are told when it resumes
            check_resumed(folder, state, record_of(config, ranks, "same"), config)
        return False
    now, lengths = record_of(config, ranks, "same", "output"), list(other_length(run, done))
    others = list(differences(done, now | {"inputs": input_contents(config)}, config, "the finished run"))
    if others or lengths:
        longer = f", --max-steps above {done['steps']} trains it further" if not others else ""
        hint = f"another --output-dir keeps it, --overwrite starts over{longer}"
        raise InputError("\n".join([*others, *lengths, f"{run_folder}: another run is finished here; {hint}"]))
    log.info("%s: finished after %d steps; nothing to do (--overwrite starts over)", run_folder, done["steps"])
    return True


def other_length(run: RunConfig, done: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line where fewer steps or other epochs are asked for than the finished run has."""
    if run.max_steps not in (done["max_steps"], done["steps"]):
        requested = run.max_steps or "0 (whole epochs)"
        yield f"--max-steps: got {requested}, the finished run has {done['steps']} steps"
    elif not run.max_steps and run.num_train_epochs != done["num_train_epochs"]:
        yield f"--num-train-epochs: got {run.num_train_epochs:g}, the finished run has {done['num_train_epochs']:g}"
