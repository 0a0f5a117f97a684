"""All tests of this folder are skipped where there is no CUDA device."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before any fixture is made
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
