"""The findings of ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from group import Found, running
from support.tiny_run import take_lines

pytest.register_assert_rewrite("compare")  # its failures show their numbers as those of a test do


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: Path) -> Iterator[Found]:
    """World size -> rank -> case -> findings of the worker that the file's constant WORKER names."""
    take_lines(folder / "train.jsonl", folder / "few.jsonl", 20)
    with running(request.module.WORKER, (1, 2), folder, folder) as groups:
        yield groups
