"""Flags that are chosen before a job starts (--auto-fit, --auto-batch, --autotuning), as words and as a preset."""

import shlex
from functools import partial

from pipeline import errors
from pipeline.configuration.flags import Resolved, flag_words
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import Stage
from pipeline.errors import say
from pipeline.files import cache_folder
from pipeline.launching.request import LaunchRequest
from pipeline.preparation.autotuning import tuned_flags
from pipeline.preparation.tries import try_batch
from pipeline.processes import Signals
from pipeline.run.earlier_runs import automatic_words, write_choice
from pipeline.run.layout import automatic_file


def searches(request: LaunchRequest, resolved: Resolved) -> bool:
    """Return True if flags are chosen before the ranks start."""
    run: RunConfig = resolved.config.run
    return bool(request.autotuning or run.searches)


def chosen_words(stage: Stage, resolved: Resolved, request: LaunchRequest, signals: Signals) -> list[str]:
    """Return the words that --auto-fit, --auto-batch and --autotuning add to a job, and write them as a preset.

    Raises:
        InputError, EnvironmentFault, StoppedRun: see `chosen_flags` and `tuned_flags`.
    """
    run: RunConfig = resolved.config.run
    run_dir = stage.run_folder(run)
    file, tuning = automatic_file(run_dir), request.autotuning
    if (words := automatic_words(resolved, run_dir, tuned=tuning == "run")) is not None:
        say(f"as chosen before ({file}): {shlex.join(words) or 'nothing that no flag of this command replaces'}")
        return words
    if tuning:
        if stage.number != 1 or not request.is_on_one_machine or run.searches:
            raise errors.InputError("--autotuning: for stage 1 on one machine, and without --auto-fit and --auto-batch")
        flags = tuned_flags(f"{stage.package}.main", request, signals, run_dir, resolved)
    else:
        from pipeline.preparation.automatic import chosen_flags  # it imports torch

        cache = cache_folder(resolved.config.data.data_output_path or None)
        tries = partial(try_batch, stage, request, signals=signals, folder=run_dir / "auto_batch")
        flags = chosen_flags(stage, resolved, request, tries, cache=cache)
    file.unlink(missing_ok=True)  # of an earlier run, which nothing is to resume with
    if flags:
        write_choice(file, resolved, flags)
        say(f"written to {file}, a file for --preset or --config")
    return flag_words(flags)
