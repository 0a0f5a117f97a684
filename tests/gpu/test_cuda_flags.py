"""Flags that only a GPU shows: where models and optimizer states are, with each flag given and ignored."""

from pathlib import Path
from typing import Any

import pytest
from flag_runs import check_flag, make_flag_inputs, plain_run
from flag_tests import ON_GPU

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flag_inputs(tmp_path_factory.mktemp("flags"))


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return plain_run(folder, tmp_path_factory)


@pytest.mark.parametrize("key", ON_GPU)
def test_a_flag_decides_what_is_on_the_device(key: str, folder: Path, tmp_path: Path, plain: Any) -> None:
    check_flag(key, ON_GPU[key], plain, folder, tmp_path)
