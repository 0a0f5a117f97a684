"""Flags that are chosen before a job starts: by its plan (--auto-fit), and by running three steps (--auto-batch).

The supervisor of a job calls it. It writes the choice to the run folder as a preset, which a resumed run reads.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.configuration.flags import flag_words
from pipeline.configuration.global_batch import with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import memory_flags, values_by_rule
from pipeline.configuration.stage import Stage
from pipeline.errors import EnvironmentFault, InputError, say
from pipeline.files import read_object, write_json
from pipeline.launching.hosts import ranks_by_host
from pipeline.launching.request import LaunchRequest
from pipeline.launching.target import Target, this_machine
from pipeline.models.source import ModelSource
from pipeline.planning.page import fits, verdict
from pipeline.planning.remedies import Remedies
from pipeline.preparation.plans import choose, stage_planner

# Function that runs the stage with more words and other values of some flags, and tells whether memory suffices.
Tries = Callable[[list[str], Resolved, dict[str, Any]], bool]


def chosen_flags(
    stage: Stage, resolved: Resolved, request: LaunchRequest, tries: Tries, *, cache: Path
) -> dict[str, Any]:
    """Return the flags that --auto-fit and --auto-batch add to a job's command; say each.

    Args:
        cache: the folder that remembers micro-batches.

    Raises:
        EnvironmentFault: no change of flags makes the plan fit, or a single row lacks memory. StoppedRun: on a signal.
    """
    run, slots = resolved.config.run, ranks_by_host(request)
    if request.launcher == "none" and not request.is_on_one_machine:
        raise InputError("--auto-fit and --auto-batch: the number of ranks must be known here, and the job start here")
    target, ranks = this_machine(*slots), sum(slots)
    resolved, flags = with_ranks(resolved, ranks), dict[str, Any]()
    if "auto_fit" in run.searches:
        flags = flags_that_fit(stage, resolved, target)
        resolved = with_ranks(resolved.changed(flags), ranks)
    if run.auto_batch:
        fitting = partial(tries, flag_words(flags))
        flags |= largest_micro_batch(stage, resolved, target, fitting, cache / "micro_batches.json")
    return flags


def flags_that_fit(stage: Stage, resolved: Resolved, target: Target) -> dict[str, Any]:
    """Return the changes of flags that make the plan fit, {} where it fits as it is or no GPU's memory is known.

    Raises:
        EnvironmentFault: the changes that it may take are not enough.
    """
    planner, resolved = stage_planner(stage, resolved, target, {})
    resolved = choose(stage, planner, resolved).of(resolved, target.num_gpus)
    target, plan = planner.target, planner.memory(resolved)
    say(f"auto_fit: {verdict(plan, target)}")
    if fits(plan, target):
        return {}
    answers = Remedies.of(planner, resolved)
    if (answer := answers.chosen(resolved.config.run.auto_fit)) is None:
        raise EnvironmentFault(f"--auto-fit: {verdict(answers.same.plan, target)} ({target}); {answers.instead}")
    for change in answer.changes:
        say(f"auto_fit: {change}")
    say(f"auto_fit: {verdict(answer.plan, target)}")
    return answer.flags


def largest_micro_batch(
    stage: Stage, resolved: Resolved, target: Target, tries: Callable[[Resolved, dict[str, Any]], bool], file: Path
) -> dict[str, Any]:
    """Return the flags of the largest micro-batch that has memory, in optimizer steps of as many rows as before.

    Args:
        tries: runs the stage with other values of these flags, and tells whether it has memory for them.
        file: remembers the micro-batch of each shape of a run.

    Raises:
        EnvironmentFault: a single row lacks memory.
    """
    optimizer = resolved.config.optimizer
    micro = optimizer.per_device_train_batch_size
    rows = micro * optimizer.gradient_accumulation_steps
    remembered, key = read_object(file), shape_key(stage, resolved, target)

    def flags_of(size: int) -> dict[str, Any]:
        accumulation = {} if optimizer.train_batch_size else {"gradient_accumulation_steps": rows // size}
        return {"per_device_train_batch_size": size, **accumulation}

    if remembered.get(key, 0) and rows % remembered[key] == 0:
        say(f"auto_batch: {shlex.join(flag_words(flags_of(remembered[key])))}, as found before ({file})")
        return flags_of(remembered[key])
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
    size = search(lambda size: tries(resolved, flags_of(size)), sizes, start=micro)
    if size is None:
        raise EnvironmentFault("--auto-batch: a micro-batch of 1 lacks memory; --auto-fit changes other flags")
    write_json(file, read_object(file) | {key: size})
    say(f"auto_batch: {shlex.join(flag_words(flags_of(size)))}; remembered in {file}")
    return flags_of(size)


def search(has_memory: Callable[[int], bool], sizes: Sequence[int], *, start: int) -> int | None:
    """Return the largest of ascending `sizes` that has memory, by doubling from `start` and bisection; None: none."""
    low, high, index = -1, len(sizes), sizes.index(start)  # low has memory, high has not
    while low + 1 < high:
        if has_memory(sizes[index]):
            low = index
        else:
            high = index
        index = (low + high) // 2
        if high == len(sizes):
            index = next((n for n in range(low + 1, high) if sizes[n] >= 2 * sizes[low]), high - 1)
    return sizes[low] if low >= 0 else None


def shape_key(stage: Stage, resolved: Resolved, target: Target) -> str:
    """Return what the memory of a stage depends on, as a key of the cache: models, lengths, flags, ranks, device.

    Rates, seeds and paths are left out; a model counts by its config.json.
    """
    config = resolved.config
    paths, flags = values_by_rule(config, "model"), memory_flags(config)
    rows = flags.pop("per_device_train_batch_size") * flags.pop("gradient_accumulation_steps")
    models = {name: ModelSource(path).config.to_json_string() for name, path in paths.items() if path}
    content = json.dumps([flags, rows, models], sort_keys=True, default=str)
    return f"{stage.section}/{hashlib.sha256(content.encode()).hexdigest()[:16]}/{target.num_gpus} x {target.name}"
