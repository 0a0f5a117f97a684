"""The dry run of a stage prints its plan, and what its flags and DeepSpeed's JSON are if asked to; it starts nothing.

`rlhf train --dry-run`, the supervisor of a launch script and a stage's own `--dry-run` call it. Imports no torch until
models are planned.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

from pipeline.configuration.ds_config import Json, Placement
from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import Resolved
from pipeline.configuration.global_batch import with_ranks
from pipeline.configuration.resume_rules import batch_sizes, memory_flags
from pipeline.errors import EnvironmentFault, InputError, RunError
from pipeline.launching.machine import device_kind
from pipeline.launching.preflight import NOTHING_MADE, look_before_start, module_of_stage, sample_sources, start_models
from pipeline.launching.target import GIB, Target, parse_target, this_machine, with_constants
from pipeline.rendezvous import local_size, num_ranks
from pipeline.run.evaluations import memory_peaks, run_flags
from pipeline.run.layout import model_folders, run_folder

NOTHING_STARTED = "dry run: nothing was started"


def engine_jsons(resolved: Resolved, section: str, *, ranks: int | None) -> dict[str, Json]:
    """Return the DeepSpeed JSON of each engine of a stage, by the engine's name.

    Args:
        section: the stage: sft, reward or ppo.
        ranks: None where only the launcher will know.

    Raises:
        InputError: settings that contradict each other, one per line.
    """
    described = resolved.config.run.target
    target = parse_target(described) if described else None
    resolved, device = with_ranks(resolved, ranks), ("cpu" if target.is_cpu else "cuda") if target else device_kind()
    config = resolved.config
    asked, own = config.deepspeed.dtype, target.dtype if target else "bf16" if device == "cuda" else "fp32"
    placement = Placement(
        device=device,
        dtype=own if asked == "auto" else asked,
        ranks=ranks,
        run_dir=run_folder(config.run, section),
        one_node=target is not None and target.hosts == 1,
    )
    jsons: dict[str, Json] = config.engine_jsons(resolved.origins, placement)
    return jsons


def show_stage(resolved: Resolved, section: str, *, ranks: int | None) -> None:
    """Print value and origin of each flag, then the DeepSpeed JSON of each engine. Raises InputError."""
    resolved = with_ranks(resolved, ranks)
    jsons = engine_jsons(resolved, section, ranks=ranks)
    if resolved.config.run.explain:
        for name, value in flat_items(resolved.config):
            print(f"  {name:<34} {value!s:<30} {resolved.origins[name]}")
    for line in resolved.notes:
        print(f"  note: {line}")
    if resolved.config.run.explain:
        for name, content in jsons.items():
            print(f"  DeepSpeed JSON of the {name}: {json.dumps(content)}")


def planning_module(name: str) -> Any:
    """Import a module of the planner by its name: it knows models and stages, which are above this package."""
    return importlib.import_module(f"pipeline.planning.{name}")


def stage_planner(given: Resolved, section: str, target: Target, made: Mapping[str, str]) -> tuple[Any, Resolved]:
    """Return the `StagePlanner` of a stage on a target, with its measured constants, and the settings on so many ranks.

    made: folder of an earlier stage's output -> the model that it starts from.

    Raises:
        InputError: settings that do not go with the number of ranks.
    """
    resolved = with_ranks(given, target.num_gpus)
    jsons_of = partial(engine_jsons, section=section, ranks=target.num_gpus)
    needs = importlib.import_module(f"{module_of_stage(resolved.config)}.needs").needs
    return planning_module("page").StagePlanner(needs, jsons_of, dict(made), with_constants(target)), resolved


def plan_stages(
    stages: Mapping[str, Resolved], *, slots: Sequence[int] | None, made: Mapping[str, str] = NOTHING_MADE
) -> None:
    """Print the plan of each stage, by its section: sizes, batches, memory, and a ladder of changes if it does not fit.

    Args:
        slots: ranks of each machine; ignored where `--target` describes others. None: not known.
        made: see `look_before_start`.

    Raises:
        InputError, EnvironmentFault: a line for each stage that does not fit, or has models that cannot be planned.
    """
    page, ladder = (planning_module(name) for name in ("page", "ladder"))
    made, errors, unplanned = dict(made), list[str](), dict[str, list[str]]()  # unplanned: reason -> sections
    kind: type[RunError] = EnvironmentFault
    for section, given in stages.items():
        described = given.config.run.target
        target = parse_target(described) if described else None if slots is None else this_machine(*slots)
        if target is None:
            print(f"plan of {section}: none: the number of ranks is not known here; describe the GPUs by --target")
            continue
        planner, resolved = stage_planner(given, section, target, made)
        target = planner.target
        start = start_models(resolved.config, made)[0].path
        start = made.get(start, start)
        made |= {str(folder): start for folder in model_folders(resolved.config, section)[:1]}
        samples = list(sample_sources(resolved.config, section, start))
        steps = num_steps(resolved.config, [sample.rows for sample in samples], target.num_gpus)
        try:
            lines, memory = page.stage_page(planner, resolved, steps)
        except RunError as error:
            print(f"plan of {section}: none: {str(error).partition(';')[0]}")
            unplanned.setdefault(str(error), []).append(section)
            kind = InputError if isinstance(error, InputError) else kind
            continue
        data = [f"  data     {sample.line}" for sample in samples if sample.line]
        print(
            f"plan of {section}, {lines[0]}",
            *lines[1:],
            *data,
            *measured_lines(resolved.config, section, memory),
            sep="\n",
        )
        if not page.fits(memory, target):
            last = list(ladder.changes(planner, resolved))[-1:]
            changes_it = resolved.config.run.auto_fit and bool(last) and page.fits(last[0].plan, target)
            how = "--auto_fit makes it fit" if changes_it else "to make it fit"
            print(f"  {how}, each with those before it:", *ladder.ladder(planner, resolved), sep="\n    ")
            if not changes_it:
                here = target.is_cpu and not target.described
                elsewhere = "; for GPUs that are not here give --target, as 8xH100-80GB" if here else ""
                errors.append(f"{section}: {page.verdict(memory, target)} ({target}){elsewhere}")
        errors += [f"{section}: {fault}" for fault in planner.disk_faults(resolved, memory)]
    errors += [f"{', '.join(sections)}: not planned: {reason}" for reason, sections in unplanned.items()]
    if errors:
        raise kind("\n".join(errors))


def num_steps(config: Any, rows: Sequence[float | None], ranks: int) -> int:
    """Return the optimizer steps of a run: --max_steps, else about those of its epochs; 0 where rows are unknown."""
    if config.run.max_steps or not rows or None in rows:
        return int(config.run.max_steps)
    sizes, total = batch_sizes(config, ranks), sum(filter(None, rows))
    per_step, prompts = sizes["rows of an optimizer step"], sizes.get("prompts of a rollout")
    if prompts is None:
        return max(1, ceil(config.run.num_train_epochs * ceil(total / per_step)))
    responses = prompts * config.sampling.num_samples_per_prompt
    rollouts = max(1, ceil(config.run.num_train_epochs * ceil(total / prompts)))
    return rollouts * (responses // per_step) * int(config.ppo.ppo_epochs)


def measured_lines(config: Any, section: str, memory: Any) -> list[str]:
    """Return the planned peaks beside those of the last run in the stage's folder: of phases, and on the host."""
    folder = run_folder(config.run, section)
    planned = {phase: (peak.total, "low") for phase, peak in memory.phases.items()}
    planned["host_memory"] = (memory.on_host[0] // memory.per_host, "expected")
    peaks = ", ".join(
        f"{phase} planned {planned[phase][0] / GIB:.1f} ({planned[phase][1]}), last measured {value:.1f}"
        for phase, value in memory_peaks(folder).items()
    )
    if not peaks:
        return []
    saved, asked = run_flags(folder), memory_flags(config)
    others = [f"--{name} {saved[name]}" for name, value in asked.items() if saved.get(name, value) != value]
    return [f"  measured {peaks} GiB in {folder}{', then with ' if others else ''}{' '.join(others)}"]


def look_and_plan(
    stages: Mapping[str, Resolved],
    *,
    slots: Sequence[int] | None,
    made: Mapping[str, str] = NOTHING_MADE,
    named_by_section: bool = False,
) -> None:
    """Print notes of `look_before_start` and the plan of each stage, also where this machine lacks something.

    Raises:
        InputError, EnvironmentFault: all that would end the run, one per line.
    """
    configs, faults = {section: resolved.config for section, resolved in stages.items()}, list[str]()
    try:
        for line in look_before_start(configs, dry_run=True, named_by_section=named_by_section, made=made):
            print(f"  note: {line}")
    except EnvironmentFault as fault:
        faults.append(str(fault))
    try:
        plan_stages(stages, slots=slots, made=made)
    except InputError as error:
        raise InputError("\n".join([*faults, str(error)])) from None
    except EnvironmentFault as fault:
        faults.append(str(fault))
    if faults:
        raise EnvironmentFault("\n".join(faults))


def dry_run_stage(resolved: Resolved, section: str, *, slots: Sequence[int] | None) -> None:
    """Print what a stage would run with, and look at its models, data, disk and memory.

    slots: ranks of each machine; None: not known.

    Raises:
        InputError, EnvironmentFault: what would end the run.
    """
    described = resolved.config.run.target
    ranks = parse_target(described).num_gpus if described else None if slots is None else sum(slots)
    show_stage(resolved, section, ranks=ranks)
    try:
        look_and_plan({section: resolved}, slots=slots)
    finally:
        print(NOTHING_STARTED)


def dry_run_own_stage(resolved: Resolved, section: str) -> None:
    """Make the dry run of the stage that this process is a rank of. Raises InputError, EnvironmentFault."""
    ranks, here = num_ranks(), local_size()
    hosts, rest = divmod(ranks, here)
    slots = [here] * hosts + [rest] * bool(rest)
    if hosts > 1 and not resolved.config.run.target:
        machines = " + ".join(map(str, slots))
        print(f"  note: {ranks} ranks, {here} of them here: planned on machines like this one, of {machines} ranks")
    dry_run_stage(resolved, section, slots=slots)
