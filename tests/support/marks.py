"""Marks of tests and of their parameters."""

import re
from collections.abc import Collection, Iterable
from importlib.metadata import version
from typing import Any

import pytest
from support.source_tree import ROOT

(TESTED_TORCH,) = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
# A plan counts the kernels that the installed torch launches: seconds on a page are those of one version.
HAS_TESTED_TORCH = version("torch").split("+")[0] == TESTED_TORCH
of_tested_torch = pytest.mark.skipif(not HAS_TESTED_TORCH, reason=f"the pages are of torch {TESTED_TORCH}")


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` as parameters, all but those in `quick` marked slow."""
    return [case if case in quick else slow(case) for case in cases]


def rare_but(slower: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` as parameters: those in `slower` marked slow, all others as ones that only `make test-faults` runs."""
    return [slow(case) if case in slower else marked(case, pytest.mark.faults) for case in cases]


def slow(case: Any) -> Any:
    """A parameter, or a tuple of them, that only `make test-slow` runs."""
    return marked(case, pytest.mark.slow)


def marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
