"""The lockstep of two ranks of a session, played by two threads."""

import threading
from collections.abc import Callable, Sequence

from pipeline.generation.device_work import Lockstep


class TwoThreads(Lockstep):
    """The lockstep of two threads, each a rank; triton's interpreter runs in one of them at a time."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[int, ...]] = {}
        self.barrier, self.turn = threading.Barrier(2, timeout=20), threading.Lock()

    def meet(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def largest(self, *values: int) -> Sequence[int]:
        self.values[threading.get_ident()] = values
        self.meet()
        found = [max(pair) for pair in zip(*self.values.values(), strict=True)]
        self.meet()
        return found


def on_both(work: Callable[[int], None]) -> None:
    """Do the work of ranks 0 and 1, each in a thread of its own."""
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
