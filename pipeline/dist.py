"""Process group, ranks and the few collectives of the training loops: the only module that imports torch.distributed.

Every rank calls each function here the same number of times, whatever the data (section 8 of
docs/contribute/design.md). Call `meet` before a collective that other ranks may reach much later. It has no timeout,
and its ranks beat.
"""

import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.errors import EnvironmentFault, RunError
from pipeline.heartbeat import beat_again
from pipeline.rendezvous import LOOPBACK, local_size, read_environment, wait_for_port, wait_for_ranks

T = TypeVar("T")

# Messages of gloo and nccl, in plain RuntimeErrors, when another rank has ended or does not join.
PEER_GONE = re.compile(
    r"gloo/transport|closed by peer|Connection reset|Broken pipe|Timed out waiting|NCCL (error|communicator)|"
    r"Connection refused|timeout caused pair closure"
)


# A counter in the rendezvous store: how many times a rank has called `meet`.
ARRIVALS = "rlhf/arrivals"
POLL_S = 0.2

_store: Any = None  # the rendezvous store of the process group
_num_meetings = 0


class PeerError(RuntimeError):
    """An error on another rank, whose work this one was waiting for."""


@dataclass(frozen=True, slots=True)
class World:
    """The position of this process: global rank, number of ranks, rank on this node, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def has_gpu() -> bool:
    """Return whether torch has a GPU; DS_ACCELERATOR=cpu hides the GPUs of this machine."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Later callers of torch get the same answer. The launcher sets a GPU number for each rank, also on a CPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return torch.cuda.is_available()


def find_gpu() -> bool:
    """Return `has_gpu()`, and keep DeepSpeed, which is imported later, from warning that it has no accelerator."""
    if not (gpu := has_gpu()):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return gpu


def pick_device(local_rank: int) -> torch.device:
    """Return the rank's CUDA device, or the CPU. Raises EnvironmentFault if the machine has fewer devices."""
    if not find_gpu():
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
    # DeepSpeed calls deprecated names of collectives thousands of times; peft reads deprecated attributes.
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank, size, local_rank = read_environment()
    device = pick_device(local_rank)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size()))
    if not dist.is_initialized():
        join(device, timedelta(seconds=timeout_s))
    return World(rank, size, device)


def join(device: torch.device, timeout: timedelta) -> None:
    """Join the other ranks, once all have come; ranks of one machine use the loopback interface only."""
    global _store
    host, port = LOOPBACK if on_loopback() else os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    (rank, size, _), timeout_s = read_environment(), timeout.total_seconds()
    address = f"{host}:{port}"
    try:
        if rank > 0:
            wait_for_port(host, port, timeout_s)
        make_store = loopback_store if on_loopback() else network_store
        _store = make_store(host, port, rank, size, timeout)
        wait_for_ranks(_store, rank, size, address=address, timeout_s=timeout_s)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise EnvironmentFault(f"cannot join {address}: {str(error).splitlines()[0]}") from error


def on_loopback() -> bool:
    """Return whether all ranks are on this machine and torchrun did not start them, which has its own store."""
    address = os.environ["MASTER_ADDR"]
    local = address == "localhost" or address.startswith("127.")
    return local and not has_agents_store()


def has_agents_store() -> bool:
    """Return whether torchrun's agent provides the rendezvous store of its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def network_store(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Return torch's rendezvous store, from torchrun's agent or rank 0, before the other ranks have joined."""
    is_agents = has_agents_store()
    is_master = rank == 0 and not is_agents
    return dist.TCPStore(
        host, port, size, is_master, timeout=timeout, wait_for_workers=False, multi_tenant=not is_agents
    )


def loopback_store(host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a rendezvous store on the loopback interface only; torch's listens on all interfaces. Port 0: any free
    one."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    listener = listening_socket(port) if rank == 0 else None
    if listener and not port:
        port = listener.getsockname()[1]
        os.environ["MASTER_PORT"] = str(port)
    return dist.TCPStore(
        host,
        port,
        world_size=size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,  # the store closes it
    )


def listening_socket(port: int) -> socket.socket:
    """Return a socket that listens on `port` of the loopback interface. Raises EnvironmentFault: the port is in use."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=socket.SOMAXCONN)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise EnvironmentFault(f"--master-port {port}: {reason}; give another one, or none") from None


def follows_from_another_rank(error: BaseException) -> bool:
    """Return whether `error` only reports that another rank has failed or ended."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    return world_size() > 1 and isinstance(error, RuntimeError) and bool(PEER_GONE.search(str(error)))


def finish() -> None:
    """Leave the process group of several ranks. Without the barrier, a rank that ends first aborts the others."""
    if world_size() > 1:  # DeepSpeed keeps its group: the next run in this process reuses that of one rank
        meet()
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
    # gloo and nccl gather booleans differently; bytes work on both.
    numbers = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
    parts = [torch.empty_like(numbers) for _ in range(world_size())]
    dist.all_gather(parts, numbers.contiguous())
    return torch.cat(parts).to(rows.dtype)


def in_row_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all ranks' evaluation batches in the order of the held-out rows, on the CPU. A collective.

    Args:
        parts: of each of this rank's batches (B, C); the last column is above 0 for a row, 0 for padding.
    """
    # rank_slices deals out rows batch by batch, so batch k of all ranks in rank order is a range of consecutive rows.
    table = torch.cat([gather_rows(part) for part in parts]).cpu()
    return table[table[:, -1] > 0]


def gather_objects(value: T) -> list[T]:
    """Return the `value` of every rank, in rank order, on every rank; for small plain objects."""
    everywhere: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(everywhere, value)
    return everywhere


def broadcast_bytes(data: bytes, count: int, *, source: int) -> bytes:
    """Return the `count` bytes of rank `source`'s data, on every rank."""
    on_gpu = dist.get_backend() == "nccl"
    values = torch.frombuffer(bytearray(data or count), dtype=torch.uint8)
    values = values.to(torch.device("cuda" if on_gpu else "cpu"))
    dist.broadcast(values, source)
    return values.cpu().numpy().tobytes()


class RankGroup:
    """A group of `size` neighbouring ranks that this one belongs to. Its creation is a collective over all ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, rank() % size
        self._group = None
        for first in range(0, world_size(), size) if size > 1 else ():
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank() < first + size:
                self._group = group

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
        """Raise RuntimeError on all ranks of the group unless their integers are equal."""
        if self.size > 1 and not torch.equal(self.largest(values), -self.largest(-values)):
            raise RuntimeError("the ranks that generate together have drawn different tokens")

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest of the group's numbers."""
        return value if self.size == 1 else -int(self.largest(torch.tensor(-value, device=device)).item())


def meet() -> None:
    """Wait, without a timeout, until every rank is here, so that the collectives that follow are short.

    The ranks poll a counter in the rendezvous store and beat, so that neither --process-group-timeout-s nor
    --rank-timeout-s ends the wait.
    """
    global _num_meetings
    if world_size() == 1:
        return
    _num_meetings += 1
    wait_s = 0.001
    num_arrived = _store.add(ARRIVALS, 1)
    while num_arrived < _num_meetings * world_size():
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, POLL_S)
        beat_again()
        num_arrived = _store.add(ARRIVALS, 0)


def on_main(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only, while the others wait in `meet`; its result, or its error, reaches every rank.

    Raises:
        RunError: raised by `work`; raised again on every rank.
        PeerError: on the other ranks, if `work` raised another error on rank 0.
    """
    return _on_workers(work, is_worker=is_main())


def on_each_machine(work: Callable[[], T]) -> T:
    """Run `work` on the first rank of each machine, as `on_main` does; the result is rank 0's."""
    return _on_workers(work, is_worker=is_main() or os.environ.get("LOCAL_RANK", "0") == "0")


def _on_workers(work: Callable[[], T], *, is_worker: bool) -> T:
    if world_size() == 1:
        return work()
    result: Any = None
    failure: Exception | None = None
    if is_worker:
        try:
            result = work()
        except Exception as error:
            failure = error
    meet()
    reported = failure
    if failure is not None and not isinstance(failure, RunError):
        reported = PeerError(f"rank {rank()} failed: {type(failure).__name__}: {failure}")
    outcomes = gather_objects((result, reported))
    if errors := [error for _, error in outcomes if error is not None]:
        raise failure or errors[0]
    return outcomes[0][0]
