"""Settings that follow the number of ranks: accumulation that keeps --train-batch-size, and the sharing of rollouts.

`RANK_RULES` are applied in stages, dry runs and `rlhf train`. A preset sets the batch that its learning rates are meant
for, and the number of ranks that share the weights of a rollout. A batch that the ranks cannot divide is rounded, with
a note. A preset's memory settings yield to flags given on the command line. An unset ZeRO stage becomes the lowest that
the other flags allow; on GPUs the plan takes a higher one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flag_table import ZERO_STAGE, flag_table, flags_of_key
from pipeline.configuration.origins import COMMAND_LINE, DEFAULT, Kind, Origin
from pipeline.configuration.resolved import Resolved, Rule, applied
from pipeline.errors import ContradictionError, InputError, counted, dashed

MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
EVALUATED = "per_device_eval_batch_size"
SHARED = "inference_tp_size"  # flag of stage 3
# Its flags of the size of a rollout: by itself, or the product of these two.
ROLLOUT, GENERATED, BATCHES = "rollout_batch_size", "per_device_generation_batch_size", "generation_batches"


def with_ranks(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings of a run on `ranks` ranks (None: not known), after `RANK_RULES`.

    Raises:
        InputError: see `validated`; or a rollout that so many ranks cannot share.
    """
    return applied(RANK_RULES, resolved, ranks)


# --- the rules ---


def with_sharing(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings with rollouts shared by fewer ranks than a file says, where it is meant for other numbers."""
    size = resolved.values.get(SHARED, 1)
    # A number of the command line that does not divide the ranks is a mistake, which the stage refuses.
    if not ranks or ranks % size == 0 or resolved.origins[SHARED] == COMMAND_LINE:
        return resolved
    return in_place(resolved, {SHARED: gcd(size, ranks)}, f"which does not divide {counted(ranks, 'rank')}")


def with_zero_stages(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings with the ZeRO stages that they allow, and without preset values that contradict given flags.

    Two kinds of preset values yield: the number of ranks that share a rollout becomes 1, and a true switch false. Flags
    that the user gave stay; if they contradict each other, a later check rejects them.
    """
    resolved, fault = with_lowest_stages(resolved, ranks)
    while fault and resolved.preset:
        names = [name for name, origin in resolved.origins.items() if origin.kind is Kind.PRESET]
        values = resolved.values
        others = [{name: 1 if name == SHARED else False} for name in names if name == SHARED or values[name] is True]
        tried = (in_place(resolved, one, f"since {': '.join(fault)}") for one in others)
        better = next(
            (one for one in (with_lowest_stages(one, ranks) for one in tried) if one[1][:1] != fault[:1]), None
        )
        if better is None:
            break
        resolved, fault = better
    return resolved


def with_batches(resolved: Resolved, ranks: int | None) -> Resolved:
    """Return the settings with the batches that follow from those given.

    --gradient-accumulation-steps follow from --train-batch-size, in which a --per-device-train-batch-size that nobody
    gave is the largest up to its default that divides a rank's rows. --generation-batches follow from a
    --per-device-generation-batch-size that is given by hand: one, or as many as an optimizer step takes.

    Raises:
        InputError: a rollout that so many ranks cannot share.
    """
    values, origins, notes = resolved.values, resolved.origins, list[str]()
    target, micro, steps = values["train_batch_size"], values[MICRO], 1
    new, new_origins = dict[str, int](), dict[str, Origin]()
    if target and ranks:
        if origins[MICRO] == DEFAULT:
            micro = new[MICRO] = max(divisors(max(1, round(target / ranks)), up_to=micro))
        steps = new[STEPS] = max(1, round(target / (micro * ranks)))
        new_origins[STEPS] = Origin(Kind.FOLLOWS, f"--train-batch-size {target} on {counted(ranks, 'rank')}")
        if steps * micro * ranks != target:
            notes.append(difference(resolved, micro, steps, ranks))
        if origins[STEPS].is_by_hand and values[STEPS] != steps:
            given = f"{dashed(STEPS)} {values[STEPS]} ({origins[STEPS]})"
            notes.append(f"{given}: with --train-batch-size {target} it is {steps}")
    if is_product(resolved):
        rows = values[GENERATED] * values["num_samples_per_prompt"]
        per_step = micro * steps if target else rows
        new[BATCHES] = per_step // gcd(per_step, rows)
        new_origins[BATCHES] = Origin(Kind.FOLLOWS, dashed(GENERATED))
    elif values.get(BATCHES) == 0 and origins[GENERATED].kind is Kind.PRESET:
        # Decided: a planner continues with these settings without their preset.
        new_origins[BATCHES] = origins[GENERATED]
    is_new = {name for name in new_origins if name not in new or values[name] != new[name]}
    resolved = resolved.changed(new, {name: new_origins[name] for name in is_new}, notes)
    # But for --rollout-batch-size rollouts are counted on a device, and divide on any number of them.
    rollout = resolved.config.rollout_size(ranks or 1)
    if rollout and rollout.fault and (ranks or not (rollout.rollout_batch_size or target)):
        raise ContradictionError(rollout.fault)
    return resolved


RANK_RULES: tuple[Rule[int | None], ...] = (
    Rule(with_sharing, "An `--inference-tp-size` of a file becomes one that divides the ranks."),
    Rule(
        with_zero_stages,
        "An unset ZeRO stage becomes the lowest that the other flags allow, and a preset's setting that saves"
        " memory is dropped, with a note, where it contradicts a flag of yours.",
    ),
    Rule(
        with_batches,
        "`--gradient-accumulation-steps` follow from `--train-batch-size`, and `--generation-batches` from a "
        "`--per-device-generation-batch-size` of yours.",
    ),
)


# --- what the rules are made of ---


def divisors(rows: int, *, up_to: int) -> list[int]:
    """Return the numbers up to one that divide `rows`, ascending."""
    return [size for size in range(1, min(rows, up_to) + 1) if rows % size == 0]


def with_micro_batch(resolved: Resolved, size: int) -> dict[str, int]:
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
    that the plan expects of them, for the run and the report.
    """

    flags: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = DEFAULT
    line: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)

    def of(self, resolved: Resolved, ranks: int) -> Resolved:
        """Return the settings on so many ranks with these values."""
        values, origins = resolved.values, resolved.origins
        given = {name: values[name] if resolved.is_given(name) else origins[name].replaced for name in self.flags}
        chosen = {name: replace(self.origin, replaced=value) for name, value in given.items()}
        return with_ranks(resolved.changed(self.flags, chosen), ranks) if self.flags else resolved


def evaluated_rows(resolved: Resolved, num_rows: int, ranks: int) -> int:
    """Return how many of `num_rows` held-out rows an evaluation takes: --eval-iters batches on each rank; 0: all.

    Its batches are of the rows that were given, else of the default, however many the plan chose.
    """
    config, batch = resolved.config, resolved.config.optimizer.per_device_eval_batch_size
    if (origin := resolved.origins.get(EVALUATED, DEFAULT)).kind is Kind.PLAN:
        batch = int(origin.replaced or flag_table(type(config))[EVALUATED].default)
    return min(num_rows, config.run.eval_iters * batch * ranks or num_rows)


def says_rollout(resolved: Resolved) -> bool:
    """Return True if a flag of stage 3 sets the size of its rollouts; prompts at once do only in a new run."""
    return resolved.origins[ROLLOUT].kind >= Kind.EARLIER_RUN or bool(resolved.config.sampling.generation_batches)


def is_product(resolved: Resolved) -> bool:
    """Return True if --generation-batches follow from prompts at once that are given by hand, and nothing else is."""
    origins = resolved.origins
    if BATCHES not in origins or origins[BATCHES].kind > Kind.FOLLOWS:  # one that followed is derived again
        return False
    return origins[ROLLOUT].kind < Kind.EARLIER_RUN and origins[GENERATED].is_by_hand


def in_place(resolved: Resolved, values: dict[str, Any], why: str, kind: Kind | None = None) -> Resolved:
    """Return the settings with other values of some flags than a file gives, and a note that says `why`.

    kind: of their origin; None: the kind of the value that each replaces.
    """
    before, origins, new_origins, notes = resolved.values, resolved.origins, dict[str, Origin](), list[str]()
    for name, new in values.items():
        notes.append(f"{dashed(name)} {new} in place of {before[name]} ({origins[name]}), {why}")
        replaced = f"in place of {before[name]} in {origins[name]}"
        new_origins[name] = Origin(origins[name].kind if kind is None else kind, replaced)
    return resolved.changed(values, new_origins, notes)


def with_lowest_stages(resolved: Resolved, ranks: int | None) -> tuple[Resolved, tuple[str, ...]]:
    """Return the settings with the lowest ZeRO stages that they allow, where none is given, and what is left.

    That is a flag that other settings rule out at any stage, and why; () if there is none.
    """
    names = flags_of_key(type(resolved.config), ZERO_STAGE)
    names = [name for name in names if resolved.origins[name] == DEFAULT]

    def at(stages: Sequence[int]) -> tuple[Resolved, tuple[str, ...]]:
        settings = resolved.changed(dict(zip(names, stages, strict=True)))
        return settings, contradiction(settings, ranks)

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


def difference(resolved: Resolved, micro: int, steps: int, ranks: int) -> str:
    """Return the line about a batch that these ranks cannot have, and a micro-batch that would keep it."""
    target = resolved.config.optimizer.train_batch_size
    fitting = [size for size in range(1, micro) if target % (size * ranks) == 0]
    hint = f"; --per-device-train-batch-size {fitting[-1]} keeps it" if fitting else ""
    return (
        f"an optimizer step takes {steps * micro * ranks} rows ({counted(ranks, 'rank')} x {steps * micro}), but the "
        f"settings are meant for --train-batch-size {target} ({resolved.origins['train_batch_size']}){hint}"
    )
