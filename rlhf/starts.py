"""Describe the start models of a plan's stages and choose their GPUs, before any stage starts."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.configuration.flag_table import flat_items
from pipeline.data.sources import parse_path
from pipeline.errors import dashed, show
from pipeline.files import has_config, read_object
from pipeline.launching.machine import choose_gpus
from pipeline.run.earlier_runs import earlier_settings
from pipeline.run.layout import done_file, environment_file, stages_folder
from rlhf.train_plan import Plan, PlannedStage, target_of


def start_lines(plan: Plan) -> Iterator[str]:
    """Yield a line on each stage's preset, and one where its start model is, or would be, the output of stage 1."""
    defaults_note = "no preset; flags that --config and the command line leave unset have their defaults"
    for planned in plan.chosen:
        section, preset, path = planned.stage.section, planned.resolved.preset, planned.base
        yield f"{section}: {f'preset {preset}' if preset else defaults_note}"
        is_later = plan.stages[1] not in plan.chosen and planned.stage.config.makes_chat_model
        sft_model, base = plan.stages[1].model_dir, plan.stages[1].base
        if is_later and path == str(sft_model) and has_config(sft_model):
            yield f"{section} starts from {path}, which stage 1 trained"
        elif is_later and path == base and not sft_model.exists():
            yield f"{section} starts from {path} itself: there is no {sft_model}"
        if plan.stages[1] not in plan.chosen and not environment_file(planned.run_dir).exists():
            yield from task_lines(planned)


def task_lines(planned: PlannedStage) -> Iterator[str]:
    """Yield the command that shows whether a task can be learned, for a first run whose functions compare answers."""
    config: Any = planned.resolved.config
    values = dict(flat_items(config))
    functions, data = values.get("reward_function", []), values["data_path"]
    compares = (functions or values.get("environment")) and (config.method.compares or values["group_baseline"])
    if not compares or values["reward_model_name_or_path"] or len(data) != 1:
        return
    if any(one.lstrip().startswith("{") for one in functions):  # their settings may be secret
        return
    argv = ["rlhf", "reward", *functions, "--data", parse_path(data[0])[0], "--model", planned.base]
    argv += ["--tools", *values["tools"]] if values["tools"] else []
    for name in ("column_map", "environment"):
        argv += [dashed(name), values[name]] if values[name] else []
    turns = ["max_turns"] if config.tools.by_title else []
    for name in ("num_samples_per_prompt", "max_prompt_seq_len", "max_answer_seq_len", *turns):
        argv += [dashed(name), str(values[name])]
    argv += ["--output", str(stages_folder(planned.run_dir))]
    yield f"whether this model can learn this task: {shlex.join(argv)}"


def on_free_gpus(plan: Plan, *, starts: bool) -> Plan:
    """Choose free GPUs for --deployment-type auto, print them, and return the plan with the launcher's flags for them.

    A resumed run gets as many GPUs as its last start had. starts: False for a dry run.

    Raises:
        EnvironmentFault: too few GPUs are free.
    """
    config, flags, line = plan.config, {"deployment_type": "single_node"}, ""
    if config.deployment_type != "auto" or target_of(plan):
        return plan
    if not (config.include or config.exclude):
        resumed = [(planned.run_dir, planned.resolved.config.run.resumes_from) for planned in plan.chosen]
        records = [
            read_object(environment_file(folder)) for folder, resumes in resumed if earlier_settings(folder, resumes)
        ]
        last_size = max((start.get("num_ranks", 0) for start in records), default=0)
        has_ended = all(done_file(folder).is_file() and resumes == "auto" for folder, resumes in resumed)
        flags, line = choose_gpus(config.num_gpus, last_size, starts=starts and not has_ended)
    if line:
        show(f"note: {line}")
    return replace(plan, config=config.model_copy(update=flags))
