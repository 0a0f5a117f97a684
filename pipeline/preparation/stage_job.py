"""The job of one stage from its request to its exit code: flags that are chosen first, the job, and its new starts."""

import os
import signal
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace

from pipeline import errors
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import values_by_rule
from pipeline.configuration.run_flags import RESUME
from pipeline.configuration.stage import Stage
from pipeline.errors import RunError, say
from pipeline.launching.hosts import ranks_by_host
from pipeline.launching.job import Job, start_early, start_here
from pipeline.launching.ranks import Started, kill_ranks, wait_for_ranks
from pipeline.launching.remote_ranks import MEASURING, check_hosts
from pipeline.launching.request import LaunchRequest
from pipeline.out_of_memory import HALVED, batches_in_words, halved_as_text
from pipeline.preparation.dry_run import dry_run_stage
from pipeline.preparation.stage_entry import read_flags
from pipeline.processes import WAITS, Signals, end_with_parent, is_of_train, wait_for_go
from pipeline.run.lock import locked
from pipeline.run.outcome import check_nobody_left, clear_outcomes
from pipeline.run.reporter import Reporter


def run_job(stage: Stage, request: LaunchRequest, signals: Signals, *, sections: Collection[str] = ()) -> int:
    """Run a stage as requested; print how it ended; return the exit code.

    Args:
        sections: those that a YAML file may have; empty: not all are known here.

    Raises:
        InputError: wrong flags or hosts. EnvironmentFault: the folder is in use, not writable, or the port is taken.
    """
    # SIGTERM when the `rlhf train` that started this process dies; one started by hand may outlive its shell.
    if is_of_train():
        end_with_parent(os.getppid(), signal.SIGTERM)
    # While `rlhf train` looks at models and data; nothing of the run is touched before it gives its word. Ranks start
    # before the flags are read, because a DeepSpeed JSON among these takes an import of deepspeed, of seconds.
    early = start_early(stage, request) if WAITS in os.environ and may_start_early(request) else {}
    try:
        resolved = read_flags(stage, list(request.argv), sections=sections)
    except RunError:
        kill_ranks(early)
        raise
    if resolved.config.run.starts_nothing:
        slots = None if resolved.config.run.target else ranks_by_host(request)
        dry_run_stage(stage, resolved, slots=slots)
        return errors.EXIT_DONE
    if not wait_for_go():
        kill_ranks(early)
        return errors.EXIT_STOPPED
    run_dir = stage.run_folder(resolved.config.run)
    if request.check:
        return check(stage, request, resolved, signals)
    outputs = resolved.config.outputs
    with locked(run_dir, outputs) if request.is_first_host else nullcontext():
        variables = dict[str, str]()
        if resolved.config.run.auto == "measure":
            from pipeline.preparation.measure import measured  # it imports torch

            variables = measured(stage, resolved, request, signals)
        return supervise(stage, request, resolved, signals, early=early, variables=variables)


def may_start_early(request: LaunchRequest) -> bool:
    """Return True if a request alone says what its ranks are started with, and their start leaves no trace."""
    return request.is_on_one_machine and not (request.check or request.enable_each_rank_log)


def supervise(
    stage: Stage,
    request: LaunchRequest,
    resolved: Resolved,
    signals: Signals,
    *,
    early: Started,
    variables: Mapping[str, str],
) -> int:
    """Run the ranks, again with smaller batches where they lack memory; return the exit code of the last start.

    Args:
        early: the ranks of the first start where they are started already; else empty.
        variables: environment variables of the ranks.
    """
    run_dir, given = stage.run_folder(resolved.config.run), request
    # `rlhf train` has one report of all its stages, which it writes last.
    reporter = Reporter(run_dir, all_stages=is_of_train(), is_on=resolved.config.run.report and request.is_first_host)
    while True:
        check_nobody_left(run_dir)
        if request.is_first_host:
            clear_outcomes(run_dir)
        is_again = HALVED in variables or resolved.config.run.auto == "measure"  # ranks of a start before this one
        job = Job(
            run_dir, stage, request, resolved, signals=signals, variables=variables, is_again=is_again, early=early
        )
        try:
            verdict = job.supervise(reporter.poll)
        finally:
            job.kill()
            reporter.stop()
        if not verdict.halved:
            break
        early = {}
        # Any checkpoint in the folder is this run's: older ones were deleted before step 1.
        resumes = any(run_dir.glob("checkpoints/*/manifest.json"))
        request = replace(given, argv=(*given.argv, *(RESUME if resumes else ())))
        variables = {**variables, HALVED: halved_as_text(verdict.halved)}
        start = "from the last checkpoint" if resumes else "from the first step"
        cause, batches = verdict.lines[0].removeprefix("error: "), batches_in_words(verdict.halved)
        say(f"{cause}; starting again {start} with {batches}")
    say(*verdict.lines)
    if not is_of_train() and signals.second is None:
        reporter.finish()
    return verdict.code


def check(stage: Stage, request: LaunchRequest, resolved: Resolved, signals: Signals) -> int:
    """Look at the hosts of a request, or measure the devices of this machine; return the exit code.

    Raises:
        EnvironmentFault: see `check_hosts`.
    """
    if request.is_on_one_machine:
        return wait_for_ranks(start_here(replace(request, argv=()), MEASURING, os.environ), signals)
    data, models = (values_by_rule(resolved.config, kind) for kind in ("data", "model"))
    inputs = [(name, path, "data") for name, paths in data.items() for path in paths]
    inputs += [(name, path, "model") for name, path in models.items()]
    run_dir = stage.run_folder(resolved.config.run)
    with locked(run_dir):
        check_hosts(request, f"{stage.package}.main", run_dir, signals=signals, inputs=inputs)
    return errors.EXIT_DONE
