"""Processes of the experiment: this project's own commands and the judge, several at a time on each GPU."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from benchmarks.speed.jobs import BenchError, environment, flags, launched, run_logged, showing

__all__ = ["BenchError", "Jobs", "Work", "flags"]

Work = Callable[[int | None], None]  # of the GPU that it may use


@dataclass(frozen=True, slots=True)
class Jobs:
    """The work folder, and the GPUs that its processes share."""

    folder: Path
    gpus: int
    parallel: int

    def run(self, name: str, module: str, words: Sequence[object], *, gpu: int | None = None) -> str:
        """Run a module to its end with its log in `logs/<name>.log`; return its stdout. Raises BenchError."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = environment() | ({} if gpu is None else showing([gpu]))
        return run_logged(f"[learning] {name}", launched(module, words, gpus=1), log, variables)

    def each(self, works: Sequence[Work]) -> int:
        """Call each of the works with the GPU that it may use; return how many failed, whose errors are printed."""
        free: SimpleQueue[int | None] = SimpleQueue()
        for place in range(max(self.gpus, 1) * self.parallel):
            free.put(place % self.gpus if self.gpus else None)

        def work(one: Work) -> int:
            gpu = free.get()
            try:
                one(gpu)
            except BenchError as error:
                print(f"[learning] failed: {error}", file=sys.stderr, flush=True)
                return 1
            finally:
                free.put(gpu)
            return 0

        with ThreadPoolExecutor(free.qsize()) as pool:
            return sum(pool.map(work, works))
