"""Stopping between the parts of a step: what is half done is dropped, on all ranks together."""

import time
from collections.abc import Iterable
from typing import Any

from pipeline import dist

# Steps that take longer are looked into between their micro-batches, so that a stop does not wait for their end.
LONG_STEP_S = 2.0


class Interrupted(Exception):
    """The run is to stop, and what was half done is dropped: a rollout, or the gradients of a step."""


class Stopping:
    """When this run stops: asked after each step, and within steps that take long. All ranks get the same answer."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._long = False
        self._last = time.monotonic()

    def after_step(self) -> bool:
        """Whether any rank was asked to stop. A collective."""
        now = time.monotonic()
        self._long = dist.max_over_ranks(now - self._last, self._run.world.device) > LONG_STEP_S
        self._last = now
        return self._run.stop.anywhere(self._run.world)

    def check(self, engines: Iterable[Any] = ()) -> None:
        """Between two parts of a step; a collective where steps take long.

        Raises:
            Interrupted: the run is to stop; what `engines` had accumulated is dropped.
        """
        if self._long and self._run.stop.anywhere(self._run.world):
            for engine in engines:
                engine.drop_gradients()
            raise Interrupted
