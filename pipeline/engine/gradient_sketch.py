"""Norms of parts of a step's gradient, by random projections: the gradient buffer has only the sum of the parts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.dist import sum_over_ranks, world_size
from pipeline.models.partitions import whole_numel

# Size of a projection; the standard error of the norm is 1 / sqrt(2 * SIZE), 0.14 %.
SIZE = 1 << 18
CHUNK = 1 << 24  # elements of a gradient that are projected at a time


class GradientSketch:
    """A random projection of the summed gradient of backward passes; its norm estimates the norm of that gradient.

    Every element is added with a random sign to one of SIZE numbers. So projections add up like gradients, over
    micro-batches, ranks and ZeRO partitions. It needs no second backward pass and no copy of the gradients; ranks
    exchange SIZE numbers. It reads each micro-batch's gradients before DeepSpeed does.
    """

    def __init__(self, parameters: Sequence[Tensor], *, device: torch.device, loss_scale: float) -> None:
        self._parameters, self._loss_scale = [one for one in parameters if one.requires_grad], loss_scale
        self._starts = [0, *accumulate(map(whole_numel, self._parameters))]
        self._sums = torch.zeros(SIZE, device=device)

    @contextmanager
    def added(self) -> Iterator[None]:
        """Add the gradients of the backward passes inside the context."""
        hooks = [one.register_hook(partial(self._add, number)) for number, one in enumerate(self._parameters)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, number: int, gradient: Tensor) -> None:
        """Add the gradient of a parameter; its number seeds the signs, so that they are the same on all ranks."""
        generator, sums = torch.Generator(gradient.device).manual_seed(number), torch.zeros_like(self._sums)
        for part in gradient.detach().flatten().split(CHUNK):
            signs = torch.randint(2, part.shape, generator=generator, dtype=torch.int8, device=part.device)
            signed = functional.pad(part.float() * (2 * signs - 1), (0, -len(part) % SIZE))
            sums += signed.view(-1, SIZE).sum(0)
        self._sums += sums.roll(self._starts[number])  # else all small parameters would add to the first numbers

    def norm(self) -> float:
        """Return the estimate of the L2 norm of the gradient, averaged over ranks. A collective."""
        return sum_over_ranks(self._sums).norm().item() / world_size() / self._loss_scale
