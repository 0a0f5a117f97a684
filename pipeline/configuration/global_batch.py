"""Settings that follow the number of ranks: accumulation that keeps --train_batch_size, and the sharing of rollouts.

For stages, dry runs and `rlhf train`. A preset names the batch that its rates are meant for, and on how many ranks a
rollout's weights are; what the number of ranks cannot divide is told, not refused.
"""

from dataclasses import replace
from math import gcd
from typing import Any

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import COMMAND_LINE, Resolved, validated
from pipeline.errors import counted

SHARED = "inference_tp_size"  # flag of stage 3


def with_ranks(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings of a run on `ranks` ranks (None: not known): those given, unless --train_batch_size is set.

    Then --gradient_accumulation_steps follows, and in stage 3 as many --generation_batches as an optimizer step takes,
    unless they are given. An --inference_tp_size of a file is lowered to one that divides the ranks.

    Raises:
        InputError: see `validated`.
    """
    resolved = with_sharing(resolved, ranks) if ranks else resolved
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
    values, origins = dict(flat_items(resolved.config)), dict(resolved.origins)
    size = values.get(SHARED, 1)
    if ranks % size == 0 or origins[SHARED] == COMMAND_LINE:  # else a mistake, which the stage refuses
        return resolved
    values[SHARED], of_ranks = gcd(size, ranks), counted(ranks, "rank")
    note = f"--{SHARED} {values[SHARED]} in place of {size} ({origins[SHARED]}), which does not divide {of_ranks}"
    origins[SHARED] = f"--{SHARED} {size} on {of_ranks}"
    config: Any = validated(type(resolved.config), values, origins)
    return replace(resolved, config=config, origins=origins, notes=(*resolved.notes, note))


def difference(values: dict[str, Any], origins: dict[str, str], ranks: int, steps: int) -> str:
    """Return the line about a batch that these ranks cannot have, with a micro-batch that would keep it."""
    target, micro = values["train_batch_size"], values["per_device_train_batch_size"]
    fitting = [size for size in range(1, micro) if target % (size * ranks) == 0]
    hint = f"; --per_device_train_batch_size {fitting[-1]} keeps it" if fitting else ""
    return (
        f"an optimizer step takes {steps * micro * ranks} rows ({counted(ranks, 'rank')} x {micro} x {steps}), but the "
        f"settings are meant for --train_batch_size {target} ({origins['train_batch_size']}){hint}"
    )
