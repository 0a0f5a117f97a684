"""The memory of the GPUs that runs side by side share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class FreeMemory:
    """Memory of the GPUs that is not taken by runs; a run waits until there is enough for it."""

    free: list[float]
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def take(self, gpus: int, gib: float) -> Iterator[list[int]]:
        """Yield the GPUs of a run that takes `gib` of each of them."""
        with self.changed:
            self.changed.wait_for(lambda: sum(value >= gib for value in self.free) >= gpus)
            chosen = sorted(sorted(range(len(self.free)), key=lambda gpu: -self.free[gpu])[:gpus])
            self._add(chosen, -gib)
        try:
            yield chosen
        finally:
            with self.changed:
                self._add(chosen, gib)
                self.changed.notify_all()

    def _add(self, gpus: list[int], gib: float) -> None:
        for gpu in gpus:
            self.free[gpu] += gib
