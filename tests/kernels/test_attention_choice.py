"""The choice of an attention kernel by batch shape; what the kernels compute is torch's."""

from typing import Any

import pytest
import torch

from pipeline.kernels import attention_choice
from pipeline.kernels.attention_choice import PASSES_BEFORE_CUDNN, choose_attention_kernel, disable_cudnn_attention


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether cuDNN's kernel was allowed, call by call, as on a machine with a GPU."""
    actual: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", actual.append)
    attention_choice._passes.clear()
    return actual


def test_cudnn_is_used_once_a_shape_has_recurred_often_enough(cudnn: list[bool]) -> None:
    model: Any = object()
    for _ in range(PASSES_BEFORE_CUDNN + 2):
        choose_attention_kernel(model, 16, 512)
    assert cudnn == [False] * PASSES_BEFORE_CUDNN + [True] * 2


def test_other_shapes_models_and_passes_without_gradients_count_apart(cudnn: list[bool]) -> None:
    model, other = object(), object()
    for _ in range(PASSES_BEFORE_CUDNN):
        choose_attention_kernel(model, 16, 512)
    choose_attention_kernel(model, 16, 480)
    choose_attention_kernel(model, 15, 512)
    choose_attention_kernel(other, 16, 512)
    with torch.no_grad():
        choose_attention_kernel(model, 16, 512)
    assert not any(cudnn)
    choose_attention_kernel(model, 16, 512)
    assert cudnn[-1]


def test_prefills_never_use_cudnn(cudnn: list[bool]) -> None:
    for _ in range(PASSES_BEFORE_CUDNN + 1):
        choose_attention_kernel(None, 16, 512)
    disable_cudnn_attention()
    assert cudnn[-2:] == [True, False]


def test_deterministic_runs_do_not_depend_on_what_came_before(cudnn: list[bool]) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(PASSES_BEFORE_CUDNN + 2):
            choose_attention_kernel(None, 16, 512)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(cudnn)
