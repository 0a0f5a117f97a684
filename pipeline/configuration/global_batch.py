"""Settings that follow the number of ranks: accumulation that keeps --train-batch-size, and the sharing of rollouts.

Stages, dry runs and `rlhf train` call it. A preset sets the batch that its learning rates are meant for, and the number
of ranks that share the weights of a rollout. A batch that the ranks cannot divide is rounded, with a note. A preset's
memory settings yield to flags given on the command line. An unset ZeRO stage becomes the lowest that the other flags
allow; on GPUs the plan takes a higher one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flag_table import ZERO_STAGE, flag_table, flags_of_key, flat_items
from pipeline.configuration.flags import Resolved, validated
from pipeline.configuration.origins import COMMAND_LINE, DEFAULT, Kind, Origin, Origins
from pipeline.errors import ContradictionError, InputError, counted, dashed

MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
EVALUATED = "per_device_eval_batch_size"
SHARED = "inference_tp_size"  # flag of stage 3
# Its flags of the size of a rollout: by itself, or the product of these two.
ROLLOUT, GENERATED, BATCHES = "rollout_batch_size", "per_device_generation_batch_size", "generation_batches"


def with_ranks(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings of a run on `ranks` ranks (None: not known), with what follows from those given.

    --gradient-accumulation-steps follow from --train-batch-size, in which a --per-device-train-batch-size that nobody
    gave is the largest up to its default that divides a rank's rows. --generation-batches follow from a
    --per-device-generation-batch-size that is given by hand: one, or as many as an optimizer step takes. An
    --inference-tp-size of a file is lowered to one that divides the ranks.

    Raises:
        InputError: see `validated`; or a rollout that so many ranks cannot share.
    """
    resolved = with_preset_giving_way(with_sharing(resolved, ranks) if ranks else resolved, ranks)
    values, origins, notes = dict(flat_items(resolved.config)), dict(resolved.origins), list[str]()
    target, micro, steps = values["train_batch_size"], values[MICRO], 1
    follows = dict[str, tuple[int, Origin]]()  # flag -> its value, and the origin of that
    if target and ranks and origins[MICRO] == DEFAULT:
        micro = max(divisors(max(1, round(target / ranks)), up_to=micro))
        follows[MICRO] = micro, DEFAULT
    if target and ranks:
        steps = max(1, round(target / (micro * ranks)))
        follows[STEPS] = steps, Origin(Kind.FOLLOWS, f"--train-batch-size {target} on {counted(ranks, 'rank')}")
        if steps * micro * ranks != target:
            notes.append(difference({**values, MICRO: micro}, origins, ranks, steps))
        if origins[STEPS].is_by_hand and values[STEPS] != steps:
            given = f"{dashed(STEPS)} {values[STEPS]} ({origins[STEPS]})"
            notes.append(f"{given}: with --train-batch-size {target} it is {steps}")
    if is_product(resolved):
        rows = values[GENERATED] * values["num_samples_per_prompt"]
        per_step = micro * steps if target else rows
        follows[BATCHES] = per_step // gcd(per_step, rows), Origin(Kind.FOLLOWS, dashed(GENERATED))
    elif values.get(BATCHES) == 0 and origins[GENERATED].kind is Kind.PRESET:
        # Decided: a planner goes on with these settings without their preset.
        origins[BATCHES] = origins[GENERATED]
    follows = {name: found for name, found in follows.items() if values[name] != found[0]}
    values |= {name: value for name, (value, _) in follows.items()}
    origins |= {name: origin for name, (_, origin) in follows.items()}
    config: Any = validated(type(resolved.config), values, origins) if follows else resolved.config
    # But for --rollout-batch-size rollouts are counted on a device, and divide on any number of them.
    rollout = config.rollout_size(ranks or 1)
    if rollout and rollout.fault and (ranks or not (rollout.rollout_batch_size or target)):
        raise ContradictionError(rollout.fault)
    return replace(resolved, config=config, origins=origins, notes=tuple(dict.fromkeys([*resolved.notes, *notes])))


def divisors(rows: int, *, up_to: int) -> list[int]:
    """Return the numbers up to one that divide `rows`, ascending."""
    return [size for size in range(1, min(rows, up_to) + 1) if rows % size == 0]


def cut(resolved: Resolved, size: int) -> dict[str, int]:
    """Return the flags of micro-batches of `size` rows that leave the rows of an optimizer step as they are.

    {} where a rank's rows are no multiple of it.
    """
    optimizer = resolved.config.optimizer
    rows = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps
    return {} if rows % size else {MICRO: size, STEPS: rows // size}


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of flags that are `auto`; none on a CPU.

    flags: the values. origin: of kind PLAN. line: them and what they give, for people. plan: the memory and the time
    that the plan expects of them, for the report; {} where they were chosen before.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = DEFAULT
    line: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)

    def of(self, resolved: Resolved, ranks: int) -> Resolved:
        """Return the settings on so many ranks with these values."""
        if not self.flags:
            return resolved
        origins = resolved.origins | dict.fromkeys(self.flags, self.origin)
        return with_ranks(with_values(replace(resolved, origins=origins), self.flags), ranks)


def evaluation_unit(resolved: Resolved) -> int:
    """Return the rows of a batch that --eval-iters counts: those that were given, else the default, however chosen."""
    if resolved.origins.get(EVALUATED, DEFAULT).kind is Kind.PLAN:
        return int(flag_table(type(resolved.config))[EVALUATED].default)
    return int(resolved.config.optimizer.per_device_eval_batch_size)


def evaluated_rows(resolved: Resolved, num_rows: int, ranks: int) -> int:
    """Return how many of `num_rows` held-out rows an evaluation takes: --eval-iters batches on each rank; 0: all."""
    limit = int(resolved.config.run.eval_iters) * evaluation_unit(resolved) * ranks
    return min(num_rows, limit or num_rows)


def says_rollout(resolved: Resolved) -> bool:
    """Return True if a flag of stage 3 sets the size of its rollouts; prompts at once do only in a new run."""
    return resolved.origins[ROLLOUT].kind >= Kind.EARLIER_RUN or bool(resolved.config.sampling.generation_batches)


def is_product(resolved: Resolved) -> bool:
    """Return True if --generation-batches follow from prompts at once that are given by hand, and nothing else is."""
    origins = resolved.origins
    if BATCHES not in origins or origins[BATCHES].kind > Kind.FOLLOWS:  # one that followed is derived again
        return False
    return origins[ROLLOUT].kind < Kind.EARLIER_RUN and origins[GENERATED].is_by_hand


def with_sharing(resolved: Resolved, ranks: int) -> Resolved:
    """Return the settings with rollouts shared by fewer ranks than a file says, where it is meant for other numbers."""
    size = dict(flat_items(resolved.config)).get(SHARED, 1)
    if ranks % size == 0 or resolved.origins[SHARED] == COMMAND_LINE:  # else a mistake, which the stage refuses
        return resolved
    return with_others(resolved, {SHARED: gcd(size, ranks)}, f"which does not divide {counted(ranks, 'rank')}")


def with_values(resolved: Resolved, changed: Mapping[str, Any]) -> Resolved:
    """Return the settings with other values of some flags, of the same origins. Raises InputError."""
    values = {**dict(flat_items(resolved.config)), **changed}
    config: Any = validated(type(resolved.config), values, resolved.origins)
    return replace(resolved, config=config)


def with_others(resolved: Resolved, changed: dict[str, Any], why: str, kind: Kind | None = None) -> Resolved:
    """Return the settings with other values of some flags than a file gives, and a note that says `why`.

    kind: of their origin; None: the kind of the value that each replaces.
    """
    values, origins = dict(flat_items(resolved.config)), resolved.origins
    notes = [f"{dashed(n)} {new} in place of {values[n]} ({origins[n]}), {why}" for n, new in changed.items()]
    new_origins = {
        name: Origin(origins[name].kind if kind is None else kind, f"in place of {values[name]} in {origins[name]}")
        for name in changed
    }
    notes = [*resolved.notes, *notes]
    return replace(with_values(resolved, changed), origins=origins | new_origins, notes=tuple(notes))


def with_preset_giving_way(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings with the ZeRO stages that they allow, and without preset values that contradict given flags.

    Two kinds of preset values yield: the number of ranks that share a rollout becomes 1, and a true switch false. Flags
    that the user gave stay; if they contradict each other, a later check rejects them.
    """
    resolved, fault = with_lowest_stages(resolved, ranks)
    while fault and resolved.preset:
        names = [name for name, origin in resolved.origins.items() if origin.kind is Kind.PRESET]
        values = dict(flat_items(resolved.config))
        others = [{name: 1 if name == SHARED else False} for name in names if name == SHARED or values[name] is True]
        found = (with_others(resolved, changed, f"since {': '.join(fault)}") for changed in others)
        better = next(
            (one for one in (with_lowest_stages(one, ranks) for one in found) if one[1][:1] != fault[:1]), None
        )
        if better is None:
            break
        resolved, fault = better
    return resolved


def with_lowest_stages(resolved: Resolved, ranks: int | None) -> tuple[Resolved, tuple[str, ...]]:
    """Return the settings with the lowest ZeRO stages that they allow, where nobody gave one, and what is left.

    That is a flag that other settings rule out at any stage, and why; () if there is none.
    """
    names = flags_of_key(type(resolved.config), ZERO_STAGE)
    names = [name for name in names if resolved.origins[name] == DEFAULT]

    def at(stages: Sequence[int]) -> tuple[Resolved, tuple[str, ...]]:
        found = with_values(resolved, dict(zip(names, stages, strict=True)))
        return found, contradiction(found, ranks)

    lowest = at([0] * len(names))
    others = map(at, product((0, 1, 3), repeat=len(names))) if lowest[1] else ()
    return next((one for one in others if not one[1]), lowest)


def contradiction(resolved: Resolved, ranks: int | None) -> tuple[str, ...]:
    """Return a flag that other settings rule out, and why; () if there is none."""
    placement = Placement(device="cuda", dtype="bf16", ranks=ranks, run_dir=Path())
    try:
        resolved.config.engine_jsons(resolved.origins, placement)
    except InputError as error:
        flag, _, why = str(error).splitlines()[0].partition(": ")
        return flag, why.partition(";")[0]
    return ()


def difference(values: dict[str, Any], origins: Origins, ranks: int, steps: int) -> str:
    """Return the line about a batch that these ranks cannot have, and a micro-batch that would keep it."""
    target, micro = values["train_batch_size"], values[MICRO]
    fitting = [size for size in range(1, micro) if target % (size * ranks) == 0]
    hint = f"; --per-device-train-batch-size {fitting[-1]} keeps it" if fitting else ""
    return (
        f"an optimizer step takes {steps * micro * ranks} rows ({counted(ranks, 'rank')} x {steps * micro}), but the "
        f"settings are meant for --train-batch-size {target} ({origins['train_batch_size']}){hint}"
    )
