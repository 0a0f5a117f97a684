"""How far two findings of ranks are apart."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from group import Found
from support.marks import slow_but

TOLERANCE, BF16_TOLERANCE = 1e-5, 0.05
# Ranks and rows of a micro-batch of steps 1 and 2, with a ZeRO stage.
SHAPES = [(1, "m8"), (1, "m2"), (1, "m1"), (2, "m4"), (2, "m2"), (2, "m1")]
QUICK = [(1, "m8", 0), (1, "m2", 3), (2, "m4", 1), (2, "m2", 2), (2, "m1", 0), (2, "m2", 3)]
SHAPES_AND_STAGES = slow_but(QUICK, [(*shape, stage) for shape in SHAPES for stage in range(4)])


def apart(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute difference between tensors of the same names."""
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())
    return max((first[name].float() - second[name].float()).abs().max().item() for name in first)


def numbers_apart(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest absolute difference between numbers in the same places."""
    return max((abs(a - b) for a, b in zip(first, second, strict=True)), default=0.0)


def every_rank(found: Found, case: str) -> list[dict[str, Any]]:
    """The findings of a case on all ranks of all world sizes."""
    return [ranks[case] for size in found for ranks in found[size]]


def assert_exact(mine: dict[str, Any], exact: dict[str, Any]) -> None:
    """The first step has the loss and the gradients that transformers alone computed."""
    assert numbers_apart(mine["losses"][:1], exact["losses"]) < TOLERANCE
    assert apart(mine["gradients"], exact["gradients"]) < TOLERANCE


def assert_equal_steps(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    """The same losses, norms and gradients of the first step."""
    assert apart(mine["gradients"], reference["gradients"]) < TOLERANCE
    assert numbers_apart(mine["losses"], reference["losses"]) < TOLERANCE
    assert numbers_apart(mine["norms"], reference["norms"]) < TOLERANCE


def assert_same_responses(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    """The same responses, with the same log-probabilities up to rounding."""
    assert mine["responses"] == reference["responses"] and mine["finished"] == reference["finished"]
    torch.testing.assert_close(mine["log_probs"], reference["log_probs"], rtol=TOLERANCE, atol=TOLERANCE)
