"""Process group, ranks and the few collectives of the training loops: the only module that imports torch.distributed.

Every function here is called the same number of times on every rank whatever the data (docs/design.md, section 8).
"""

import os
import re
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.errors import EnvironmentFault, RunError

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
# Messages of gloo and nccl, in plain RuntimeErrors, when another rank has ended or does not join.
PEER_GONE = re.compile(
    r"gloo/transport|closed by peer|Connection reset|Broken pipe|Timed out waiting|NCCL (error|communicator)|"
    r"Connection refused|timeout caused pair closure"
)


class PeerError(RuntimeError):
    """An error on the other ranks: the work of rank 0 failed."""


@dataclass(frozen=True, slots=True)
class World:
    """The position of this process: global rank, number of ranks, rank on this node, and its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free now."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return probe.getsockname()[1]


def read_environment() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) of the launcher's environment; else a world of one."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(free_port())
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))


def local_size() -> int:
    """Return the number of ranks on this machine by torchrun's or DeepSpeed's variables, else the number of ranks."""
    environ = os.environ
    return int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or environ.get("WORLD_SIZE", "1"))


def pick_device(local_rank: int) -> torch.device:
    """Return the rank's CUDA device, or the CPU. Raises EnvironmentFault where the machine has fewer devices."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found nothing better
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise EnvironmentFault(
            f"local rank {local_rank}: this machine has {torch.cuda.device_count()} GPUs; start at most as many ranks"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def start(*, timeout_s: int) -> World:
    """Join the process group (nccl on GPUs, gloo on CPUs) and share the CPU's cores among the ranks of this node.

    Raises:
        EnvironmentFault: fewer devices than ranks, the port is in use, or rank 0 cannot be reached.
    """
    # DeepSpeed calls collectives by their old names, thousands of times.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    rank, size, local_rank = read_environment()
    device = pick_device(local_rank)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size()))
    if not dist.is_initialized():
        join(device, timedelta(seconds=timeout_s))
    return World(rank, size, local_rank, device)


def join(device: torch.device, timeout: timedelta) -> None:
    """Join the other ranks; ranks of one machine use the loopback interface only."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = loopback_store(timeout) if on_loopback() else {}
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
            **store,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise EnvironmentFault(f"cannot join {address}: {str(error).splitlines()[0]}") from error


def on_loopback() -> bool:
    """Return whether all ranks are on this machine and not torchrun's, which has a store of its own."""
    address = os.environ["MASTER_ADDR"]
    local = address == "localhost" or address.startswith("127.")
    return local and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def loopback_store(timeout: timedelta) -> dict[str, Any]:
    """Return init_process_group's arguments for a store on the loopback interface; torch's own listens on all."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
    listener = listening_socket(port) if rank == 0 else None
    store = dist.TCPStore(
        LOOPBACK,
        port,
        world_size=size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,  # the store closes it
    )
    return {"store": store, "rank": rank, "world_size": size}


def listening_socket(port: int) -> socket.socket:
    """Return a socket that listens on `port` of the loopback interface. Raises EnvironmentFault: the port is in use."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=socket.SOMAXCONN)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise EnvironmentFault(f"--master_port {port}: {reason}; give another one, or none") from None


def follows_from_another_rank(error: BaseException) -> bool:
    """Return whether `error` only tells that another rank has failed or ended."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    return world_size() > 1 and isinstance(error, RuntimeError) and bool(PEER_GONE.search(str(error)))


def finish() -> None:
    """Leave the process group. Without the barrier, a rank that ends first aborts the others."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def is_main() -> bool:
    return rank() == 0


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the element-wise sum over ranks, as a new tensor of the same shape."""
    total = values.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def max_over_ranks(value: float, device: torch.device) -> float:
    """Return the largest of the ranks' numbers."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def gather_rows(rows: torch.Tensor) -> torch.Tensor:
    """Gather (n, ...) of every rank, equal shapes everywhere, as (ranks * n, ...) in rank order on every rank."""
    if world_size() == 1:
        return rows
    # gloo and nccl do not gather booleans alike; bytes work on both.
    numbers = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
    parts = [torch.empty_like(numbers) for _ in range(world_size())]
    dist.all_gather(parts, numbers.contiguous())
    return torch.cat(parts).to(rows.dtype)


def gather_objects(value: T) -> list[T]:
    """Return the `value` of every rank, in rank order, on every rank; for small plain objects."""
    everywhere: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(everywhere, value)
    return everywhere


class RankGroup:
    """A group of `size` neighbouring ranks that this one belongs to. Making one is a collective over all ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, rank() % size
        self._group = None
        for first in range(0, world_size(), size) if size > 1 else ():
            made = dist.new_group(list(range(first, first + size)))
            if first <= rank() < first + size:
                self._group = made

    def add(self, values: torch.Tensor) -> None:
        """Replace `values` by their element-wise sum over the group."""
        dist.all_reduce(values, group=self._group)

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Fill `whole` with the ranks' parts, in their order: flat, of one length and contiguous on every rank."""
        dist.all_gather_into_tensor(whole, part, group=self._group)

    def any(self, value: bool, device: torch.device) -> bool:
        """Return whether `value` is true on any rank of the group."""
        return value if self.size == 1 else self.largest(torch.tensor(float(value), device=device)).item() > 0

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over the group, as a new tensor; `values` themselves for one rank."""
        if self.size == 1:
            return values
        largest = values.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest

    def check_same(self, values: torch.Tensor) -> None:
        """Raise RuntimeError on all ranks of the group unless they hold equal integers."""
        if self.size > 1 and not torch.equal(self.largest(values), -self.largest(-values)):
            raise RuntimeError("the ranks that generate together have drawn different tokens")

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest of the group's numbers."""
        return value if self.size == 1 else -int(self.largest(torch.tensor(-value, device=device)).item())


def on_main(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only; its result, or its error, reaches every rank.

    Raises:
        RunError: what `work` raised, on every rank.
        PeerError: `work` raised something else on rank 0, where that is raised.
    """
    if world_size() == 1:
        return work()
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if is_main():
        try:
            outcome[0] = work()
        except Exception as error:
            peer_error = PeerError(f"rank 0 failed: {type(error).__name__}: {error}")
            failure, outcome[1] = error, error if isinstance(error, RunError) else peer_error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise failure or outcome[1]
    return outcome[0]
