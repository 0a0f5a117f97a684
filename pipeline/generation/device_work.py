"""Device work that the host does not wait for: copies to the host, a second stream, forward passes in lockstep."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Types of devices that run asynchronously to the host. While requests wait for a free slot, or the host reads tokens,
# the scheduler waits for copies to the host one iteration after it enqueued them, so that the host prepares the next
# prefill, or delivers the tokens, while decode steps still run.
DEFERRED_POLL_DEVICES = frozenset({"cuda"})


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream per process: torch keeps memory, and cuBLAS a workspace, for each stream ever used."""
    return torch.cuda.Stream(device)


class Lockstep:
    """Agreement of ranks on their forward passes; this one is for ranks whose passes need no other rank.

    `streaming.StreamingLockstep` is for ranks that gather weights in each forward pass.
    """

    def largest(self, *values: int) -> Sequence[int]:
        """Return the largest of each value over the ranks in lockstep, which all call it; here `values` themselves."""
        return values

    def join_prefill(self) -> None:
        """Take part in the collectives of a prefill that only other ranks have prompts for; here there are none."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, by pinned memory: a copy from pageable memory waits for all enqueued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class HostCopy:
    """A copy of a tensor to the host, enqueued behind all work so far."""

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._on_host = values.clone()
            return
        self._on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host

    def tolist(self) -> list[Any]:
        """Wait for the copy, and return its numbers."""
        return self.wait().tolist()


@dataclass(slots=True)
class FinishedSlotsPoll:
    """A poll of M slots, rows of the KV cache that decode one response each, on its way to the host.

    active: copy of the flags (M,): nonzero while the slot's response is unfinished.
    assigned: slots that wait for a prefilled response to start, or were given to a request after the copy was enqueued.
    """

    active: HostCopy
    assigned: set[int]

    def free_slots(self) -> list[int]:
        """Wait for the copy; return the slots that are not active in it and not assigned."""
        return [slot for slot, busy in enumerate(self.active.tolist()) if not busy and slot not in self.assigned]


class SideStream:
    """A second CUDA stream for work that overlaps the current one's; on a CPU everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = second_stream(device) if device.type == "cuda" else None

    @contextmanager
    def enqueuing(self) -> Iterator[None]:
        """Enqueue the work inside on the side stream, behind all work of the current stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        """Make later work of the current stream wait for the work of the side stream so far; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def overlapped_prefill_stream(device: torch.device) -> SideStream | None:
    """Return a stream on which prefills overlap decode steps; None if the host does not run ahead of the device."""
    # Prefills are bound by arithmetic, decode steps by memory.
    return SideStream(device) if device.type in DEFERRED_POLL_DEVICES else None
