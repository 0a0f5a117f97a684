"""What stages start from, whose preset that brings, and on which GPUs of this machine they start."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import read_yaml, scan
from pipeline.configuration.names import Names
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import Stage, Start
from pipeline.errors import InputError
from pipeline.files import has_config, read_object
from pipeline.launching.free_gpus import choose_gpus
from pipeline.run.earlier_runs import checkpoint_state, earlier_settings
from pipeline.run.layout import done_file, environment_file
from rlhf.stages import SECTIONS
from rlhf.train_config import TrainConfig, known_model

if TYPE_CHECKING:
    from rlhf.train_plan import Plan, PlannedStage


def takes_method(stage: Stage, method: str) -> bool:
    """Return True if a stage has a flag for this value of --method; one with a single method need not."""
    return method in stage.methods and "method" in Names(stage.config).known


def given_values(
    stage: Stage, config: TrainConfig, config_file: str, override: list[str]
) -> tuple[set[str], dict[str, object]]:
    """Return the flags that a --config file gives a stage, and the values of all that are given."""
    names = Names(stage.config).known
    in_file = read_yaml(config_file, stage.section, SECTIONS)[0] if config_file else {}
    given: dict[str, object] = {"method": config.method} if takes_method(stage, config.method) else {}
    given |= {names.get(name, name): value for name, value in in_file.items()}
    given |= {names.get(name, name): words[-1] if words else "" for name, words in scan(override)}
    return {names[name] for name in in_file if name in names}, given


def with_named_start(
    config: TrainConfig, starts: Mapping[str, Start], values: Mapping[str, Any], typed: Collection[str]
) -> TrainConfig:
    """Return the own flags with the start model that a stage's flags name, unless --actor-model or --reward-model do.

    The stage then has the preset of that model, and later stages follow it.

    Args:
        starts: of the stage. values: of its flags, those that were given. typed: own flags that were given.

    Raises:
        InputError: the model looks like the name of another one.
    """
    prefix, start = next(iter(starts.items()))
    flag, name = Stage.path_flag(prefix), f"{start.follows}_model"
    if not (model := values.get(flag)) or name in typed:
        return config
    try:
        known_model(str(model))
    except InputError as error:
        raise InputError(f"--{flag}: {error}") from None
    return config.model_copy(update={name: str(model)})


def outputs_of(before: Mapping[int, "PlannedStage"], config: TrainConfig, typed: Collection[str]) -> dict[str, str]:
    """Return section -> what a stage starts from that follows the one of this section: its model folder.

    That is the base model itself where it was named, stage 1 does not run now, and neither a model nor a run of it is
    there.
    """
    is_named = "actor_model" in typed or config.actor_model != TrainConfig().actor_model
    outputs: dict[str, str] = {}
    for number, planned in before.items():
        is_to_come = number in config.step or planned.model_dir.exists() or planned.run_dir.exists()
        is_base = is_named and not is_to_come and planned.stage.makes_chat_model
        outputs[planned.stage.section] = base_of(planned) if is_base else str(planned.model_dir)
    return outputs


def base_of(planned: "PlannedStage") -> str:
    """Return the model that the first trained model of a stage starts from."""
    prefix = next(iter(planned.stage.starts))
    return str(dict(flat_items(planned.resolved.config))[planned.stage.path_flag(prefix)])


def chained_flags(
    stage: Stage, starts: Mapping[str, Start], out: Path, outputs: Mapping[str, str], given: Mapping[str, object]
) -> dict[str, str]:
    """Return the starts that follow from the stages before; a --config file or an override (`given`) may name others.

    A model that starts as the stage's first one does, a critic as its actor, follows what is given for that one.
    """
    first = next(iter(starts))
    by_hand = given.get(Stage.path_flag(first))
    folders = {
        Stage.path_flag(prefix): str(by_hand if by_hand and start == starts[first] else outputs.get(start.section, out))
        for prefix, start in starts.items()
        if start.section
    }
    return folders | {"output_dir": str(out / stage.folder)}


def preset_of_run(stage: Stage, run: RunConfig) -> str | None:
    """Return the preset that the run to resume from, or the finished one, has; "": none; None: no run is there."""
    folder = stage.run_folder(run)
    if not earlier_settings(folder, run.resumes_from):
        return None
    values = read_object(
        (folder if run.resumes_from == "auto" else Path(run.resumes_from).resolve().parents[1]) / "config.json"
    )
    origins = [str(entry["from"]) for entry in values.values() if isinstance(entry, dict) and "from" in entry]
    found = (re.search(rf"presets/([\w.-]+)\.{stage.section}\.yaml", origin) for origin in origins)
    return next((match[1] for match in found if match), "") if origins else None


def start_lines(plan: "Plan") -> Iterator[str]:
    """Yield a line on the preset of each stage that runs, and on a start that an earlier stage makes or would make."""
    for planned in plan.chosen:
        section, preset = planned.stage.section, planned.resolved.preset
        none = "no preset; the built-in defaults hold where --config and flags say nothing"
        yield f"{section}: {f'preset {preset}' if preset else none}"
        values = dict(flat_items(planned.resolved.config))
        first, start = next(iter(planned.stage.starts_given(values).items()))
        path = values[planned.stage.path_flag(first)]
        for source in plan.stages.values():
            if source.stage.section != start.section or source in plan.chosen:
                continue
            if path == str(source.model_dir) and has_config(source.model_dir):
                yield f"{section} starts from {path}, which stage {source.stage.number} made"
            elif path == base_of(source) and not source.model_dir.exists():
                yield f"{section} starts from {path} itself: there is no {source.model_dir}"


def on_free_gpus(plan: "Plan", *, starts: bool) -> "Plan":
    """Return the plan with the launcher's flags for free GPUs (--deployment-type auto), and print which these are.

    starts: False for a dry run. Raises EnvironmentFault: too few are free.
    """
    config, flags, line = plan.config, {"deployment_type": "single_node"}, ""
    if config.deployment_type != "auto":
        return plan
    if not (config.include or config.exclude):
        had, has_ended = ranks_before(plan)
        flags, line = choose_gpus(config.num_gpus, had, starts=starts and not has_ended)
    if line:
        print(f"note: {line}", flush=True)
    return replace(plan, config=config.model_copy(update=flags))


def ranks_before(plan: "Plan") -> tuple[int, bool]:
    """Return the ranks of the last chosen stage whose run is there (0: none), and True where all have ended."""
    had, has_ended = 0, True
    for planned in plan.chosen:
        run = planned.resolved.config.run
        saved = checkpoint_state(planned.run_dir, run.resumes_from)[1]
        done = read_object(done_file(planned.run_dir)) if run.resumes_from == "auto" else {}
        last = read_object(environment_file(planned.run_dir)).get("num_ranks", 0) if done else 0
        had = saved.get("world_size", last) or had
        has_ended = has_ended and bool(done) and run.max_steps <= done.get("steps", 0)
    return had, has_ended
