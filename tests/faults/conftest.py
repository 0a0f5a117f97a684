"""The inputs of the tests of faults."""

from pathlib import Path

import pytest
from input_calls import add_judge


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """The test file's own copy of a tiny folder, with `judge`."""
    return add_judge(folder)
