"""Offload of optimizer states to host memory during a rollout; they return bit by bit.

DeepSpeed 0.19.8 moves states by giving tensors other storages (`offload_states`): it then has to link its views of
them anew, does so at ZeRO stages 1 and 2 only for the weights, and at 3 only for its own Adam. Here an allocation is
emptied and filled again under the tensors that view it, so that every view stays valid, at every ZeRO stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.engine.memory import optimizer_tensors, storages, weight_tensors
from pipeline.engine.state import Engine

Copies = list[tuple[torch.UntypedStorage, torch.Tensor]]


@contextmanager
def optimizer_states_on_host(engines: Sequence[Engine]) -> Iterator[None]:
    """Keep fp32 weights and moments of these TrainingEngines in host memory while the context lasts: take no step.

    States already in host memory, and weights that the model itself reads, are not moved. The host memory is
    page-locked on a machine with a GPU, and kept by the engine for the next time.
    """
    copies: Copies = []
    try:
        for engine in engines:
            copies += move_to_host(engine)
        yield
    finally:
        move_back(copies)


def move_to_host(engine: Engine) -> Copies:
    """Copy each allocation to the host and empty it; return [(allocation, (n,) uint8 copy)]."""
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


def move_back(copies: Copies) -> None:
    """Fill the emptied allocations again; kernels launched after this see their content."""
    for storage, buffer in copies:
        storage.resize_(buffer.numel())
        as_bytes(storage).copy_(buffer, non_blocking=True)


def host_buffers(engine: Engine, sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """Return host memory of these sizes in bytes, allocated once: page-locking 15 GiB takes seconds."""
    if [buffer.numel() for buffer in engine.host_buffers] != sizes:
        pinned = device.type == "cuda"
        engine.host_buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
    return engine.host_buffers


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return an allocation as an (n,) uint8 view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
