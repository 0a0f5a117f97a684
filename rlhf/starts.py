"""Start models and GPUs of the stages of a plan, printed before they start."""

from collections.abc import Iterator
from dataclasses import replace

from pipeline.errors import show
from pipeline.files import has_config, read_object
from pipeline.launching.machine import choose_gpus
from pipeline.run.earlier_runs import earlier_settings
from pipeline.run.layout import done_file, environment_file
from rlhf.train_plan import Plan, target_of


def start_lines(plan: Plan) -> Iterator[str]:
    """Yield a line on the preset of each stage that runs, and on a start that a stage 1 made or would have made."""
    none = "no preset; the built-in defaults hold where --config and flags say nothing"
    for planned in plan.chosen:
        section, preset, path = planned.stage.section, planned.resolved.preset, planned.base
        yield f"{section}: {f'preset {preset}' if preset else none}"
        is_later = plan.stages[1] not in plan.chosen and planned.stage.makes_chat_model
        made, base = plan.stages[1].model_dir, plan.stages[1].base
        if is_later and path == str(made) and has_config(made):
            yield f"{section} starts from {path}, which stage 1 made"
        elif is_later and path == base and not made.exists():
            yield f"{section} starts from {path} itself: there is no {made}"


def on_free_gpus(plan: Plan, *, starts: bool) -> Plan:
    """Return the plan with the launcher's flags for free GPUs (--deployment-type auto), and print which these are.

    A run to resume gets as many as its last start had. starts: False for a dry run.

    Raises:
        EnvironmentFault: too few are free.
    """
    config, flags, line = plan.config, {"deployment_type": "single_node"}, ""
    if config.deployment_type != "auto" or target_of(plan):
        return plan
    if not (config.include or config.exclude):
        resumed = [(planned.run_dir, planned.resolved.config.run.resumes_from) for planned in plan.chosen]
        records = [
            read_object(environment_file(folder)) for folder, resumes in resumed if earlier_settings(folder, resumes)
        ]
        had = max((start.get("num_ranks", 0) for start in records), default=0)
        has_ended = all(done_file(folder).is_file() and resumes == "auto" for folder, resumes in resumed)
        flags, line = choose_gpus(config.num_gpus, had, starts=starts and not has_ended)
    if line:
        show(f"note: {line}")
    return replace(plan, config=config.model_copy(update=flags))
