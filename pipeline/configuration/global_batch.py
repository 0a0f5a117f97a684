"""Settings that follow the number of ranks: accumulation that keeps --train_batch_size, and the sharing of rollouts.

For stages, dry runs and `rlhf train`. A preset names the batch that its rates are meant for, and on how many ranks a
rollout's weights are; what the number of ranks cannot divide is told, not refused. Nor is what a preset says of memory
and contradicts a flag that was given by hand: it gives way.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.flags import COMMAND_LINE, Resolved, validated
from pipeline.configuration.groups import STAGE
from pipeline.errors import InputError, counted

SHARED = "inference_tp_size"  # flag of stage 3
# Values that numbers of a preset take where they give way, the nearest first; what is true becomes false.
GIVES_WAY = {STAGE: (2, 1, 3), SHARED: (1,)}


def with_ranks(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings of a run on `ranks` ranks (None: not known): those given, unless --train_batch_size is set.

    Then --gradient_accumulation_steps follows, and in stage 3 as many --generation_batches as an optimizer step takes,
    unless they are given. An --inference_tp_size of a file is lowered to one that divides the ranks.

    Raises:
        InputError: see `validated`.
    """
    resolved = with_preset_giving_way(with_sharing(resolved, ranks) if ranks else resolved, ranks)
    values, origins = dict(flat_items(resolved.config)), dict(resolved.origins)
    target: int = resolved.config.optimizer.train_batch_size
    if not target or not ranks:
        return resolved
    rows = values["per_device_train_batch_size"] * ranks  # of all ranks between two accumulations
    steps = max(1, round(target / rows))
    changed = {"gradient_accumulation_steps": steps}
    origin = f"--train_batch_size {target} on {counted(ranks, 'rank')}"
    if origins.get("generation_batches") in ("default", origin):  # the ladder derives it again, for other micro-batches
        prompts = values["per_device_generation_batch_size"] * values["num_samples_per_prompt"]
        per_step = values["per_device_train_batch_size"] * steps
        changed["generation_batches"] = per_step // gcd(per_step, prompts)
    changed = {name: value for name, value in changed.items() if values[name] != value}
    values |= changed
    origins |= dict.fromkeys(changed, origin)
    config: Any = validated(type(resolved.config), values, origins)
    notes = [] if steps * rows == target else [difference(values, origins, ranks, steps)]
    return replace(resolved, config=config, origins=origins, notes=tuple(dict.fromkeys([*resolved.notes, *notes])))


def with_sharing(resolved: Resolved, ranks: int) -> Resolved:
    """Return the settings with rollouts shared by fewer ranks than a file says, where it is meant for other numbers."""
    size = dict(flat_items(resolved.config)).get(SHARED, 1)
    if ranks % size == 0 or resolved.origins[SHARED] == COMMAND_LINE:  # else a mistake, which the stage refuses
        return resolved
    return with_others(resolved, {SHARED: gcd(size, ranks)}, f"which does not divide {counted(ranks, 'rank')}")


def with_others(resolved: Resolved, changed: dict[str, Any], why: str) -> Resolved:
    """Return the settings with other values of some flags than a file gives, and a note that says `why`."""
    values, origins = dict(flat_items(resolved.config)), resolved.origins
    config: Any = validated(type(resolved.config), values | changed, origins)
    notes = [f"--{name} {new} in place of {values[name]} ({origins[name]}), {why}" for name, new in changed.items()]
    new_origins = {name: f"in place of {values[name]} in {origins[name]}" for name in changed}
    return replace(resolved, config=config, origins=origins | new_origins, notes=(*resolved.notes, *notes))


def with_preset_giving_way(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings with other values of a preset's flags where those contradict what was given by hand.

    What people asked for stays, and is refused where it contradicts itself.
    """
    while fault := contradiction(resolved, ranks):
        found = (with_others(resolved, changed, f"since {': '.join(fault)}") for changed in alternatives(resolved))
        if (better := next((one for one in found if contradiction(one, ranks)[:1] != fault[:1]), None)) is None:
            break
        resolved = better
    return resolved


def alternatives(resolved: Resolved) -> Iterator[dict[str, Any]]:
    """Yield other values of a preset's flags that may give way: of one, then in stage 3 of those of both models."""
    table, alike = flag_table(type(resolved.config)), dict[str, dict[str, Any]]()
    for name, value in flat_items(resolved.config):
        leaf = table[name].path[-1]
        if resolved.origins[name] == resolved.preset and (value is True or leaf in GIVES_WAY):
            alike.setdefault(leaf, {})[name] = value
    for leaf, values in alike.items():
        for new in GIVES_WAY.get(leaf, (False,)):
            others = {name: new for name, value in values.items() if value != new}
            yield from ({name: new} for name in others)
            yield others


def contradiction(resolved: Resolved, ranks: int | None) -> tuple[str, ...]:
    """Return a flag that other settings rule out, and why; () if there is none, or no preset to give way."""
    try:
        if resolved.preset:
            resolved.config.engine_jsons(
                resolved.origins, Placement(device="cuda", dtype="bf16", ranks=ranks, run_dir=Path())
            )
    except InputError as error:
        flag, _, why = str(error).splitlines()[0].partition(": ")
        return flag, why.partition(";")[0]
    return ()


def difference(values: dict[str, Any], origins: dict[str, str], ranks: int, steps: int) -> str:
    """Return the line about a batch that these ranks cannot have, with a micro-batch that would keep it."""
    target, micro = values["train_batch_size"], values["per_device_train_batch_size"]
    fitting = [size for size in range(1, micro) if target % (size * ranks) == 0]
    hint = f"; --per_device_train_batch_size {fitting[-1]} keeps it" if fitting else ""
    return (
        f"an optimizer step takes {steps * micro * ranks} rows ({counted(ranks, 'rank')} x {micro} x {steps}), but the "
        f"settings are meant for --train_batch_size {target} ({origins['train_batch_size']}){hint}"
    )
