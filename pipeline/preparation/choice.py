"""Flags that are chosen before a job starts (--auto-fit, --auto-batch), as words and as a preset."""

import shlex
from functools import partial

from pipeline.configuration.flags import flag_words
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import RunConfig
from pipeline.configuration.stage import Stage
from pipeline.errors import say
from pipeline.files import cache_folder
from pipeline.launching.request import LaunchRequest
from pipeline.preparation.tries import try_batch
from pipeline.processes import Signals
from pipeline.run.earlier_runs import automatic_words, write_choice
from pipeline.run.layout import automatic_file


def chosen_words(stage: Stage, resolved: Resolved, request: LaunchRequest, signals: Signals) -> list[str]:
    """Return the words that --auto-fit and --auto-batch add to a job, and write them as a preset.

    Raises:
        InputError, EnvironmentFault, StoppedRun: see `chosen_flags`.
    """
    run: RunConfig = resolved.config.run
    run_dir = stage.run_folder(run)
    file = automatic_file(run_dir)
    if (words := automatic_words(resolved, run_dir)) is not None:
        say(f"as chosen before ({file}): {shlex.join(words) or 'nothing that no flag of this command replaces'}")
        return words
    from pipeline.preparation.automatic import chosen_flags  # it imports torch

    cache = cache_folder(resolved.config.data.data_output_path or None)
    tries = partial(try_batch, stage, request, signals=signals, folder=run_dir / "auto_batch")
    flags = chosen_flags(stage, resolved, request, tries, cache=cache)
    file.unlink(missing_ok=True)  # of an earlier run, which nothing is to resume with
    if flags:
        write_choice(file, resolved, flags)
        say(f"written to {file}, a file for --preset or --config")
    return flag_words(flags)
