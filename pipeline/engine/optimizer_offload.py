"""Optimizer states leave the device while no step is taken, and come back bit by bit as they were.

DeepSpeed 0.19.8 moves states by giving tensors other storages (`offload_states`): it then has to link its views of
them anew, does so at stages 1 and 2 only for the weights, and at stage 3 only for its own Adam. Here an allocation is
emptied and filled again under the tensors that look at it, so that every view stays what it is, at every stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pipeline.engine.memory import optimizer_tensors, storages, weight_tensors

Copies = list[tuple[torch.UntypedStorage, torch.Tensor]]


@contextmanager
def optimizer_states_on_host(engines: Sequence[Any]) -> Iterator[None]:
    """Inside, the fp32 weights and moments of these TrainingEngines are in host memory: no step may be taken.

    What is in host memory already, and weights that the model itself reads, stay. The host memory is page-locked on a
    machine with a GPU, and kept on the engine for the next time.
    """
    away: Copies = []
    try:
        for engine in engines:
            away += take_away(engine)
        yield
    finally:
        bring_back(away)


def take_away(engine: Any) -> Copies:
    """Copy each allocation to the host, then empty it: [(allocation, (n,) uint8 on the host)]."""
    device = next(engine.module.parameters()).device
    read_by_model = storages(weight_tensors(engine.module))
    held = [
        storage
        for address, storage in storages(optimizer_tensors(engine)).items()
        if address not in read_by_model and storage.device == device
    ]
    copies = list(zip(held, host_buffers(engine, [storage.nbytes() for storage in held], device), strict=True))
    for storage, buffer in copies:
        buffer.copy_(as_bytes(storage), non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for storage, _ in copies:
        storage.resize_(0)
    return copies


def bring_back(copies: Copies) -> None:
    """Fill the emptied allocations again; work that is launched after this sees their content."""
    for storage, buffer in copies:
        storage.resize_(buffer.numel())
        as_bytes(storage).copy_(buffer, non_blocking=True)


def host_buffers(engine: Any, sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """Host memory of these sizes in bytes, made once: page-locking 15 GiB takes seconds."""
    if [buffer.numel() for buffer in engine.host_buffers] != sizes:
        pinned = device.type == "cuda"
        engine.host_buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
    return engine.host_buffers


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """(n,) uint8 view of an allocation."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
