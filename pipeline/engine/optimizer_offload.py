"""Offload of optimizer states to host memory during a rollout; they return bit by bit.

DeepSpeed 0.19.8 (`offload_states`) gives tensors other storages and does not link all its views of them anew. Here an
allocation is emptied and filled again under the tensors that view it: every view stays valid, at every ZeRO stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.engine.engine import TrainingEngine
from pipeline.engine.memory import optimizer_tensors, storages, weight_tensors


@contextmanager
def optimizer_states_on_host(engines: Sequence[TrainingEngine]) -> Iterator[None]:
    """Keep fp32 weights and moments of these TrainingEngines in host memory while the context lasts: take no step.

    States already in host memory, and weights that the model itself reads, are not moved. The host memory is
    page-locked on a machine with a GPU, and kept by the engine for the next time.
    """
    copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
    try:
        for engine in engines:
            copies += move_to_host(engine)
        yield
    finally:
        for storage, buffer in copies:
            storage.resize_(buffer.numel())
            as_bytes(storage).copy_(buffer, non_blocking=True)  # kernels launched after this see the content


def move_to_host(engine: TrainingEngine) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Copy each allocation to the host and empty it; return [(allocation, (n,) uint8 copy)]."""
    device = next(engine.module.parameters()).device
    read_by_model = storages(weight_tensors(engine.module))
    held = [
        storage
        for address, storage in storages(optimizer_tensors(engine)).items()
        if address not in read_by_model and storage.device == device
    ]
    sizes, pinned = [storage.nbytes() for storage in held], device.type == "cuda"
    if [buffer.numel() for buffer in engine.host_buffers] != sizes:
        # Once: page-locking 15 GiB takes seconds.
        engine.host_buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
    copies = list(zip(held, engine.host_buffers, strict=True))
    for storage, buffer in copies:
        buffer.copy_(as_bytes(storage), non_blocking=True)
    if pinned:
        torch.cuda.synchronize(device)
    for storage, _ in copies:
        storage.resize_(0)
    return copies


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return an allocation as an (n,) uint8 view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
