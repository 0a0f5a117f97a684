"""Tell whether a run is finished already, and clear the folder of one that starts afresh. Imports no torch.

`done.json` holds the settings, inputs and length of the run that wrote it, so that no other run is taken for it.
Checkpoints are compared in `pipeline/configuration/resume_rules.py`.
"""

import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import Resolved, flag_words, load_yaml, validated
from pipeline.configuration.resume_rules import batch_sizes, changed_settings, defaults_of, values_by_rule
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.data.sources import fingerprint, is_local, parse_path
from pipeline.errors import InputError
from pipeline.files import has_config, model_fingerprint, read_object, refused_by_disk, write_json, write_text
from pipeline.run.layout import automatic_file, done_file

log = logging.getLogger(__name__)

BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
IN_PLACE_OF = "# In place of: "  # first words of the comment of automatic.yaml with the given values, as JSON
RUN_FILES = ("checkpoints", "tensorboard", "metrics.jsonl", "metrics.csv", "samples.jsonl", "done.json")


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
        raise InputError(f"--resume {resume}: no such folder; wanted auto, never, or a checkpoint folder")


def write_choice(file: Path, resolved: Resolved, flags: Mapping[str, Any]) -> None:
    """Write the flags that a search chose as a preset, with the values that were given for them."""
    heading = "# Chosen by --auto_fit, --auto_batch or --autotuning; a preset for --preset or --config.\n"
    replaced = f"{IN_PLACE_OF}{json.dumps(given_values(resolved, flags))}\n"
    write_text(file, heading + replaced + yaml.safe_dump(dict(flags), sort_keys=False))


def given_values(resolved: Resolved, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those of these flags that a command line or a file gives."""
    values = dict(flat_items(resolved.config))
    return {name: values[name] for name in names if resolved.origins[name] != "default"}


def automatic_words(resolved: Resolved, run_folder: Path, *, tuned: bool = False) -> list[str] | None:
    """Return the saved choice of --auto_fit and --auto_batch as words of a command line, for the run that resumes here.

    Flags given on this command line win over the saved choice, unless they are as they were when it was made. Returns
    None if nothing resumes or nothing was chosen, and if an optimizer step is to have another number of rows than then.

    Args:
        tuned: return the choice of --autotuning, whatever the rows of an optimizer step.

    Raises:
        InputError: a flag of this command line contradicts the saved choice.
    """
    config, file = resolved.config, automatic_file(run_folder)
    run = config.run
    saved = [done_file(run_folder), *run_folder.glob("checkpoints/*/manifest.json")]
    goes_on = run.resumes_from != "never" and any(map(Path.is_file, saved))
    if not ((run.searches or tuned) and goes_on and file.is_file()):
        return None
    flags, before = load_yaml(str(file)), dict[str, Any]()
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(IN_PLACE_OF):
            before = json.loads(line.removeprefix(IN_PLACE_OF))
    if BATCH[1] in flags and not tuned:
        rows = flags[BATCH[0]] * flags[BATCH[1]]
        if rows != batch_sizes(config, 1)["rows of an optimizer step"]:
            return None
    given = given_values(resolved, flags)
    changed = {name for name, value in given.items() if value not in (flags[name], before.get(name))}
    changed |= set(BATCH if changed & set(BATCH) else ())  # one without the other would change the rows of a step
    chosen = {name: value for name, value in flags.items() if name not in changed}
    origins = resolved.origins | dict.fromkeys(chosen, str(file))
    validated(type(config), dict(flat_items(config)) | chosen, origins)
    return flag_words(chosen)


def input_contents(config: StageConfig) -> dict[str, Any]:
    """Return {flag: content} of all data and start models; a hub id stands for its content."""
    data = {name: [data_content(path) for path in paths] for name, paths in values_by_rule(config, "data").items()}
    return data | {name: model_fingerprint(path) for name, path in values_by_rule(config, "model").items()}


def data_content(text: str) -> str:
    """Return the hash of a local source with its weight, or a hub id with its weight. Raises InputError."""
    path, weight = parse_path(text)
    return f"{fingerprint(path) if is_local(path) else path}:{weight:g}"


def compared_settings(config: StageConfig) -> dict[str, Any]:
    """Return the flags that a finished run must share, as JSON has them."""
    settings: dict[str, Any] = json.loads(json.dumps(values_by_rule(config, "same") | values_by_rule(config, "output")))
    return settings


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
        "settings": compared_settings(config),
        "inputs": inputs,
        "sizes": batch_sizes(config, ranks),
    }
    with refused_by_disk(done_file(run_folder)):
        write_json(done_file(run_folder), content)


def is_finished(run_folder: Path, config: StageConfig, stage: Stage, *, ranks: int | None) -> bool:
    """Return True if the very run that `config` asks for is finished; False if there are steps to take.

    Args:
        ranks: None where only the launcher will know; then sizes of batches are not compared.

    Raises:
        InputError: another run is finished here; a line for each difference, and how to go on.
    """
    run: RunConfig = config.run
    done = read_object(done_file(run_folder))
    # Without a complete record the last checkpoint decides: its settings are compared before it is resumed.
    if run.resumes_from != "auto" or "sizes" not in done or run.max_steps > done["steps"]:
        return False
    if missing := [folder for folder in stage.outputs(config) if not has_config(folder)]:
        log.info("%s: its run is finished, but the model is gone; going on from the last checkpoint", missing[0])
        return False
    others, lengths = list(other_inputs(config, done, ranks)), list(other_length(run, done))
    if others or lengths:
        longer = f", --max_steps above {done['steps']} trains it further" if not others else ""
        hint = f"--overwrite starts over{longer}, another --output_dir keeps it"
        raise InputError("\n".join([*others, *lengths, f"{run_folder}: another run is finished here; {hint}"]))
    log.info("%s: finished after %d steps; nothing to do (--overwrite starts over)", run_folder, done["steps"])
    return True


def other_inputs(config: StageConfig, done: Mapping[str, Any], ranks: int | None) -> Iterator[str]:
    """Yield a line for each setting, source, start model and batch that is not the finished run's."""
    yield from changed_settings(
        done["settings"], compared_settings(config), defaults=defaults_of(config), holder="the finished run"
    )
    table = values_by_rule(config, "data") | values_by_rule(config, "model")
    for name, content in input_contents(config).items():
        if content != done["inputs"].get(name, content):
            value = " ".join(table[name]) if isinstance(table[name], list) else table[name]
            yield f"--{name}: the content of {value or 'no path'} is not what the finished run was made of"
    for name, size in batch_sizes(config, ranks).items() if ranks else ():
        if size != done["sizes"].get(name, size):
            yield f"{name}: found {size}, the finished run has {done['sizes'][name]}"


def other_length(run: RunConfig, done: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line where fewer steps or other epochs are asked for than the finished run has."""
    if run.max_steps not in (done["max_steps"], done["steps"]):
        requested = run.max_steps or "0 (whole epochs)"
        yield f"--max_steps: found {requested}, the finished run has {done['steps']} steps"
    elif not run.max_steps and run.num_train_epochs != done["num_train_epochs"]:
        yield f"--num_train_epochs: found {run.num_train_epochs:g}, the finished run has {done['num_train_epochs']:g}"
