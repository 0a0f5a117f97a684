"""Compare a run's flags, data and start models with those of the checkpoint that it resumes from.

`on_resume` at a flag's field says whether it is compared; the checkpoint's files are read elsewhere.
"""

import json
import logging
from collections.abc import Iterator, Mapping
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

# Sizes over all ranks that checkpoints hold.
ROWS, PROMPTS = "rows of an optimizer step", "prompts of a rollout"
SAID_BY = {ROWS: "--train-batch-size", PROMPTS: "--rollout-batch-size over --num-samples-per-prompt"}
SAME = "resume with the same flags, data, models and batch sizes, or start over with --overwrite"


def values_by_rule(config: BaseModel, on_resume: OnResume) -> dict[str, Any]:
    """Return the values of all flags whose field says `on_resume`."""
    table = flag_table(type(config))
    values = {name: masked(value) for name, value in flat_items(config) if table[name].on_resume == on_resume}
    return values | json_values(config, on_resume)


def json_values(config: BaseModel, on_resume: OnResume) -> dict[str, Any]:
    """Return what a DeepSpeed JSON says of settings that were flags once, by the names of these."""
    keys = {name: (key, default) for name, key, default, rule, _ in ONLY_IN_JSON if rule == on_resume}
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
    """Return what stands for each flag that a run does not name: its default, or what older versions did.

    For a flag that is gone, its `Removed` stands.
    """
    table, before = flag_table(type(config)), values_before(config)
    gone = {name: one for flag in table.values() for name, one in flag.removed.items()}
    return gone | {n: flag.default for n, flag in table.items() if flag.default is not PydanticUndefined} | before


def values_before(config: BaseModel) -> dict[str, Any]:
    """Return {flag: what older versions did} of flags that they did not know, or whose default was another one."""
    return {name: flag.before for name, flag in flag_table(type(config)).items() if flag.before is not None}


def batch_sizes(config: StageConfig, ranks: int) -> dict[str, int]:
    """Return the rows of an optimizer step, and in stage 3 the prompts of a rollout, over all ranks."""
    rows = config.optimizer.per_device_train_batch_size * config.optimizer.gradient_accumulation_steps
    rollout = config.rollout_size(ranks)
    return {ROWS: rows * ranks} | ({PROMPTS: rollout.prompts} if rollout else {})


def settings_of(config: BaseModel, *rules: OnResume) -> dict[str, Any]:
    """Return the flags whose fields say one of `rules`, as JSON has them."""
    values = [values_by_rule(config, rule) for rule in rules]
    return {name: value for flags in json.loads(json.dumps(values)) for name, value in flags.items()}


def other_settings(
    saved: Mapping[str, Any], config: StageConfig, *rules: OnResume, ranks: int | None, holder: str
) -> Iterator[str]:
    """Yield a line for each flag of these `rules`, and each size of a batch, that is not what `holder` has.

    Args:
        saved: what `holder` has as "settings" and "sizes". ranks: None where not known; then sizes are not compared.
    """
    current, sizes = settings_of(config, *rules), batch_sizes(config, ranks) if ranks else {}
    yield from changed_settings(saved["settings"], current, defaults=defaults_of(config), holder=holder)
    for name, size in sizes.items():
        if size != saved["sizes"].get(name, size):
            yield f"{name}: got {size}, {holder} has {saved['sizes'][name]} ({SAID_BY[name]})"


def check_resumed(folder: Path, saved: Mapping[str, Any], config: StageConfig, ranks: int | None) -> None:
    """Raise InputError, a line each, for settings and batches that are not those of a checkpoint.

    Args:
        saved: its state.json, {} for none.
    """
    if saved.keys() >= {"settings", "sizes"}:
        lines = list(other_settings(saved, config, "same", ranks=ranks, holder="the checkpoint"))
        refuse(folder, lines, SAME, force=False)


def changed_settings(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, defaults: Mapping[str, Any], holder: str
) -> Iterator[str]:
    """Yield a line for each flag whose value is not the one that `holder` ("the checkpoint") has.

    Args:
        saved, current: the flags that must be the same. An older version may have compared flags that need not be so
            any more, or any flag that does not exist any more.
        defaults: of all flags of this version; they stand for what an older version did that did not know a flag yet.
    """
    saved_values = {**defaults, **{name: masked(value) for name, value in saved.items()}}
    gone = {name: one for name, one in defaults.items() if isinstance(one, Removed)}
    for name, one in sorted(gone.items()):
        was, now = saved.get(name, one.default), current.get(name, one.default)
        if was != now:
            yield f"{dashed(name)}: {one.reason}; got {now!r}, {holder} has {masked(was)!r}"
    for name in sorted((saved.keys() - defaults.keys()) | (current.keys() - gone.keys())):
        if saved_values.get(name) != current.get(name):
            yield f"{dashed(name)}: got {current.get(name)!r}, {holder} has {saved_values.get(name)!r}"


def check_same_settings(
    folder: Path,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Raise InputError, a line for each flag, where a checkpoint was written under other settings; `force`: log it.

    The flags are as in `changed_settings`.
    """
    lines = list(changed_settings(saved, current, defaults=defaults or {}, holder="the checkpoint"))
    refuse(folder, lines, SAME, force=force)


def check_same_fingerprints(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any], *, force: bool) -> None:
    """Raise InputError, a line each, where data, start models or the rows of a step are other ones; `force`: log it."""
    changed = [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]
    lines = [f"{name}: got {short(current.get(name))}, the checkpoint has {short(saved.get(name))}" for name in changed]
    refuse(folder, lines, SAME, force=force)


def short(value: Any) -> str:
    """Show a number as it is, and a hash by its first characters."""
    return f"content {value[:12]}" if isinstance(value, str) else str(value)


def refuse(folder: Path, lines: list[str], hint: str, *, force: bool) -> None:
    """Raise InputError with the lines and the hint, if there are any; with `force`, log them."""
    if lines and not force:
        raise InputError("\n".join([*lines, f"{folder}: {hint}; --force-resume continues anyway"]))
    for line in lines:
        log.warning("resumed nevertheless: %s", line)
