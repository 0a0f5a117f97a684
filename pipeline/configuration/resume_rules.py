"""Compare a run with the earlier one that it resumes, or that is finished in its folder, by one table: `COMPARED`.

`on_resume` at a flag's field says whether it is compared. The records of the earlier run, state.json of a checkpoint
and done.json, are read elsewhere. What a run takes from the earlier one is in `pipeline/run/resolve.py`.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pipeline.configuration.ds_json import leaves, read_user_json
from pipeline.configuration.flag_table import AUTO, OnResume, Removed, flag_table, flat_items
from pipeline.configuration.groups import ONLY_IN_JSON
from pipeline.configuration.stage import StageConfig
from pipeline.errors import InputError, dashed
from pipeline.redact import masked

log = logging.getLogger(__name__)

Record = Mapping[str, Any]  # what state.json or done.json says of a run, or a part of that
# Sizes over all ranks that checkpoints hold.
ROWS, PROMPTS = "rows of an optimizer step", "prompts of a rollout"
SAID_BY = {ROWS: "--train-batch-size", PROMPTS: "--rollout-batch-size over --num-samples-per-prompt"}
SAME = "resume with the same flags, data, models and batch sizes, or start over with --overwrite"


def values_by_rule(config: BaseModel, *rules: OnResume) -> dict[str, Any]:
    """Return the values of all flags whose fields say one of these rules, as JSON has them."""
    table = flag_table(type(config))
    values = {name: masked(value) for name, value in flat_items(config) if table[name].on_resume in rules}
    return dict(json.loads(json.dumps(values | json_values(config, rules))))


def json_values(config: BaseModel, rules: Collection[OnResume]) -> dict[str, Any]:
    """Return what a DeepSpeed JSON says of settings that were flags once, by the names of these."""
    keys = {name: (key, default) for name, key, default, rule, _ in ONLY_IN_JSON if rule in rules}
    path = dict(flat_items(config)).get("deepspeed_config")
    if path is None or not keys:  # a small command, or nothing that the file is read for
        return {}
    said = dict(leaves(read_user_json(path))) if path else {}
    values = {name: said.get(key, AUTO) for name, (key, _) in keys.items()}
    return {name: default if values[name] == AUTO else values[name] for name, (_, default) in keys.items()}


def memory_flags(config: BaseModel) -> dict[str, Any]:
    """Return the flags that the memory of a stage may depend on; rates, seeds and paths are left out."""
    table = flag_table(type(config))
    return {
        name: value
        for name, value in flat_items(config)
        if name in ("gpu_memory_gib", "release_inference_cache", "kl_coef")
        or (table[name].on_resume in ("same", "rounding") and not isinstance(value, float) and "seed" not in name)
    }


def defaults_of(config: BaseModel) -> dict[str, Any]:
    """Return what stands for each flag that a run does not name: the default that it has or had."""
    table = flag_table(type(config))
    gone = {name: one.default for name, one in removed_flags(config).items()}
    defaults = {name: flag.default for name, flag in table.items() if flag.default is not PydanticUndefined}
    return gone | defaults


def removed_flags(config: BaseModel) -> dict[str, Removed]:
    """Return the flags of earlier versions that are gone."""
    return {name: one for flag in flag_table(type(config)).values() for name, one in flag.removed.items()}


def batch_sizes(config: StageConfig, ranks: int) -> dict[str, int]:
    """Return the rows of an optimizer step, and in stage 3 the prompts of a rollout, over all ranks."""
    rows = config.optimizer.per_device_train_batch_size * config.optimizer.gradient_accumulation_steps
    rollout = config.rollout_size(ranks)
    return {ROWS: rows * ranks} | ({PROMPTS: rollout.prompts} if rollout else {})


def record_of(config: StageConfig, ranks: int | None, *rules: OnResume) -> dict[str, Any]:
    """Return the parts of a run's record that follow from its flags alone; no sizes where the ranks are not known."""
    return {"settings": values_by_rule(config, *rules)} | ({"sizes": batch_sizes(config, ranks)} if ranks else {})


def check_resumed(folder: Path, saved: Record, now: Record, config: BaseModel, *, force: bool = False) -> None:
    """Raise InputError, a line each, for what is not as a checkpoint has it; `force`: log the lines.

    Args:
        saved: its state.json, {} for none. now: the same parts of the run that resumes, as far as they are known.
    """
    lines = list(differences(saved, now, config))
    if lines and not force:
        raise InputError("\n".join([*lines, f"{folder}: {SAME}; --force-resume continues anyway"]))
    for line in lines:
        log.warning("resumed nevertheless: %s", line)


def differences(earlier: Record, now: Record, config: BaseModel, holder: str = "the checkpoint") -> Iterator[str]:
    """Yield a line for each difference in the parts that both records have.

    Args:
        holder: what has the earlier record, in words.
    """
    for part, changed in COMPARED.items():
        if part in earlier and part in now:
            yield from changed(earlier[part], now[part], config, holder)


# --- the parts of a record, by their keys ---


def changed_settings(earlier: Record, now: Record, config: BaseModel, holder: str) -> Iterator[str]:
    """Yield a line for each flag that has another value.

    A flag that the earlier version did not know had its default. One that is not compared any more may have changed;
    one that is gone may not.
    """
    gone, defaults = removed_flags(config), defaults_of(config)
    before = defaults | {name: masked(value) for name, value in earlier.items()}
    others = (earlier.keys() - defaults.keys()) | (now.keys() - gone.keys())
    for name in [*sorted(gone), *sorted(others)]:
        why, default = (f"{gone[name].reason}; ", gone[name].default) if name in gone else ("", None)
        if (got := now.get(name, default)) != before.get(name):
            yield f"{dashed(name)}: {why}got {got!r}, {holder} has {before.get(name)!r}"


def changed_sizes(earlier: Record, now: Record, _: BaseModel, holder: str) -> Iterator[str]:
    """Yield a line for each size of a batch over all ranks that is another one, with the flag that sets it."""
    for name, size in now.items():
        if size != earlier.get(name, size):
            yield f"{name}: got {size}, {holder} has {earlier[name]} ({SAID_BY[name]})"


def changed_contents(earlier: Record, now: Record, config: BaseModel, holder: str) -> Iterator[str]:
    """Yield a line for each flag that names data or a start model of another content, with the sources that changed."""
    table = values_by_rule(config, "data", "model")
    for name, content in now.items():
        if content != earlier.get(name, content):
            paths = table[name] if isinstance(table[name], list) else [table[name]]
            changed = [path for path, hash_now in zip(paths, content, strict=False) if hash_now not in earlier[name]]
            which = " ".join(changed if len(paths) > 1 and changed else paths)
            yield f"{dashed(name)}: the content of {which or 'no path'} is not what {holder} was made of"


def changed_hashes(earlier: Record, now: Record, _: BaseModel, holder: str) -> Iterator[str]:
    """Yield a line for each of the prepared rows, start models and files of functions that has another hash."""
    for name in sorted(earlier.keys() | now.keys()):
        if (got := now.get(name)) != (was := earlier.get(name)):
            yield f"{name}: got {short(got)}, {holder} has {short(was)}"


def short(content: str | None) -> str:
    """Show a hash by its first characters."""
    return "None" if content is None else f"content {content[:12]}"


# Part of a record -> (earlier, now, configuration, holder) yields a line for each difference.
COMPARED: dict[str, Callable[[Any, Any, BaseModel, str], Iterator[str]]] = {
    "settings": changed_settings,
    "sizes": changed_sizes,
    "inputs": changed_contents,
    "fingerprints": changed_hashes,
    "columns": changed_hashes,
}
