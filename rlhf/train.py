"""Run stages 1 (SFT), 2 (reward model) and 3 (PPO) by launch scripts; each starts from the models of earlier stages.

All settings of all stages are checked before the first one starts. The module imports neither torch nor deepspeed.
"""

import os
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

from pipeline.configuration.flags import scan, stage_arguments
from pipeline.configuration.names import without_flag
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resume_rules import values_by_rule
from pipeline.configuration.run_flags import RESUME
from pipeline.console import outlive_console, raise_on_interrupt, shell_lines, terminal_width, with_hyphens, wrapped
from pipeline.errors import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, InputError, RunError, dashed, print_error, say, show
from pipeline.files import has_config
from pipeline.launching.scripts import Script, position_in_pipeline, run_script, started_early
from pipeline.preparation.dry_run import NOTHING_STARTED, show_flags, show_notes, shows_data
from pipeline.preparation.engine_jsons import engine_jsons
from pipeline.redact import masked
from pipeline.run.earlier_runs import is_finished
from pipeline.run.evaluations import cost, recorded_seconds, verdict
from pipeline.run.output_checks import check_outputs
from pipeline.run.reporter import Reporter
from rlhf.preflight import check_machine, start_preflight
from rlhf.stages import SECTIONS, stages_of_method
from rlhf.starts import on_free_gpus, start_lines
from rlhf.train_config import TrainConfig, as_override, split_common, split_overrides, stages_alone
from rlhf.train_plan import (
    Plan,
    PlannedStage,
    command_of,
    make_plan,
    on_target,
    ranks_of,
    slots_of,
    target_of,
    why_not_common,
)

DEMO = Path("output/demo")
MEANING = {
    1: "a fault of the program, or a process that was killed",
    2: "bad input",
    3: "the machine lacks what the run needs",
    4: "training diverged",
    5: "no usable checkpoint",
    75: "stopped on request; the same command resumes",
    130: "killed by Ctrl-C (SIGINT)",
    143: "killed by SIGTERM",
}


def check_stages(plan: Plan) -> None:
    """Raise InputError with a line for each stage whose DeepSpeed settings contradict each other."""
    ranks = ranks_of(plan)
    errors: list[str] = []
    for planned in plan.chosen:
        try:
            engine_jsons(planned.stage, planned.resolved, ranks=ranks)
        except InputError as error:
            errors += [as_override(line, planned.stage.section) for line in str(error).splitlines()]
    if errors:
        raise InputError("\n".join(errors))


def missing_inputs(plan: Plan) -> dict[str, PlannedStage]:
    """Return flag -> stage of each start model that does not exist and that a stage outside this run trains."""
    missing: dict[str, PlannedStage] = {}
    of_section = {planned.stage.section: planned for planned in plan.stages.values()}
    for planned in plan.chosen:
        values = planned.resolved.values
        for prefix, start in planned.stage.starts(values).items():
            source, flag = of_section.get(start.section), planned.stage.path_flag(prefix)
            if source is None or source in plan.chosen or values[flag] != str(source.model_dir):
                continue
            if not (has_config(source.model_dir) and any(source.model_dir.rglob("*.safetensors"))):
                missing[dashed(f"{planned.stage.section}.{flag}")] = source
    return missing


def check_inputs(plan: Plan, argv: list[str], prog: str) -> None:
    """Raise InputError if a stage needs a model that does not exist and that no stage of this run trains."""
    errors = []
    for flag, source in missing_inputs(plan).items():
        command = command_for(source.stage.number, argv, prog)
        errors.append(f"{flag}: {source.model_dir}: got no config.json and *.safetensors; train it: {command}")
    if errors:
        raise InputError("\n".join(errors))


def command_for(number: int, argv: list[str], prog: str, *, without: Collection[str] = ()) -> str:
    """Return the command that runs stage `number` with the flags of `argv` that it has, except those in `without`."""
    of_train, common = split_common(split_overrides(argv, SECTIONS[1:])[0])
    stage = stages_of_method(stages_alone(of_train).method)[number]
    others = [next(scan(words))[0] for words in common if why_not_common(words[0], {number: stage})]
    for name in ("step", "dry_run", "explain", *without, *others):
        argv = without_flag(argv, name)
    return shlex.join([*prog.split(), "--step", str(number), *with_hyphens(argv)])


def finished_stages(plan: Plan) -> set[int]:
    """Return the numbers of the chosen stages that are finished with the settings and inputs of this plan.

    Raises:
        InputError: a stage is finished with other settings; one line per difference.
    """
    ranks, finished = ranks_of(plan), set[int]()
    retrained: dict[str, int] = {}  # model folder -> number of the stage that trains it in this run
    errors: list[str] = []
    for planned in plan.chosen:
        stage, section, config = planned.stage, planned.stage.section, with_ranks(planned.resolved, ranks).config
        try:
            if not is_finished(planned.run_dir, config, ranks=ranks):
                retrained[str(planned.model_dir)] = stage.number
                continue
        except InputError as error:
            errors += [as_override(line, section) for line in str(error).splitlines()]
        finished.add(stage.number)
        for name, path in values_by_rule(config, "model").items():
            if path in retrained:
                errors.append(
                    f"{dashed(f'{section}.{name}')}: stage {retrained[path]} retrains {path}; this stage is finished "
                    f"with the earlier model; give --{section}.overwrite too"
                )
    if errors:
        raise InputError("\n".join(errors))
    return finished


def show_plan(plan: Plan, finished: Collection[int]) -> None:
    """Print command and dry run of each stage, and for a `finished` one that it is finished."""
    ranks = ranks_of(plan)
    for planned in plan.chosen:
        is_done = planned.stage.number in finished
        show(finished_line(planned) if is_done else header(planned, plan.config))
        show_notes(planned.stage, planned.resolved, ranks=ranks)
        show_flags(planned.stage, planned.resolved, ranks=ranks)
    sys.stdout.flush()


def finished_line(planned: PlannedStage) -> str:
    return f"== stage {planned.stage.number}: finished already ({planned.model_dir}); --overwrite runs it again"


def header(planned: PlannedStage, config: TrainConfig) -> str:
    """Return a stage's title and the command that starts it, without secrets in settings of functions."""
    argv = command_of(planned, config)
    for name in ("dry_run", "explain", "target"):  # the printed command starts the stage
        argv = without_flag(argv, name)
    title = planned.stage.title_of(planned.resolved.config)
    return f"== stage {planned.stage.number}: {title}\n$ {shell_lines(masked(argv))}"


def with_position(planned: PlannedStage, plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a stage: its position in the plan, and the earlier durations of later stages."""
    position = plan.chosen.index(planned) + 1
    seconds = [recorded_seconds(later.run_dir) for later in plan.chosen[position:]]
    return {**environment, **position_in_pipeline(position, len(plan.chosen), seconds)}


def run_stage(planned: PlannedStage, config: TrainConfig, environment: Mapping[str, str], early: Script | None) -> int:
    """Run one stage, restart it up to --max-restarts times after a fault, print its outcome, return its exit code.

    early: the process of its launch script if it was started early.
    """
    stage = planned.stage
    show(header(planned, config))
    start = time.monotonic()
    start_time = time.time()
    code, stop_requested = run_script(command_of(planned, config), environment, early)
    for restart in range(1, config.max_restarts + 1):
        if code != EXIT_FAULT or stop_requested:
            break
        show(f"== stage {stage.number}: restart {restart} of {config.max_restarts}, after a fault")
        # --overwrite and --resume apply to the first start; a restart resumes from checkpoints saved since.
        saved = [file.stat().st_mtime for file in planned.run_dir.glob("checkpoints/*/manifest.json")]
        again = list(RESUME) if max(saved, default=0.0) > start_time else []
        code, stop_requested = run_script([*command_of(planned, config), *again], environment)
    duration = timedelta(seconds=round(time.monotonic() - start))
    if code == EXIT_DONE:
        outcome = verdict(planned.run_dir)
        parts = [f"done in {duration}", outcome.figures, outcome.words, cost(planned.run_dir)]
        summary = ", ".join(filter(None, parts))
        show(wrapped(f"== stage {stage.number}: {summary}; model: {planned.model_dir}", terminal_width()))
    else:
        kind = "stopped" if code == EXIT_STOPPED else "error"
        end = f"stage {stage.number} ended with {code} ({MEANING.get(code, 'killed')}) after {duration}"
        say(f"{kind}: {end}; log: {planned.run_dir / 'log.txt'}")
    return code


def run(argv: list[str], prog: str) -> int:
    """Run the stages that `argv` selects; return the exit code. Raises RunError for errors before a stage starts."""
    plan = make_plan(argv, prog=prog)
    if shows_data(planned.resolved for planned in plan.chosen):
        return show_rows(plan)
    dry_run = plan.config.dry_run or any(planned.resolved.config.run.starts_nothing for planned in plan.chosen)
    plan = on_free_gpus(plan, starts=not dry_run)
    bases = check_plan(plan, argv, prog)
    finished = finished_stages(plan) if target_of(plan) is None else set[int]()  # other hardware: all stages
    if dry_run:
        outlive_console(needs_output=True)
    announce(plan, bases if dry_run else {})
    # Launch scripts use this interpreter, or that of PYTHON, not the `python` of their shell.
    environment = {"PYTHON": sys.executable, **os.environ}
    to_run = [planned for planned in plan.chosen if planned.stage.number not in finished]
    # The first stage's ranks import torch during the preflight; a stage that is refused writes nothing.
    early_stages = [one for one in to_run[:1] if starts_early(one, plan.config, dry_run=dry_run)]
    starts = [(command_of(one, plan.config), with_position(one, plan, environment)) for one in early_stages]
    with started_early(*starts[0]) if starts else nullcontext() as early:
        code = look_first(plan, to_run, environment["PYTHON"], bases=bases, dry_run=dry_run)
        if dry_run:
            show_plan(on_target(plan), finished)
            show(NOTHING_STARTED)
        if dry_run or code != EXIT_DONE:
            return code
        if plan.config.check:
            # On one machine the check reads no data.
            stages = plan.chosen if plan.config.deployment_type == "multi_node" else plan.chosen[:1]
            return max(run_script(command_of(planned, plan.config), environment)[0] for planned in stages)
        code = run_stages(plan, finished, environment, early)
    if to_run:
        write_reports(plan)
    if code == EXIT_DONE:
        show(f"next: {following(plan, argv, prog)}")
    return code


def starts_early(planned: PlannedStage, config: TrainConfig, *, dry_run: bool) -> bool:
    """Return True if the ranks of a stage may be started before its preflight has ended.

    Those of --auto measure are started with flags that their supervisor chooses.
    """
    is_other = dry_run or config.check or planned.resolved.config.run.auto == "measure"
    return not is_other and config.deployment_type != "multi_node"


def check_plan(plan: Plan, argv: list[str], prog: str) -> dict[str, str]:
    """Check settings, start models, machine and outputs; return {missing model folder: its start model}.

    Only a plan for another machine may lack models.

    Raises:
        RunError: see `check_stages`, `check_inputs`, `check_machine`, `check_outputs`.
    """
    check_stages(plan)
    bases = dict[str, str]()
    if target_of(plan) is None:
        check_inputs(plan, argv, prog)
        check_machine(plan.config)
    else:
        bases = {str(planned.model_dir): planned.base for planned in missing_inputs(plan).values()}
    check_outputs({planned.stage: planned.resolved.config for planned in plan.chosen}, named_by_section=True)
    return bases


def announce(plan: Plan, bases: Mapping[str, str]) -> None:
    """Print notes on presets and start models. bases: folders that are planned as trained from another model."""
    for line in start_lines(plan):
        show(f"note: {line}")
    if {2, 3} <= {*plan.config.step}:
        read = map(str, plan.stages[3].resolved.values.values())
        if plan.stages[2].model_dir not in map(Path, read):
            show("note: stage 3 does not read the reward model of stage 2; --step 1 3 trains none")
    for folder, start in bases.items():
        show(f"note: {folder} does not exist: planned as trained from {start}")


def look_first(
    plan: Plan, to_run: Sequence[PlannedStage], python: str, *, bases: Mapping[str, str], dry_run: bool
) -> int:
    """Run the preflight of the stages to run, and in a dry run their plans; return its exit code."""
    if not to_run:
        return EXIT_DONE
    stages = {planned.stage: planned.argv for planned in to_run}
    code = start_preflight(stages, python, dry_run=dry_run, slots=slots_of(plan), base_of_output=bases)
    if code != EXIT_DONE and "tiny" in (plan.config.actor_model, plan.config.reward_model) and not DEMO.is_dir():
        say(f"note: tiny is the demo's model; `make demo` creates it and its data in {DEMO}")
    return code


def following(plan: Plan, argv: list[str], prog: str) -> str:
    """Return what to do after the stages of a plan have ended well: a command, or advice on one that ended worse."""
    for one in plan.chosen:
        if verdict(one.run_dir).worse:
            section, rate = one.stage.section, one.stage.rate_flag(one.resolved.config)
            again = f"--{section}.overwrite and a lower {dashed(f'{section}.{rate}')}"
            return f"stage {one.stage.number} ended worse than it began: run it again with {again}"
    last = plan.chosen[-1]
    if not last.stage.config.makes_chat_model:
        return command_for(last.stage.number + 1, argv, prog, without=("overwrite", "resume"))
    # The chat command of `python train.py` is `python chat.py`, that of `rlhf train` is `rlhf chat`.
    return f"{prog.replace('train', 'chat')} {shlex.quote(str(last.model_dir))}"


def show_rows(plan: Plan) -> int:
    """Print rows of the chosen stages as they are trained on, even if a start model does not exist yet.

    Returns the exit code.
    """
    outlive_console(needs_output=True)
    bases = {str(planned.model_dir): planned.base for planned in missing_inputs(plan).values()}
    stages = {planned.stage: planned.argv for planned in plan.chosen}
    python = os.environ.get("PYTHON", sys.executable)
    return start_preflight(stages, python, dry_run=True, slots=None, base_of_output=bases)


def run_stages(plan: Plan, finished: Collection[int], environment: Mapping[str, str], early: Script | None) -> int:
    """Run the chosen stages that are not `finished` until one fails; return the last exit code.

    early: the process of the first stage's launch script if it was started early.
    """
    try:
        for planned in plan.chosen:
            if planned.stage.number in finished:
                show(finished_line(planned))
                continue
            placed = with_position(planned, plan, environment)
            if (code := run_stage(planned, plan.config, placed, early)) != EXIT_DONE:
                return code
            early = None
    except KeyboardInterrupt:
        # Nothing is lost between two stages; within a stage the launcher handles the signal.
        say("stopped between two stages; the same command continues")
        return EXIT_STOPPED
    return EXIT_DONE


def write_reports(plan: Plan) -> None:
    """Write a report in each folder with runs of these stages, also of failed ones."""
    runs = [planned.run_dir for planned in plan.chosen if planned.resolved.config.run.report]
    reporters = [Reporter(run_dir, all_stages=True) for run_dir in runs]
    for reporter in {reporter.folder: reporter for reporter in reporters}.values():
        if page := reporter.finish():
            show(f"report: {page}")


def main(argv: list[str] | None = None, *, prog: str = "rlhf train") -> int:
    """Run the stages; returns the exit code. Messages name the program by `prog`."""
    outlive_console()
    argv = stage_arguments(argv)
    try:
        raise_on_interrupt()
        return run(argv, prog)
    except KeyboardInterrupt:
        say("stopped before the first stage; nothing was started")
        return EXIT_STOPPED
    except RunError as error:
        if "--debug" in argv:
            raise
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.train"))
