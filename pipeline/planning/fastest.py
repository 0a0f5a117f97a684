"""Choose the fastest values of the flags that are `auto`, by the plan.

These flags affect only speed and memory; the training stays the same up to rounding. They set the micro-batch,
gradient checkpointing, the prompts sampled at once, whether the KV cache is freed for updates, the rows of an
evaluation batch, and the ZeRO stage. A CPU has the defaults.

`remedies.py` changes flags that the user gave; this module does not.
"""

import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, product
from math import inf
from typing import Any, Self

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import flag_words
from pipeline.configuration.groups import STAGE
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.rank_rules import (
    BATCHES,
    EVALUATED,
    GENERATED,
    MICRO,
    STEPS,
    Choice,
    contradiction,
    divisors,
    with_micro_batch,
)
from pipeline.configuration.resolved import Resolved
from pipeline.data.batching import SCORING_TOKENS
from pipeline.files import GIB
from pipeline.planning.duration import RECREATE_CACHE_S
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner, fits, lacking, seconds_text

RECOMPUTED, RELEASED = "gradient_checkpointing", "release_inference_cache"
# Rows of a pass without gradients that take less memory than one row with gradients, even with checkpointing.
ROWS_WITHOUT_GRADIENTS = 4
FEWEST_PROMPTS = 8  # sampled at once, if they fit; a decode step of fewer rows takes about as long
ALIKE = 1.05  # largest quotient of two times of a step that count as equal


@dataclass(frozen=True, slots=True)
class Candidate:
    """Values of the flags that are `auto`, and the plan with them.

    flags: the values.
    resolved: the settings with these values.
    plan: the plan of these settings.
    seconds: seconds of an optimizer step, with its share of a rollout; 0 if they are not known.
    lacks: bytes that the GPU or the host lacks, by the high estimate.
    """

    flags: Mapping[str, Any]
    resolved: Resolved
    plan: MemoryPlan
    seconds: float
    lacks: int

    @classmethod
    def of(cls, planner: StagePlanner, resolved: Resolved, flags: Mapping[str, Any]) -> Self:
        """Plan settings with these values of flags. Raises InputError, EnvironmentFault."""
        settings = Choice(flags, Origin(Kind.PLAN, str(planner.target))).of(resolved, planner.target.num_gpus)
        plan, needs = planner.memory(settings), planner.needs(settings)
        lacks = sum(lacking(plan, planner.target, high=True))
        seconds = 0.0 if lacks else sum(planner.seconds(settings, plan).values())
        return cls(flags, settings, plan, seconds / needs.steps_each, lacks)

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return int(self.resolved.config.optimizer.per_device_train_batch_size)

    @property
    def is_best_of_its_kind(self) -> bool:
        """Tell whether no smaller micro-batch can be faster: this one fits, and a KV cache, if any, stays too."""
        return not self.lacks and (self.plan.keeps_buffers or not self.plan.slots)

    @property
    def line(self) -> str:
        """The chosen flags, with time and memory."""
        time = f"{seconds_text(self.seconds)} a step and " if self.seconds else ""
        memory = " to ".join(f"{n / GIB:.1f}" for n in self.plan.reserved())
        lacks = ", which does not fit" if self.lacks else ""
        return f"{choice_text(self.resolved) or 'the defaults'} ({time}{memory} GiB by the plan{lacks})"


def auto_flags(resolved: Resolved) -> list[str]:
    """Return the flags that the plan chooses: flags that are `auto` and unset, of models that the stage has."""
    config = resolved.config
    table = flag_table(type(config)).items()
    return [name for name, flag in table if flag.auto and not config.absent(flag) and not resolved.is_given(name)]


def fastest(planner: StagePlanner, resolved: Resolved) -> Candidate | None:
    """Return the first of `ranked`; None if there is none."""
    return next(iter(ranked(planner, resolved)), None)


def ranked(planner: StagePlanner, resolved: Resolved) -> list[Candidate]:
    """Return the settings that fit by the high estimate, the best first, then the faster ones first.

    There are none on a CPU, and if a GPU's memory is not known; if all flags are given, there is one without a choice.

    - Among times that are alike (ALIKE), the largest micro-batch is best, then the least memory.
    - If times are not known, the first candidate is: the least recomputed, then the most prompts at once.
    - If none fits, there is only the one that lacks least.

    Raises InputError, EnvironmentFault: see `StagePlanner.memory`.
    """
    names = auto_flags(resolved)
    if planner.target.is_cpu or not planner.target.memory:
        return []
    stages = stages_that_fit(planner, resolved, names)
    planned = list(candidates(planner, resolved, names, stages))
    if GENERATED in names and not any(fits(one.plan, planner.target) for one in planned):
        planned += candidates(planner, resolved, names, stages, sizes=range(1, FEWEST_PROMPTS))
    fitting = [one for one in planned if not one.lacks]
    if not fitting:
        return [min(planned, key=lambda one: one.lacks)]
    if not (least := min(one.seconds for one in fitting)):
        return fitting
    alike = [one for one in fitting if one.seconds <= ALIKE * least]
    best = max(alike, key=lambda one: (one.micro_batch, -one.plan.reserved()[0]))
    return [best, *sorted((one for one in fitting if one is not best), key=lambda one: one.seconds)]


def stages_that_fit(planner: StagePlanner, resolved: Resolved, names: Sequence[str]) -> dict[str, int]:
    """Return the first of the ZeRO stages to try whose smallest settings fit; if none do, those that lack least."""
    options, lacks = stages_to_try(planner, resolved, names), list[int]()
    for stages in options if len(options) > 1 else ():
        lacks.append(smallest(planner, resolved, names, stages).lacks)
        if not lacks[-1]:
            return stages
    return options[lacks.index(min(lacks))] if lacks else options[0]


def stages_to_try(planner: StagePlanner, resolved: Resolved, names: Sequence[str]) -> list[dict[str, int]]:
    """Return the ZeRO stages to try for models without a given one, as far as other flags allow.

    On several GPUs that is 2, then 3 for ever more of the models.
    On one GPU, stage 3 partitions nothing, but it gathers one layer at a time. Stage 0 takes 2 bytes a trained weight
    less than 2 in a step, and is slower. There they are tried in the order 2, 0, then 3 for ever more of the models.
    In stage 3 of the pipeline the actor, which also samples, comes before the critic.
    """
    ranks, stage_flags = planner.target.num_gpus, [name for name in names if name.endswith(STAGE)]
    combinations = product((2, 3) if ranks > 1 else (0, 2, 3), repeat=len(stage_flags))
    stages = [dict(zip(reversed(stage_flags), one, strict=True)) for one in combinations]
    allowed = [one for one in stages if not contradiction(resolved.changed(one), ranks)]
    partitioned = [one for one in allowed if 0 not in one.values()]
    tried = partitioned if ranks > 1 else [*partitioned[:1], *allowed[:1], *partitioned[1:]]
    return [one for number, one in enumerate(tried) if one not in tried[:number]] or [{}]


def smallest(planner: StagePlanner, resolved: Resolved, names: Sequence[str], stages: Mapping[str, int]) -> Candidate:
    """Return the candidate of these ZeRO stages that takes least: all recomputed, single rows, the fewest prompts."""
    *_, fewest = prompts_at_once(planner, resolved, names, None)
    recomputed = {name: True for name in names if name.endswith(RECOMPUTED)}
    flags = {**stages, **recomputed, **fewest}
    return planned_size(planner, resolved, names, flags, micro_batches(resolved, names)[0])


def candidates(
    planner: StagePlanner,
    resolved: Resolved,
    names: Sequence[str],
    stages: Mapping[str, int],
    sizes: range | None = None,
) -> Iterator[Candidate]:
    """Yield the settings that may be the fastest: with ever more recomputation, and ever fewer prompts at once.

    The search ends early in two cases. If the largest micro-batch fits without recomputation and with all prompts at
    once, nothing is faster. If fewer prompts at once are slower, still fewer gain nothing.

    Args:
        stages: ZeRO stages, which all candidates have.
        sizes: numbers of prompts at once; None: see `prompts_at_once`.
    """
    micro, recomputed = micro_batches(resolved, names), [name for name in names if name.endswith(RECOMPUTED)]
    for switched in accumulate(recomputed, lambda before, name: [*before, name], initial=list[str]()):
        switches, best = {name: name in switched for name in recomputed}, inf
        for at_once in prompts_at_once(planner, resolved, names, sizes):
            given = {**stages, **switches, **at_once}
            planned = cache(partial(planned_size, planner, resolved, names, given))
            yield from (ones := list(of_sizes(planned, micro)))
            if planned(micro[-1]).is_best_of_its_kind:
                if not any(switches.values()):
                    return
                break
            if least_seconds(ones) > ALIKE * best:
                break
            best = min(best, *(one.seconds for one in ones if one.seconds), inf)


def least_seconds(ones: Sequence[Candidate]) -> float:
    """Return a lower bound of the seconds of a step with fewer prompts at once than these candidates; 0 if not known.

    Fewer prompts do not lower the memory of an update, so they allow the same micro-batches. At best their KV cache
    stays in memory, and need not be allocated again.
    """
    fitting = [one for one in ones if not one.lacks]
    gain = 0.0 if all(one.plan.keeps_buffers for one in fitting) else RECREATE_CACHE_S
    return min((one.seconds for one in fitting), default=0.0) - gain


def planned_size(
    planner: StagePlanner, resolved: Resolved, names: Sequence[str], flags: Mapping[str, int], size: int
) -> Candidate:
    """Plan micro-batches of `size` rows together with these flags, and choose the flags that follow from them.

    If the KV cache does not fit beside an update, `--release-inference-cache` is chosen. Else the first update would
    run out of memory before the run frees the cache.
    """
    chosen = {**flags, **(with_micro_batch(resolved, size) if MICRO in names else {})}
    if EVALUATED in names:
        chosen[EVALUATED] = evaluation_batch(planner, resolved, micro_batch=size, at_once=flags.get(GENERATED, 0))
    rollout = planner.needs(resolved).rollout
    if RELEASED not in names or rollout is None or rollout.always_released:
        return Candidate.of(planner, resolved, chosen)
    staying = Candidate.of(planner, resolved, chosen | {RELEASED: False})
    return staying if staying.plan.keeps_buffers else Candidate.of(planner, resolved, chosen | {RELEASED: True})


def choice_text(resolved: Resolved) -> str:
    """Return the chosen ZeRO stages, and other chosen values that differ from the defaults, as flags."""
    table, items = flag_table(type(resolved.config)), resolved.values
    chosen = {name: items[name] for name, origin in resolved.origins.items() if origin.kind is Kind.PLAN}
    shown = {name: value for name, value in chosen.items() if value != table[name].default or name.endswith(STAGE)}
    return shlex.join(flag_words(shown))


def of_sizes(planned: Callable[[int], Candidate], sizes: Sequence[int]) -> Iterator[Candidate]:
    """Yield the largest of ascending micro-batches that fits, then smaller ones as long as they may be faster.

    If none fits, yield the smallest.
    """
    last = len(sizes) - 1
    if planned(sizes[last]).lacks:
        last = max(0, bisect_left(sizes, True, key=lambda size: bool(planned(size).lacks)) - 1)
    yield (largest := planned(sizes[last]))
    for size in reversed(sizes[:last]):
        if largest.is_best_of_its_kind or largest.lacks or (one := planned(size)).seconds > largest.seconds:
            return
        yield one


def micro_batches(resolved: Resolved, names: Sequence[str]) -> list[int]:
    """Return the sizes of micro-batches that divide a rank's rows of an optimizer step, ascending."""
    optimizer = resolved.config.optimizer
    micro, steps = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps
    # A DeepSpeed JSON that names the accumulation fixes it.
    if MICRO not in names or resolved.origins[STEPS].kind is Kind.DEEPSPEED_JSON:
        return [micro]
    return divisors(micro * steps, up_to=micro * steps)


def prompts_at_once(
    planner: StagePlanner, resolved: Resolved, names: Sequence[str], sizes: range | None
) -> Iterator[dict[str, int]]:
    """Yield the flag for the prompts sampled at once: all of a rank's rollout, then half of them, and so on.

    Yields only {} if the stage samples nothing, or if a flag gives the number of batches of a rollout.

    Args:
        sizes: numbers that may be yielded; None: all prompts of a rollout, and halves down to FEWEST_PROMPTS.
    """
    if GENERATED not in names or resolved.values[BATCHES]:
        if sizes is None:
            yield {}
        return
    ranks = planner.target.num_gpus
    prompts = max(1, resolved.config.rollout_size(ranks).prompts // ranks)
    sizes = sizes or range(min(prompts, FEWEST_PROMPTS), prompts + 1)
    while prompts:
        if prompts in sizes:
            yield {GENERATED: prompts}
        prompts //= 2


def evaluation_batch(planner: StagePlanner, resolved: Resolved, *, micro_batch: int, at_once: int) -> int:
    """Return the rows of an evaluation batch.

    The batch has as many tokens as a scoring pass, and so few rows that it takes less memory than an update. Stage 3
    plans no evaluation: it takes the larger of the default and the micro-batch, limited to the slots of a rollout.

    Args:
        at_once: prompts of a rollout that are sampled at once; 0: as the flag says.
    """
    passes, rows = planner.needs(resolved).phases.get("evaluate"), resolved.config.optimizer.per_device_eval_batch_size
    if not passes:
        size = resolved.config.rollout_size(planner.target.num_gpus)
        size = replace(size, per_device_generation_batch_size=at_once) if at_once else size
        return min(size.slots, max(micro_batch, min(rows, size.at_once)))
    tokens = sum(one.rows * one.length for one in passes) // rows
    return max(1, min(SCORING_TOKENS // tokens, ROWS_WITHOUT_GRADIENTS * micro_batch))
