"""How far two findings of ranks are apart."""

from collections.abc import Mapping, Sequence

import torch

TOLERANCE = 1e-5


def apart(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute difference between tensors of the same names."""
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())
    return max((first[name].float() - second[name].float()).abs().max().item() for name in first)


def numbers_apart(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest absolute difference between numbers in the same places."""
    return max((abs(a - b) for a, b in zip(first, second, strict=True)), default=0.0)
