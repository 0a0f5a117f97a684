"""The fastest way to run a stage that its plan finds: values of the flags that are `auto`.

None of them changes what is trained, but for rounding: how an optimizer step is cut into micro-batches, whether
activations are recomputed, how many prompts are sampled at once, whether their KV cache is given back, the rows of an
evaluation batch, the sizes of buckets; and on one GPU whether each layer is gathered, as ZeRO stage 3 of a preset does.
A CPU has their defaults. The ladder (`ladder.py`) goes the other way: it changes what was given until a plan fits.
"""

import shlex
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import inf
from typing import Any, Self

from pipeline.configuration.ds_config import device_of
from pipeline.configuration.flag_checks import ZERO_STAGES, unmet_need
from pipeline.configuration.flag_table import CHOSEN, flag_table, flat_items
from pipeline.configuration.flags import Resolved, flag_words
from pipeline.configuration.global_batch import (
    BATCHES,
    EVALUATED,
    GENERATED,
    MICRO,
    STEPS,
    Choice,
    contradiction,
    cut,
    divisors,
    is_by_hand,
)
from pipeline.configuration.groups import STAGE
from pipeline.data.batching import SCORING_TOKENS
from pipeline.files import GIB
from pipeline.planning.duration import GIVEN_BACK_S
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner, fits, lacking, seconds_text

RECOMPUTED, RELEASED = "gradient_checkpointing", "release_inference_cache"
# Elements of a bucket: with overlap DeepSpeed's 5e8 hold 1.9 GiB of a GPU, and these are sent at the same speed.
BUCKETS = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 200_000_000)
# Rows of a pass without gradients that take less than one of a pass with them, also where its layers are recomputed.
ROWS_WITHOUT_GRADIENTS = 4
FEWEST_PROMPTS = 8  # sampled at once where as many fit: a decode step of fewer takes hardly less time
ALIKE = 1.05  # times of a step whose quotient is at most this are alike


@dataclass(frozen=True, slots=True)
class Candidate:
    """Values of flags that are `auto`, with the plan of the settings that have them.

    flags: the values.
    resolved: the settings.
    plan: their plan.
    seconds: seconds of an optimizer step, with its share of a rollout; 0 where they are not known.
    lacks: bytes that the GPU or the host lacks, by the high estimate.
    """

    flags: Mapping[str, Any]
    resolved: Resolved
    plan: MemoryPlan
    seconds: float
    lacks: int

    @classmethod
    def of(cls, planner: StagePlanner, resolved: Resolved, flags: Mapping[str, Any]) -> Self:
        """Plan settings with other values of some flags. Raises InputError, EnvironmentFault."""
        settings = Choice(flags, f"{CHOSEN}{planner.target}").of(resolved, planner.target.num_gpus)
        plan, needs = planner.memory(settings), planner.needs(settings)
        lacks = sum(lacking(plan, planner.target, high=True))
        seconds = 0.0 if lacks else sum(planner.seconds(settings, plan)[0].values())
        return cls(flags, settings, plan, seconds / needs.steps_each, lacks)

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return int(self.resolved.config.optimizer.per_device_train_batch_size)

    @property
    def is_best_of_its_kind(self) -> bool:
        """Tell whether no smaller micro-batch can be faster: it fits, and beside a KV cache, if any, that stays."""
        return not self.lacks and (self.plan.keeps_rollout or not self.plan.slots)

    @property
    def line(self) -> str:
        """The choice, and what it gives."""
        time = f"{seconds_text(self.seconds)} a step and " if self.seconds else ""
        memory = " to ".join(f"{n / GIB:.1f}" for n in self.plan.reserved())
        lacks = ", more than there is" if self.lacks else ""
        return f"{choice_in_words(self.resolved) or 'the defaults'} ({time}{memory} GiB by the plan{lacks})"


def auto_flags(resolved: Resolved) -> list[str]:
    """Return the flags that the plan chooses: those that are `auto`, of models that there are, and that nobody gave."""
    config = resolved.config
    table = flag_table(type(config)).items()
    return [name for name, flag in table if flag.auto and not config.absent(flag) and not resolved.is_given(name)]


def fastest(planner: StagePlanner, resolved: Resolved) -> Candidate | None:
    """Return the fastest settings that fit by the high estimate; None on a CPU, or where a GPU's memory is not known.

    Of those whose times are alike the one with the largest micro-batch, then the one that takes least. Where times are
    not known, the first: with the least recomputed, then the most prompts at once. Where none fits, the one that lacks
    least.

    Raises InputError, EnvironmentFault: see `StagePlanner.memory`.
    """
    names = auto_flags(resolved)
    if planner.target.is_cpu or not planner.target.memory or not names:
        return None
    whole = whole_weights(planner, resolved)
    planned = list(candidates(planner, resolved, names, whole))
    if whole and not any(fits(one.plan, planner.target) for one in planned):  # the ladder offloads weights of stage 3
        whole = {}
        planned = list(candidates(planner, resolved, names, whole))
    if GENERATED in names and not any(fits(one.plan, planner.target) for one in planned):
        planned += candidates(planner, resolved, names, whole, sizes=range(1, FEWEST_PROMPTS))
    fitting = [one for one in planned if not one.lacks]
    if not fitting:
        return min(planned, key=lambda one: one.lacks)
    if not (best := min(one.seconds for one in fitting)):
        return fitting[0]
    alike = [one for one in fitting if one.seconds <= ALIKE * best]
    return max(alike, key=lambda one: (one.micro_batch, -one.plan.reserved()[0]))


def whole_weights(planner: StagePlanner, resolved: Resolved) -> dict[str, int]:
    """Return ZeRO stage 2 for the models whose weights a preset partitions, where one GPU holds all of them anyway.

    Stage 3 gathers each layer before it is used, from one rank as from many. {} where weights are offloaded, or a flag
    is given by hand that only stage 3 reads.
    """
    values, origins = dict(flat_items(resolved.config)), resolved.origins
    names = [name for name in values if name.endswith(STAGE) and (values[name], origins[name]) == (3, resolved.preset)]
    if planner.target.num_gpus > 1 or not names:
        return {}
    whole, kind = dict.fromkeys(names, 2), type(resolved.config)
    given = [
        flag for name, flag in flag_table(kind).items() if flag.needs in ZERO_STAGES and is_by_hand(resolved, name)
    ]
    if any(unmet_need(flag, values | whole, kind, on_cpu=False) for flag in given):
        return {}
    changed = Choice(whole, CHOSEN).of(resolved, 1)
    # What offloads weights contradicts stage 2; of a preset it would give way.
    alike = dict(flat_items(changed.config)) == values | whole and not contradiction(changed, 1)
    return whole if alike else {}


def candidates(
    planner: StagePlanner,
    resolved: Resolved,
    names: Sequence[str],
    whole: Mapping[str, int],
    sizes: range | None = None,
) -> Iterator[Candidate]:
    """Yield the settings that may be the fastest, with more and more recomputed, and fewer and fewer prompts at once.

    whole: flags that all of them have. sizes: numbers of prompts at once; None: see `prompts_at_once`.

    Without any recomputation, and with all prompts at once, the largest micro-batch is the fastest: where it fits,
    nothing else is tried. Where fewer prompts at once are slower, still fewer are too, or what they may gain is less.
    """
    micro, recomputed = micro_batches(resolved, names), [name for name in names if name.endswith(RECOMPUTED)]
    shared = {**whole, **buckets(planner, resolved, names, whole)}
    for switched in accumulate(recomputed, lambda before, name: [*before, name], initial=list[str]()):
        switches, best = {name: name in switched for name in recomputed}, inf
        for at_once in prompts_at_once(planner, resolved, names, sizes):
            given = {**shared, **switches, **at_once}
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
    """Return the least seconds of a step with fewer prompts at once than these candidates have, 0 if not known.

    An update needs no less memory with fewer prompts: where one of these fits, so do the same micro-batches, and all
    that they may gain is a KV cache that stays.
    """
    fitting = [one for one in ones if not one.lacks]
    gain = 0.0 if all(one.plan.keeps_rollout for one in fitting) else GIVEN_BACK_S
    return min((one.seconds for one in fitting), default=0.0) - gain


def planned_size(
    planner: StagePlanner, resolved: Resolved, names: Sequence[str], flags: Mapping[str, int], size: int
) -> Candidate:
    """Plan micro-batches of `size` rows with these other flags, and what follows from them.

    A KV cache that would not stay is given back from the first rollout on, before an update runs out of memory.
    """
    chosen = {**flags, **(cut(resolved, size) if MICRO in names else {})}
    if EVALUATED in names:
        chosen[EVALUATED] = evaluation_batch(planner, resolved, micro_batch=size, at_once=flags.get(GENERATED, 0))
    rollout = planner.needs(resolved).rollout
    if RELEASED not in names or rollout is None or rollout.always_released:
        return Candidate.of(planner, resolved, chosen)
    staying = Candidate.of(planner, resolved, chosen | {RELEASED: False})
    return staying if staying.plan.keeps_rollout else Candidate.of(planner, resolved, chosen | {RELEASED: True})


def buckets(planner: StagePlanner, resolved: Resolved, auto: Sequence[str], whole: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of DeepSpeed's buckets: between GPUs, and on one for what it offloads or ZeRO stage 3 keeps."""
    zeros = [engine["zero_optimization"] for engine in planner.jsons_of(resolved).values()]
    devices = {device_of(zero, block) for zero in zeros for block in ("offload_optimizer", "offload_param")}
    partitions = not whole and any(zero["stage"] == 3 for zero in zeros)
    has_any = planner.target.num_gpus > 1 or devices != {"none"} or partitions
    return {name: elements for name, elements in BUCKETS.items() if has_any and name in auto}


def choice_in_words(resolved: Resolved) -> str:
    """Return the values that were chosen and are not the defaults of their flags, as a command line has them.

    Without the sizes of buckets, on which the others do not depend.
    """
    table, items = flag_table(type(resolved.config)), dict(flat_items(resolved.config))
    origins = {name: origin for name, origin in resolved.origins.items() if name not in BUCKETS}
    chosen = {name: items[name] for name, origin in origins.items() if origin.startswith(CHOSEN)}
    return shlex.join(flag_words({name: value for name, value in chosen.items() if value != table[name].default}))


def of_sizes(planned: Callable[[int], Candidate], sizes: Sequence[int]) -> Iterator[Candidate]:
    """Yield the largest of ascending micro-batches that fits, and smaller ones as long as they may be faster.

    The smallest where none fits.
    """
    place = len(sizes) - 1
    if planned(sizes[place]).lacks:
        place = max(0, bisect_left(sizes, True, key=lambda size: bool(planned(size).lacks)) - 1)
    yield (largest := planned(sizes[place]))
    for size in reversed(sizes[:place]):
        if largest.is_best_of_its_kind or largest.lacks or (one := planned(size)).seconds > largest.seconds:
            return
        yield one


def micro_batches(resolved: Resolved, names: Sequence[str]) -> list[int]:
    """Return the micro-batches into which a rank's rows of an optimizer step can be cut, ascending."""
    optimizer = resolved.config.optimizer
    micro, steps = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps
    # A DeepSpeed JSON that names the accumulation is held to it.
    if MICRO not in names or resolved.origins[STEPS] == resolved.config.deepspeed.deepspeed_config:
        return [micro]
    return divisors(micro * steps, up_to=micro * steps)


def prompts_at_once(
    planner: StagePlanner, resolved: Resolved, names: Sequence[str], sizes: range | None
) -> Iterator[dict[str, int]]:
    """Yield the flag of the prompts that are sampled at once: all of a rank's rollout, then half of them, and so on.

    {} alone where the stage samples nothing, or its rollouts are so many of them as a flag says. sizes: yield these
    numbers alone; None: all of a rollout, and its halves that are not below FEWEST_PROMPTS.
    """
    if GENERATED not in names or dict(flat_items(resolved.config))[BATCHES]:
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

    It has as many tokens as a scoring pass, but no more rows than surely take less than an update's. In stage 3, which
    plans no evaluation, it is the default or an update's, but not above what a rollout samples at once: an evaluation's
    rows are sampled in as many slots. at_once: prompts of a rollout that are (0: as many as the flag says).
    """
    passes, rows = planner.needs(resolved).phases.get("evaluate"), resolved.config.optimizer.per_device_eval_batch_size
    if not passes:
        size = resolved.config.rollout_size(planner.target.num_gpus)
        size = replace(size, per_device_generation_batch_size=at_once) if at_once else size
        return min(size.slots, max(micro_batch, min(rows, size.at_once)))
    tokens = sum(one.rows * one.length for one in passes) // rows
    return max(1, min(SCORING_TOKENS // tokens, ROWS_WITHOUT_GRADIENTS * micro_batch))
