"""Halved batches after an out-of-memory error: the work of a phase is done again, in smaller parts of the same rows.

One rank does so in the same process. Of several, the others wait in a collective by then: the error ends the job, and
its supervisor starts it again with the halved batch (pipeline/launching/job.py). The stages say how work is cut.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.heartbeat import Phase, current_phase
from pipeline.out_of_memory import BATCH_FLAGS, BatchTooLarge, batches_in_words, is_out_of_memory
from pipeline.run.run import Run
from pipeline.training.steps import Counters

log = logging.getLogger(__name__)

T = TypeVar("T")


def in_batches_that_fit(
    run: Run,
    state: Counters,
    phase: Phase,
    asked: int,
    compute: Callable[[int], T],
    *,
    engines: Iterable[TrainingEngine | FrozenEngine],
    smallest: int = 1,
) -> T:
    """Return `compute(size)`, called again with half the size after each out-of-memory error; `state` keeps the size.

    Args:
        asked: rows at once, on each rank, as the flags say; of the phase score, tokens.
        compute: computes from `state` and the weights, which it may change only in its last act: an optimizer step.
        engines: those that it uses; what a failed pass left in them is dropped.
        smallest: the size that is never halved.

    Raises:
        BatchTooLarge: there is more than one rank, or the size is the smallest. An error within an optimizer step is
            raised as it is: its memory does not depend on the batch.
    """
    while True:
        size = state.batch_size(phase, asked)
        try:
            return compute(size)
        except Exception as error:
            if not is_out_of_memory(error) or any(getattr(engine, "is_stepping", False) for engine in engines):
                raise
            halved = {**state.halved, phase: [asked, max(-(-size // 2), smallest)]} if size > smallest else {}
            too_large = BatchTooLarge(error, current_phase(), flag=BATCH_FLAGS.get(phase, ""), halved=halved)
            if run.world.size > 1 or not halved:
                raise too_large from error
        log.warning("step %d, %s: done again with %s", state.step + 1, too_large, batches_in_words(halved, phase))
        state.halved = halved
        del too_large
        for engine in engines:
            engine.recover()
        gc.collect()  # an autograd graph that failed refers to itself
        if run.world.device.type == "cuda":
            torch.cuda.empty_cache()
