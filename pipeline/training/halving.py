"""Halved batches after an out-of-memory error: the work of a phase is done again, in smaller parts of the same rows.

Buffers of generation that are held are given back before anything is halved. One rank does so in the same process. Of
several, the others wait in a collective by then: the error ends the job, and its supervisor starts it again with the
halved batch (pipeline/preparation/stage_job.py). The stages say how work is cut.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.groups import Group
from pipeline.engine.engine import FrozenEngine, TrainingEngine
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

T = TypeVar("T")


class Buffers(Protocol):
    """Memory that is kept between rollouts, and that other phases can do without (`generation.HybridEngine`)."""

    @property
    def holds_buffers(self) -> bool: ...
    def always_release(self) -> None: ...
    def note_update(self) -> None: ...


def take_halved(state: Counters, config: Group) -> None:
    """Add to the batches of a checkpoint those that this job was started again with, and log which are in force."""
    state.halved |= halved_before()
    values = dict(flat_items(config))
    kept = [
        phase for phase, (asked, _) in state.halved.items() if values.get(BATCH_FLAGS.get(phase, ""), asked) == asked
    ]
    if kept:
        log.info("since memory ran out: %s", batches_in_words(state.halved, *kept))


def in_batches_that_fit(
    run: Run,
    state: Counters,
    phase: Phase,
    asked: int,
    compute: Callable[[int], T],
    *,
    engines: Iterable[TrainingEngine | FrozenEngine],
    smallest: int = 1,
    buffers: Buffers | None = None,
) -> T:
    """Return `compute(size)`, called again with half the size after each out-of-memory error; `state` keeps the size.

    Where `buffers` are held, they are given back first, for good, and the size stays.

    Args:
        asked: rows at once, on each rank, as the flags say; of the phase score, tokens.
        compute: computes from `state` and the weights, which it may change only in its last act: an optimizer step.
        engines: those that it uses; what a failed pass left in them is dropped.
        smallest: the size that is never halved.

    Raises:
        BatchTooLarge: there is more than one rank, or the size is the smallest. An error within an optimizer step is
            raised as it is, unless buffers are held: its memory does not depend on the batch.
    """
    while True:
        size = state.batch_size(phase, asked)
        try:
            result = compute(size)
            if buffers is not None and phase == "train":
                buffers.note_update()
            return result
        except Exception as error:
            is_stepping = any(getattr(engine, "is_stepping", False) for engine in engines)
            has_buffers = buffers is not None and buffers.holds_buffers
            if not is_out_of_memory(error) or (is_stepping and not has_buffers):
                raise
            key = KEPT_CACHE if has_buffers else phase
            sizes = [1, 0] if has_buffers else [asked, max(-(-size // 2), smallest)]
            halved = {**state.halved, key: sizes} if has_buffers or size > smallest else {}
            too_large = BatchTooLarge(error, current_phase(), flag=BATCH_FLAGS.get(phase, ""), halved=halved)
            if run.world.size > 1 or is_stepping or not halved:
                raise too_large from error
        log.warning("step %d, %s: done again with %s", state.step + 1, too_large, batches_in_words(halved, key))
        state.halved = halved
        if buffers is not None and has_buffers:
            buffers.always_release()
        del too_large
        for engine in engines:
            engine.recover()
        gc.collect()  # an autograd graph that failed refers to itself
        if run.world.device.type == "cuda":
            torch.cuda.empty_cache()
