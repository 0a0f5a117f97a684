"""Control of a run: when to evaluate, log, save and stop. It has no loop and knows no model.

A loop calls it once per optimizer step. Its decisions are the same on every rank.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pipeline import dist
from pipeline.checkpoints.checkpoint import Content, Saver, attempt
from pipeline.checkpoints.checkpoint_files import delete_older
from pipeline.checkpoints.fingerprint import RunFingerprint
from pipeline.configuration.run_flags import RunConfig
from pipeline.data.counts import Counts
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.errors import EXIT_DONE, EXIT_FAULT, EXIT_STOPPED, DivergedError, InputError, Interrupted
from pipeline.heartbeat import beat
from pipeline.hub import push
from pipeline.run.earlier_runs import write_done
from pipeline.run.host_storage import on_each_storage
from pipeline.run.outcome import supervisor_name
from pipeline.run.reporter import Reporter
from pipeline.run.run import Run
from pipeline.training.halving import Buffers, Halving
from pipeline.training.metrics import Metric
from pipeline.training.page import show_banner, show_end
from pipeline.training.recorder import Recorder
from pipeline.training.steps import Counters, Stopping, divergence_advice

log = logging.getLogger(__name__)


class RunControl:
    """Intervals, metrics, checkpoints and the end of a run.

    Args:
        resumed_step: the step of the checkpoint that the run resumes from, or None.
        metrics: the metrics that the stage declares (stepN/metrics.py).
        shown: metrics in the progress line.
        engines: the models of the run.
        counts: counts of its rows.
        buffers: memory of generation that stays between rollouts.
    """

    def __init__(
        self,
        run: Run,
        fingerprint: RunFingerprint,
        *,
        resumed_step: int | None,
        metrics: Mapping[str, Metric],
        engines: Mapping[str, TrainingEngine | FrozenEngine],
        counts: Counts,
        shown: Sequence[str] = ("loss",),
        buffers: Buffers | None = None,
    ) -> None:
        config: RunConfig = run.resolved.config.run
        start, total_steps = -1 if resumed_step is None else resumed_step, fingerprint.total_steps
        self._began = time.monotonic()
        if run.world.is_main:
            show_banner(run, counts=counts, engines=engines, total_steps=total_steps)
        self.recorder = Recorder(
            run, config, start_step=start, total_steps=total_steps, metrics=metrics, shown=shown, models=engines
        )
        reports = config.report and run.world.is_main and supervisor_name() is None  # which reports by itself
        self._reporter = Reporter(run.folder, is_on=reports)
        self.stopping = Stopping(run)
        self.halving = Halving(run, engines.values(), buffers=buffers)
        run.contents.update(fingerprint.inputs, **fingerprint.fingerprints)
        self._run, self._config, self._fingerprint, self._total_steps = run, config, fingerprint, total_steps
        self._metrics = metrics
        self._saver = Saver(run, fingerprint, keep=config.keep_checkpoints, background=config.save_in_background)
        self._written: Mapping[str, Any] | None = None  # the counters of the last checkpoint that this process wrote
        self._saved_step = max(start, 0)  # before the first step there is nothing to save

    def evaluation_is_due(self, state: Counters) -> bool:
        """Return True if `--eval-interval` sets an evaluation at this step; without the flag, only before step 1."""
        interval = self._config.eval_interval
        return state.evaluated != state.step and (state.step % interval == 0 if interval else state.step == 0)

    def save_is_due(self, state: Counters) -> bool:
        """Return True if `--save-steps` sets a checkpoint at this step that is not yet written."""
        every = self._config.save_steps
        return every > 0 and state.step % every == 0 and state.step > self._saved_step

    def stop_if_requested(self) -> None:
        """Raise Interrupted on all ranks if any of them got a stop request. A collective."""
        self.stopping.between_steps()

    def begin(self, phase: str) -> None:
        """Begin a phase of the step (engine.memory.PHASES), whose time and peak memory are measured separately."""
        self.recorder.begin(phase)

    def log(
        self, state: Counters, values: Mapping[str, float], *, seconds: float, num_tokens: int, num_rows: int
    ) -> None:
        """Write the metrics of an optimizer step; complete a checkpoint if its background write has ended."""
        requested = self._run.resolved.config.optimizer.per_device_train_batch_size
        values = {**values, "micro_batch_size": state.batch_size("train", requested)}
        self.recorder.write_training(state.step, values, seconds=seconds, num_tokens=num_tokens, num_rows=num_rows)
        attempt(self._saver.poll)

    def save(self, state: Counters, content: Content, save_models: Callable[[], None]) -> None:
        """Write a checkpoint and the model folders. If the disk is full, log that, and training continues."""
        beat("save", state.step)
        self._saved_step = state.step
        attempt(lambda: self._write(state, content))
        attempt(save_models)
        self._reporter.poll()

    @contextmanager
    def resumable(self, state: Counters, content: Callable[[], Content]) -> Iterator[None]:
        """Run the block; on Interrupted, write a checkpoint of the last whole step.

        Raises:
            StoppedRun: in place of Interrupted, with exit code 75. If Interrupted carries another error, that one.
        """
        try:
            yield
        except Interrupted as interruption:
            beat("save", state.step)
            self._write(state, content())
            self._saver.finish()
            self.recorder.close(interruption.error.code if interruption.error else EXIT_STOPPED)
            raise interruption.error or self._run.stopped(state.step, self._total_steps) from None
        except Exception:
            self.recorder.close(EXIT_FAULT)
            raise
        finally:
            self.recorder.end_progress()
            self._reporter.stop()

    def finish(self, state: Counters, content: Content, save_models: Callable[[], None]) -> None:
        """Write the model folders and the last checkpoint, and mark the run as done.

        Unless `--keep-checkpoints` was given, earlier checkpoints are deleted, since no run resumes from them any more.

        Raises:
            DivergedError: every step was skipped because of values that were not finite, so nothing was trained.
            InputError: every step was skipped because its rows had nothing to learn from.
            EnvironmentFault: a file could not be written, and the run is not done; or the run is done, and
                --push-to-hub failed.
        """
        if state.step and state.skipped_updates == state.step:
            if not state.bad_in_a_row:  # all values were finite: the rows had nothing to learn from
                raise InputError(
                    f"none of {state.step} steps had anything to learn from; nothing is saved; the warning of each "
                    f"says why, in {self._run.folder / 'log.txt'}"
                )
            raise DivergedError(
                f"all {state.step} steps were skipped: nothing was trained, nothing is saved; "
                f"{divergence_advice(self._run, 'the learning rate')}"
            )
        beat("save", state.step)
        save_models()  # before the checkpoint: if the disk has space for only one of them, it is the model
        self._write(state, content)
        self._saver.finish()
        run, inputs = self._run, self._fingerprint.inputs
        ranks, config, stage = run.world.size, run.resolved.config, run.stage
        checkpoints, num_stored = run.folder / "checkpoints", self._config.keep_checkpoints
        num_stored = num_stored if run.resolved.is_given("keep_checkpoints") else min(num_stored, 1)
        on_each_storage(lambda: delete_older(checkpoints, num_stored))
        on_each_storage(lambda: write_done(run.folder, config, stage, steps=state.step, ranks=ranks, inputs=inputs))
        self.recorder.close(EXIT_DONE)
        if run.world.is_main:
            show_end(run, time.monotonic() - self._began)
        if repository := self._config.push_to_hub:
            beat("save", state.step)
            address = dist.on_main(lambda: push(config.outputs[0], repository))
            if run.world.is_main:
                log.info("uploaded to %s", address)

    def _write(self, state: Counters, content: Content) -> None:
        """Write a checkpoint, unless the last one has the same state."""
        if content.state == self._written:
            return
        self.recorder.sync()  # metrics up to the checkpoint must be on the disk before it
        self._saver.save(content, step=state.step)
        self._written = content.state
