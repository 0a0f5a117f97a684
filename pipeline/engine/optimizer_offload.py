"""Offload of optimizer states to host memory during a rollout; they return bit by bit.

DeepSpeed 0.19.8 (`offload_states`) allocates new storages and does not relink all its views of them. Here an allocation
is emptied and filled again under the tensors that view it: every view stays valid, at every ZeRO stage.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.engine.engine import TrainingEngine
from pipeline.engine.memory import optimizer_tensors, storages, weight_tensors
from pipeline.out_of_memory import is_out_of_memory


@contextmanager
def optimizer_states_on_host(engines: Sequence[TrainingEngine]) -> Iterator[None]:
    """Move fp32 weights and moments of these engines to host memory inside the context, which must take no step.

    States already in host memory, and weights that the model itself reads, are not moved. The host memory is
    page-locked on a machine with a GPU, and the engine reuses it. After an out-of-memory error the states stay there
    until `return_from_host`: the failed code still uses the device's memory.
    """
    has_memory = True
    try:
        for engine in engines:
            move_to_host(engine)
        yield
    except Exception as error:
        has_memory = not is_out_of_memory(error)
        raise
    finally:
        if has_memory:
            return_from_host(engines)


def return_from_host(engines: Iterable[TrainingEngine]) -> None:
    """Fill the allocations that `move_to_host` emptied, if any."""
    for engine in engines:
        for storage, buffer in engine.states_on_host:
            storage.resize_(buffer.numel())
            as_bytes(storage).copy_(buffer, non_blocking=True)  # kernels launched after this see the content
        engine.states_on_host = []


def move_to_host(engine: TrainingEngine) -> None:
    """Copy each allocation to the host and empty it; `engine.states_on_host` records where each copy belongs."""
    device = next(engine.module.parameters()).device
    read_by_model = storages(weight_tensors(engine.module))
    allocations = [
        storage
        for address, storage in storages(optimizer_tensors(engine)).items()
        if address not in read_by_model and storage.device == device
    ]
    sizes, pinned = [storage.nbytes() for storage in allocations], device.type == "cuda"
    if [buffer.numel() for buffer in engine.host_buffers] != sizes:
        # Allocated once: page-locking 15 GiB takes seconds.
        engine.host_buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
    copies = list(zip(allocations, engine.host_buffers, strict=True))
    for storage, buffer in copies:
        buffer.copy_(as_bytes(storage), non_blocking=True)
    if pinned:
        torch.cuda.synchronize(device)
    engine.states_on_host = copies
    for storage, _ in copies:
        storage.resize_(0)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return an allocation as an (n,) uint8 view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
