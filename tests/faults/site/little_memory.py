"""A rank with little memory: a cap on its GPU, or embeddings of training batches that fail where rows are too many."""

from typing import Any

import torch
from torch.nn import functional

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 44.69 MiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch."
)


def lack_memory(above: int, number: int) -> None:
    """From the `number`-th on, embeddings of more than `above` rows with gradients fail."""
    embedding, seen = functional.embedding, []

    def checked(tokens: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and len(tokens) > above:
            seen.append(len(tokens))
            if len(seen) >= number:
                raise torch.OutOfMemoryError(CUDA)
        return embedding(tokens, *more, **named)

    functional.embedding = checked


def cap_gpu(gib: float) -> None:
    """Let torch's allocator hold so many GiB of the GPU, as soon as CUDA starts: this process may never start it."""

    def cap() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / total, 1.0), 0)

    torch.cuda._lazy_call(cap)
