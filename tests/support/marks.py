"""Marks on the parameters of a test."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` as parameters, all but those in `quick` marked slow."""
    return [case if case in quick else slow(case) for case in cases]


def slow(case: Any) -> Any:
    """A parameter, or a tuple of them, that only `make test-slow` runs."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
