"""Process groups of gloo ranks that run the cases of a worker module, each when a test first asks for it."""

import importlib
import io
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from support import forks
from support.ports import free_port

TIMEOUT_S = 300.0
ALONE_S = 5.0  # a rank whose peer has ended waits for ever

Case = Callable[[Path], Any]


class Group:
    """`size` ranks that run cases of `tests/multi/<worker>.py` in the order in which tests ask for them."""

    def __init__(self, worker: str, size: int, folder: Path, inputs: Path) -> None:
        self.worker, self.size, self.folder, self.inputs = worker, size, folder, inputs
        self.ranks: list[tuple[BaseProcess, Connection]] = []
        self.results: dict[str, list[Any]] = {}

    def findings(self, case: str) -> list[Any]:
        """Result of `case` on each rank. Raises AssertionError, with what the ranks printed, where it fails."""
        if case not in self.results:
            if not self.ranks:
                self.start()
            for _, connection in self.ranks:
                connection.send(case)
            self.results[case] = self.receive(case)
        return self.results[case]

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        for rank in range(self.size):
            here, there = forks.context.Pipe()
            variables = forks.rank_variables(rank, self.size, port)
            process = forks.start(serve, self.worker, variables, self.folder, self.inputs, there)
            there.close()
            self.ranks.append((process, here))

    def receive(self, case: str) -> list[Any]:
        end = time.monotonic() + TIMEOUT_S
        answers: dict[int, bytes] = {}
        while len(answers) < self.size and time.monotonic() < end:
            for rank, (_, connection) in enumerate(self.ranks):
                if rank not in answers and connection.poll(0.01):
                    try:
                        answers[rank] = connection.recv_bytes()
                    except EOFError:
                        answers[rank] = b""
                    if not answers[rank]:
                        end = min(end, time.monotonic() + ALONE_S)
        if len(answers) < self.size or not all(answers.values()):
            self.close()
            logs = [(self.folder / f"rank-{n}.log").read_text(errors="replace")[-4000:] for n in range(self.size)]
            raise AssertionError(f"{case}\n" + "\n".join(logs))
        return [torch.load(io.BytesIO(answers[rank]), weights_only=True) for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks. The next case starts others."""
        for process, connection in self.ranks:
            connection.close()
            process.kill()
            process.join()
        self.ranks = []


class Rank:
    """Case -> result of one rank of a group."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank

    def __getitem__(self, case: str) -> Any:
        return self.group.findings(case)[self.rank]


Found = dict[int, list[Rank]]


@contextmanager
def running(worker: str, sizes: Sequence[int], folder: Path, inputs: Path) -> Iterator[Found]:
    """World size -> rank -> case -> result, for the cases of `tests/multi/<worker>.py`."""
    groups = {size: Group(worker, size, folder / f"world-{size}", inputs) for size in sizes}
    try:
        yield {size: [Rank(group, rank) for rank in range(size)] for size, group in groups.items()}
    finally:
        for group in groups.values():
            group.close()


def serve(worker: str, variables: dict[str, str], folder: Path, inputs: Path, connection: Connection) -> None:
    """Join the group as one of its ranks and run cases until the connection ends or a case fails."""
    log = folder / f"rank-{variables['RANK']}.log"
    forks.write_output_to(log, log)
    os.environ |= variables
    os.chdir(folder)
    from pipeline import dist
    from pipeline.engine.start import start_deepspeed

    try:
        dist.start(timeout_s=300)
        start_deepspeed()
        cases = importlib.import_module(worker).cases()
        while True:
            name = connection.recv()
            started = time.monotonic()
            answer = io.BytesIO()
            torch.save(cases[name](inputs), answer)
            print(f"{name}: {time.monotonic() - started:.2f} s", flush=True)
            connection.send_bytes(answer.getvalue())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # with process groups interpreter teardown aborts now and then
