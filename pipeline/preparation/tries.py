"""Three steps of a stage with other flags, in a folder that is deleted: whether they have memory."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import errors
from pipeline.configuration.flags import flag_words
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import TRIED
from pipeline.configuration.stage import Stage
from pipeline.errors import say
from pipeline.launching.job import Job
from pipeline.launching.request import LaunchRequest
from pipeline.launching.verdict import Verdict
from pipeline.out_of_memory import HALVED, Halved, halved_as_text
from pipeline.processes import Signals
from pipeline.run.evaluations import metrics_of

MEMORY_WORDS = "out of memory"
TRIAL_STEPS = 3  # steps that a micro-batch must have memory for


def training_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's optimizer steps so far."""
    return list(metrics_of(run_dir, having=b'"step_s"'))


class Trial(Job):
    """A job that has ended well after a few steps."""

    def ending(self) -> Verdict | None:
        """Return the verdict if the job is to end now."""
        is_done = len(training_lines(self._watch.run_dir)) >= TRIAL_STEPS
        return Verdict(errors.EXIT_DONE, []) if is_done else super().ending()


def try_batch(
    stage: Stage,
    request: LaunchRequest,
    words: list[str],
    resolved: Resolved,
    flags: dict[str, Any],
    *,
    signals: Signals,
    folder: Path,
) -> bool:
    """Run three steps of a stage with other `words` and `flags`, in a folder that is deleted; return True if they fit.

    If another phase runs out of memory, whatever the micro-batch, the steps start again with fewer rows in that phase,
    as in a run.

    Raises:
        StoppedRun: on a signal. RunError: it ended for another reason than want of memory.
    """
    size, run_dir = flags["per_device_train_batch_size"], folder / "run"
    halved: Halved = {}
    folders = {"run_dir": run_dir, "output_dir": folder / "model"}
    tried = flag_words({**TRIED, **resolved.config.probe_overrides, **folders, **flags})
    request = replace(request, argv=(*request.argv, *words, *tried))
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        run_dir.mkdir(parents=True)
        variables = {HALVED: halved_as_text(halved)}
        with (folder / "output.txt").open("wb") as output:
            job = Trial(
                run_dir, stage, request, resolved, signals=signals, variables=variables, output=output, is_again=True
            )
            try:
                ended = job.supervise()
            finally:
                job.kill()
        halved = ended.halved
        if not halved or "train" in halved:
            break
    lines, text = training_lines(run_dir), "\n".join(line.removeprefix("error: ") for line in ended.lines)
    if ended.code == errors.EXIT_STOPPED or job.got_stop_signal:
        shutil.rmtree(folder, ignore_errors=True)
        raise errors.StoppedRun("stopped while micro-batches were tried; the same command starts again")
    lacks = bool(halved) or MEMORY_WORDS in text or any(line["micro_batch_size"] < size for line in lines)
    if not lacks and ended.code != errors.EXIT_DONE:
        raise errors.RunError(f"--auto-batch: a micro-batch of {size}: {text}; its output: {folder / 'output.txt'}")
    peak = f", {lines[-1]['gpu_memory_gib']:.1f} GiB" if lines and "gpu_memory_gib" in lines[-1] else ""
    seconds = f", {min(line['step_s'] for line in lines):.3g} s a step" if lines else ""
    say(f"auto_batch: micro-batch {size}: {'out of memory' if lacks else f'fits{peak}{seconds}'}")
    shutil.rmtree(folder, ignore_errors=True)
    return not lacks
