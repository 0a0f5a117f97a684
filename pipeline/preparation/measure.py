"""The settings that --auto measure chooses: a few steps with each of several, in a folder that is deleted.

The supervisor of a job measures before the ranks start. They get the choice as an environment variable.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline import errors
from pipeline.configuration.flags import flag_words
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.rank_rules import Choice, with_micro_batch
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import TRIED
from pipeline.configuration.stage import Stage
from pipeline.errors import say
from pipeline.launching.hosts import ranks_by_host
from pipeline.launching.job import Job
from pipeline.launching.request import LaunchRequest
from pipeline.launching.target import this_machine
from pipeline.launching.verdict import Verdict
from pipeline.planning.fastest import auto_flags, choice_text, micro_batches, ranked
from pipeline.planning.page import StagePlanner
from pipeline.preparation.plans import MEASURED, stage_planner
from pipeline.processes import Signals
from pipeline.run.earlier_runs import chosen_before, is_finished
from pipeline.run.evaluations import metrics_of

MEMORY_WORDS = "out of memory"
MOST_MEASURED = 3  # settings that are tried
TRIAL_STEPS = 3  # steps that settings must have memory for


def training_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's optimizer steps so far."""
    return list(metrics_of(run_dir, having=b'"step_s"'))


class Trial(Job):
    """A job that has ended well after a few steps."""

    def ending(self) -> Verdict | None:
        """Return the verdict if the job is to end now."""
        is_done = len(training_lines(self._watch.run_dir)) >= TRIAL_STEPS
        return Verdict(errors.EXIT_DONE, []) if is_done else super().ending()


def measured(stage: Stage, resolved: Resolved, request: LaunchRequest, signals: Signals) -> dict[str, str]:
    """Return the environment variable with the flags of the fastest settings that have memory; say what each takes.

    {} where nothing is chosen: the run is finished or resumes with its earlier choice, there are no two settings, or
    none has memory.

    Raises:
        InputError: ranks of other hosts are started by hand; see `is_finished`. RunError, StoppedRun: see
            `seconds_of_steps`.
    """
    if request.launcher == "none" and not request.is_on_one_machine:
        raise errors.InputError("--auto measure: the number of ranks must be known here, and the job start here")
    slots, run_dir = ranks_by_host(request), stage.run_folder(resolved.config.run)
    planner, resolved = stage_planner(stage, resolved, this_machine(*slots), {})
    if is_finished(run_dir, resolved.config, ranks=sum(slots)) or chosen_before(stage, resolved):
        return {}
    if len(options := to_measure(planner, resolved)) < 2:
        say("auto measure: nothing to measure: the flags leave no second setting to try")
        return {}
    times: dict[str, float] = {}
    for flags in options:
        settings, text = Choice(flags, Origin(Kind.PLAN)).of(resolved, sum(slots)), json.dumps(flags)
        variables = {MEASURED: text, "WANDB_MODE": "disabled"}  # which a DeepSpeed JSON may switch on
        folder = run_dir / "auto_measure"
        seconds = seconds_of_steps(stage, request, settings, variables, signals=signals, folder=folder)
        words = choice_text(settings) or "the defaults"
        say(f"auto measure: {words}: {f'{seconds:.3g} s a step' if seconds else MEMORY_WORDS}")
        times |= {text: seconds} if seconds else {}
    if not times:
        say("auto measure: none of them has memory; the run starts as the plan says")
    return {MEASURED: min(times, key=times.__getitem__)} if times else {}


def to_measure(planner: StagePlanner, resolved: Resolved) -> list[Mapping[str, Any]]:
    """Return the flags of the plan's best settings, then of half, twice or a quarter of the micro-batch.

    On a CPU, which the plan chooses nothing for, the first one is the micro-batch as it is.
    """
    best = [one.flags for one in ranked(planner, resolved)][:MOST_MEASURED] or [{}]
    settings = Choice(best[0], Origin(Kind.PLAN)).of(resolved, planner.target.num_gpus)
    sizes, size = micro_batches(resolved, auto_flags(resolved)), settings.config.optimizer.per_device_train_batch_size
    options = [*filter(None, best)]
    for one in (size, size // 2, 2 * size, size // 4):
        flags = {**best[0], **with_micro_batch(settings, one)} if one in sizes and len(sizes) > 1 else {}
        options += [flags] if flags and flags not in options else []
    return options[:MOST_MEASURED]


def seconds_of_steps(
    stage: Stage,
    request: LaunchRequest,
    resolved: Resolved,
    variables: Mapping[str, str],
    *,
    signals: Signals,
    folder: Path,
) -> float:
    """Run three steps of a stage; return the seconds of a step without the first, which also compiles.

    It is 0 if they lack memory, in whichever phase.

    Args:
        resolved: the settings. variables: environment variables that give them to the ranks.

    Raises:
        StoppedRun: on a signal. RunError: it ended for another reason than want of memory.
    """
    size, run_dir = resolved.config.optimizer.per_device_train_batch_size, folder / "run"
    folders = {"run_dir": run_dir, "output_dir": folder / "model"}
    given, tried = resolved.values, {**TRIED, **resolved.config.probe_overrides, **folders}
    # A flag that the method does not read, such as one of a critic, is refused even at its default.
    words = flag_words({name: value for name, value in tried.items() if given.get(name) != value})
    request = replace(request, argv=(*request.argv, *words))
    shutil.rmtree(folder, ignore_errors=True)
    run_dir.mkdir(parents=True)
    with (folder / "output.txt").open("wb") as output:
        job = Trial(
            run_dir, stage, request, resolved, signals=signals, variables=variables, output=output, is_again=True
        )
        try:
            ended = job.supervise()
        finally:
            job.kill()
    lines = training_lines(run_dir)
    # Ranks that end before they start print their error themselves.
    said = ended.lines or (folder / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
    text = "\n".join(line.removeprefix("error: ") for line in said)
    if ended.code == errors.EXIT_STOPPED or job.got_stop_signal:
        shutil.rmtree(folder, ignore_errors=True)
        raise errors.StoppedRun("stopped while settings were tried; the same command starts again")
    lacks = bool(ended.halved) or MEMORY_WORDS in text or any(line["micro_batch_size"] < size for line in lines)
    if not lacks and ended.code != errors.EXIT_DONE:
        fault = errors.RunError(f"--auto measure: micro-batches of {size}: {text}; its output: {folder / 'output.txt'}")
        fault.code = ended.code
        raise fault
    shutil.rmtree(folder, ignore_errors=True)
    return 0.0 if lacks or not lines else fmean(line["step_s"] for line in lines[1:] or lines)
