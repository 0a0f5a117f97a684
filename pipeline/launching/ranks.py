"""Ranks of one host: processes with torchrun's variables, started by the supervisor or by its agent.

The module imports no torch.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.errors import EXIT_STOPPED, InputError
from pipeline.processes import WAITS, Signals, kill_sessions

POLL_S = 0.2
Started = Mapping[int, subprocess.Popen[bytes]]  # rank -> its process


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """The command and environment that the ranks of a host are started with.

    module: the Python module that each runs.
    argv: its flags.
    devices: the host's GPUs, one for each rank; on a CPU any numbers.
    first: number of the host's first rank.
    num_ranks: ranks of all hosts.
    port: port of rank 0.
    address: address of rank 0.
    log_folder: folder for a file of what each rank prints; empty: the console.
    """

    module: str
    argv: Sequence[str]
    devices: Sequence[str]
    first: int
    num_ranks: int
    port: int
    address: str = ""
    log_folder: str = ""

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return torchrun's variables for a rank of the host, and the devices that it sees."""
        values = {
            "RANK": self.first + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_WORLD_SIZE": len(self.devices),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        if os.environ.get("DS_ACCELERATOR") != "cpu":
            values["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        return {name: str(value) for name, value in values.items()}


def start_ranks(
    start: RankStart, environment: Mapping[str, str], output: IO[bytes] | IO[str] | None = None
) -> dict[int, "subprocess.Popen[bytes]"]:
    """Start the ranks of this host, each in its own session, so that Ctrl-C in a terminal reaches only the supervisor.

    Raises:
        InputError: the folder for their output cannot be created or written to.
    """
    command = [sys.executable, "-u", "-m", start.module, *start.argv]
    started, day = {}, time.strftime("%Y%m%d%H%M%S")
    for local_rank in range(len(start.devices)):
        rank, file = start.first + local_rank, output
        if start.log_folder:
            try:
                Path(start.log_folder).mkdir(parents=True, exist_ok=True)
                file = (Path(start.log_folder) / f"{day}_rank{rank}.log").open("wb")
            except OSError as error:
                raise InputError(f"--enable-each-rank-log: {start.log_folder}: {error.strerror}") from None
        started[rank] = subprocess.Popen(
            command,
            env={**environment, **start.variables(local_rank)},
            start_new_session=True,
            stdin=subprocess.PIPE if WAITS in environment else subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    return started


def kill_ranks(started: Started) -> None:
    """End the ranks and all processes that they started."""
    kill_sessions([process.pid for process in started.values()])
    for process in started.values():
        process.wait()


def exit_code_of(started: Started) -> int | None:
    """Return the first exit code that is not 0; if there is none, 0 once all have ended and None before."""
    codes = [process.poll() for process in started.values()]
    return next((code for code in codes if code), None if None in codes else 0)


def wait_for_ranks(started: Started, signals: Signals) -> int:
    """Wait until all ranks have ended, one has failed or a signal comes; then end them and return the exit code."""
    try:
        while (code := exit_code_of(started)) is None and signals.first is None:
            time.sleep(POLL_S)
    finally:
        kill_ranks(started)
    return EXIT_STOPPED if code is None else code
