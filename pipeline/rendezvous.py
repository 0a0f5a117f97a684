"""The launcher's variables of a rank, and the wait for the other ranks before the process group is created.

The wait is in Python, since torch's own logs nothing and ignores signals. Ranks are counted in the rendezvous store;
log lines name missing ranks, at doubling intervals. The module imports no torch.
"""

import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from pipeline.errors import EnvironmentFault
from pipeline.heartbeat import beat_again

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HERE = "rlhf/here"  # counter in the store: ranks that have arrived; each rank has its own counter too
FIRST_LINE_S = 10.0  # each later line waits twice as long as the one before
POLL_S = 0.2
CONNECT_S = 5.0
NAMED = 8  # maximum number of missing ranks that a line names
# Numeric variables of launchers -> the least value of each.
NUMBERS = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "LOCAL_SIZE": 1, "SLURM_NTASKS": 1}
NUMBERS |= {"RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 0}
LEAST_FILES = 64  # minimum of open files: libraries and a process group need this many
SET_BY = "the launcher of the ranks sets it; unset it for a run of one rank"
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_environment() -> None:
    """Raise EnvironmentFault for invalid or contradictory launcher variables, and for too few open files."""
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < LEAST_FILES:  # RLIM_INFINITY is -1
        raise EnvironmentFault(f"{limit} open files are allowed, expected {LEAST_FILES} or more; run `ulimit -n 1024`")
    if (name := os.environ.get("DS_ACCELERATOR", "cpu")) not in ("cpu", "cuda"):
        raise EnvironmentFault(f"DS_ACCELERATOR is {name!r}, expected cpu or cuda; unset, the machine decides")
    for name, least in NUMBERS.items():
        text = os.environ.get(name, "1")
        if not (text.isascii() and text.isdecimal() and len(text) <= 5 and least <= int(text) <= 65535):
            raise EnvironmentFault(f"{name} is {text[:20]!r}, expected a number from {least} to 65535; {SET_BY}")
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_RANK", "WORLD_SIZE")):
        number, count = (int(os.environ.get(*given)) for given in ((name, "0"), (size, "65536")))
        if number >= count:
            raise EnvironmentFault(f"{name} is {number} of {size} {count}, and counts from 0; {SET_BY}")


def is_alone() -> bool:
    """Return True if no launcher started this run."""
    return "RANK" not in os.environ and num_ranks() == 1


def check_launched() -> None:
    """Raise EnvironmentFault if only some of a rank's variables are set."""
    missing = [name for name in OF_A_RANK if name not in os.environ]
    if missing and not is_alone():
        names = ", ".join(name for name in OF_A_RANK if name not in missing)
        raise EnvironmentFault(f"{missing[0]} is not set beside {names}; start the ranks by torchrun, or unset all")


def read_environment() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) of the launcher's environment; else a world of one."""
    if is_alone():
        # Port 0 is any free port, bound at once, so that no other process can take it.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR=LOOPBACK, MASTER_PORT="0")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))


def num_ranks() -> int:
    """Return the number of ranks by the launcher's environment; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_size() -> int:
    """Return the number of ranks on this machine by torchrun's or DeepSpeed's variables, else the number of ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or num_ranks())


def own_slots() -> list[int]:
    """Return the number of ranks on each machine of this run, if all have as many as this one."""
    ranks, here = num_ranks(), local_size()
    hosts, rest = divmod(ranks, here)
    return [here] * hosts + [rest] * bool(rest)


def wait_for_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until something listens at the address of rank 0. Raises EnvironmentFault after `timeout_s`."""
    reason = ""

    def answers() -> bool:
        nonlocal reason
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError as error:
            reason = error.strerror or str(error)
            return False
        return True

    wait(answers, lambda: f"rank 0 at {host}:{port} ({reason})", timeout_s)


def wait_for_ranks(store: Any, rank: int, size: int, *, address: str, timeout_s: float) -> None:
    """Wait until all ranks have joined the rendezvous store. Raises EnvironmentFault after `timeout_s`."""
    if store.add(f"{HERE}/{rank}", 1) == 1:  # a restarted rank is counted once
        store.add(HERE, 1)

    def missing() -> str:
        ranks = [str(other) for other in range(size) if not store.check([f"{HERE}/{other}"])]
        more = ", ..." if len(ranks) > NAMED else ""
        return f"{len(ranks)} of {size} ranks at {address} ({', '.join(ranks[:NAMED])}{more})"

    wait(lambda: store.add(HERE, 0) >= size, missing, timeout_s)


def wait(is_there: Callable[[], bool], missing: Callable[[], str], timeout_s: float) -> None:
    """Poll and beat until `is_there`; log what is `missing`. Raises EnvironmentFault after `timeout_s`."""
    start, pause_s, line_s = time.monotonic(), 0.001, FIRST_LINE_S
    # The first rank of each machine logs for its user.
    level = logging.INFO if os.environ.get("LOCAL_RANK", "0") != "0" else logging.WARNING
    while not is_there():
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise EnvironmentFault(
                f"waited {timeout_s:g} s for {missing()}: start each host with the same host file and flags, and look "
                "there why a rank ended; --process-group-timeout-s waits longer"
            )
        if waited_s > line_s:
            line_s *= 2
            log.log(level, "waiting for %s for %.0f s", missing(), waited_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
        beat_again()
