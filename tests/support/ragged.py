"""Random ragged (B, T) batches with NaN outside the mask, shared by the tests of the PPO mathematics."""

import math
from collections.abc import Iterator

import numpy as np
import torch

from pipeline.tensor_ops import lengths_to_mask

B, T = 6, 9


def ragged_mask(seed: int) -> torch.Tensor:
    """(B, T) prefix mask: row 0 is full, row 1 has one token, row 2 has none and only fills the batch."""
    lengths = torch.randint(1, T + 1, (B,), generator=torch.Generator().manual_seed(seed))
    lengths[:3] = torch.tensor([T, 1, 0])
    return lengths_to_mask(lengths, T)


def random_tokens(seed: int, count: int, mask: torch.Tensor) -> list[torch.Tensor]:
    """`count` tensors (B, T) of fp32 normals, NaN where the mask is False."""
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.where(mask, torch.randn(B, T, generator=generator), math.nan) for _ in range(count)]


def every_token(num_rows: int, length: int) -> torch.Tensor:
    return torch.ones(num_rows, length, dtype=torch.bool)


def sequences(mask: torch.Tensor, *tensors: torch.Tensor) -> Iterator[list[np.ndarray]]:
    """Return each sequence's real tokens of every tensor as float64 numpy."""
    for row in range(len(mask)):
        yield [tensor[row][mask[row]].double().numpy() for tensor in tensors]


def gradient(loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, leaf)[0]
