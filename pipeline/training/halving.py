"""Halve a batch after an out-of-memory error, and repeat the iteration of the loop with the same rows.

If the buffers of generation are in memory, they are freed first, and nothing is halved. With one rank, the iteration is
repeated in the same process. With several ranks, the others already wait in a collective: the error ends the job, and
its supervisor starts it again with the halved batch (pipeline/preparation/stage_job.py). Each stage decides how to
divide its work into batches.
"""

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.groups import Group
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.optimizer_offload import return_from_host
from pipeline.heartbeat import Phase, current_phase
from pipeline.out_of_memory import (
    BATCH_FLAGS,
    KEPT_CACHE,
    BatchTooLarge,
    batches_in_words,
    halved_before,
    is_out_of_memory,
)
from pipeline.run.run import Run
from pipeline.training.steps import Counters

log = logging.getLogger(__name__)


class Buffers(Protocol):
    """Memory that stays between rollouts and that other phases do not need (`HybridEngine` of stage 3)."""

    @property
    def holds_buffers(self) -> bool: ...
    def always_release(self) -> None: ...


def take_halved(
    state: Counters, config: Group, *, buffers: Buffers | None = None, given: Mapping[str, int] | None = None
) -> None:
    """Add the batches that this job was started again with to those of a checkpoint, and log the ones in force.

    Args:
        buffers: buffers of generation; they are always released if an earlier update lacked their memory.
        given: phase -> requested batch size, for phases whose size is not that of their flag.
    """
    state.halved |= halved_before()
    if buffers is not None and KEPT_CACHE in state.halved:
        buffers.always_release()
    values = dict(flat_items(config))
    sizes = {phase: values[flag] for phase, flag in BATCH_FLAGS.items() if flag in values} | dict(given or {})
    phases = [phase for phase, (requested, _) in state.halved.items() if sizes.get(phase, requested) == requested]
    if phases:
        log.info("since memory ran out: %s", batches_in_words(state.halved, *phases))


class Halving:
    """The batch sizes of a run, which are halved if memory runs out in an iteration of its loop."""

    def __init__(
        self, run: Run, engines: Iterable[TrainingEngine | FrozenEngine], *, buffers: Buffers | None = None
    ) -> None:
        self._run, self._engines, self._buffers = run, list(engines), buffers
        self._last: tuple[Phase, int, int] | None = None  # what `batch_size` was called with
        self._has_failed = False

    def batch_size(self, state: Counters, phase: Phase, requested: int, *, smallest: int = 1) -> int:
        """Return the batch size in force. Until the next call, an out-of-memory error halves this size.

        Args:
            requested: rows at once on each rank by the flags; in the phase score, tokens.
            smallest: lower bound of the size.
        """
        self._last = phase, requested, smallest
        return state.batch_size(phase, requested)

    @contextmanager
    def when_out_of_memory(self, state: Counters) -> Iterator[None]:
        """Run one iteration of a loop. On an out-of-memory error, halve the batch, so that the loop can repeat it.

        `state` stores the new size. The iteration must not have changed anything else that its repetition would change
        again. If buffers are in memory, they are freed for good, and the size stays.

        Raises:
            BatchTooLarge: there is more than one rank, or the size is the smallest.
            Exception: the error itself, if an optimizer step had begun and no buffers are in memory: a smaller batch
                would not help, since the memory of a step does not depend on it.
        """
        if self._has_failed:
            self._recover()
        self._last, before = None, state.step
        try:
            yield
        except Exception as error:
            if self._last is None or state.step != before or current_phase() == "save" or not is_out_of_memory(error):
                raise
            self._halve(state, *self._last, error)

    def _halve(self, state: Counters, phase: Phase, requested: int, smallest: int, error: Exception) -> None:
        is_stepping = any(isinstance(engine, TrainingEngine) and engine.is_stepping for engine in self._engines)
        buffers = self._buffers if self._buffers is not None and self._buffers.holds_buffers else None
        if is_stepping and buffers is None:
            raise error
        size = state.batch_size(phase, requested)
        key = phase if buffers is None else KEPT_CACHE
        sizes = [requested, max(-(-size // 2), smallest)] if buffers is None else [1, 0]
        halved = {**state.halved, key: sizes} if buffers is not None or size > smallest else {}
        too_large = BatchTooLarge(error, current_phase(), flag=BATCH_FLAGS.get(phase, ""), halved=halved)
        if self._run.world.size > 1 or is_stepping or not halved:
            raise too_large from error
        log.warning("step %d, %s: done again with %s", state.step + 1, too_large, batches_in_words(halved, key))
        state.halved = halved
        if buffers is not None:
            buffers.always_release()
        self._has_failed = True

    def _recover(self) -> None:
        """Free the memory that the failed iteration left in the engines and on the device; its frames are gone now."""
        for engine in self._engines:
            engine.recover()
        gc.collect()  # the autograd graph of a failed pass refers to itself
        if self._run.world.device.type == "cuda":
            torch.cuda.empty_cache()
        return_from_host(engine for engine in self._engines if isinstance(engine, TrainingEngine))
        self._has_failed = False
