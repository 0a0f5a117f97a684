"""What a process may take of a GPU, and that all who ask for its memory ask the function that knows the limit."""

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import naming, refusal
from support.source_tree import relative, source_files, tree_of

from pipeline import cache_memory
from pipeline.cache_memory import limit_memory, memory_of
from pipeline.device import DeviceConstants
from pipeline.engine import build, zero3
from pipeline.engine import memory as engine_memory
from pipeline.errors import EnvironmentFault
from pipeline.files import GIB
from pipeline.generation.backends import cached_tokens_that_fit, check_copies_fit, whole_weights_fit
from pipeline.models import loaded

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for a GPU of 80 GiB, in GiB: of them 50 are free, this process has reserved 4 and uses 3; no limit yet."""
    device = SimpleNamespace(free=50.0, reserved=4.0, allocated=3.0, fractions=[])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device_: (int(device.free * GIB), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device_: int(device.reserved * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device_: int(device.allocated * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: device.fractions.append(given))
    monkeypatch.setattr(cache_memory, "_limit", None)
    return device


def free_and_total() -> tuple[float, float]:
    free, total = memory_of(GPU)
    return free / GIB, total / GIB


def test_without_a_limit_free_is_what_the_device_has_and_what_is_reserved_but_unused(gpu):
    assert free_and_total() == (51.0, 80.0)


def test_a_limit_leaves_what_neither_this_process_nor_cuda_has_taken_of_it(gpu):
    limit_memory(24, GPU, outside=2 * GIB)
    assert gpu.fractions == [(22 / 80, GPU)]
    assert free_and_total() == (24 - 2 - 3, 24.0)
    gpu.reserved = gpu.allocated = 21.5
    assert free_and_total() == (0.5, 24.0)


def test_a_device_that_others_have_filled_has_no_more_free_than_that(gpu):
    limit_memory(24, GPU, outside=2 * GIB)
    gpu.free = 5.0
    assert free_and_total() == (6.0, 24.0), "and the unused reserve"


def test_a_cpu_has_neither_memory_nor_limit(gpu):
    limit_memory(24, GPU, outside=0)
    assert memory_of(torch.device("cpu")) == (1, 1)


@pytest.mark.parametrize(
    ("gib", "outside", "line"),
    [
        (81.0, 1, "--gpu-memory-gib 81 ... 80.00 GiB ... less, or 0"),
        (0.5, GIB, "--gpu-memory-gib 0.5 ... 1.0 GiB ... more"),
    ],
)
def test_a_limit_that_no_process_can_have_is_refused(gpu, gib, outside, line):
    with pytest.raises(EnvironmentFault) as refused:
        limit_memory(gib, GPU, outside=outside)
    assert str(refused.value) == naming(line) and gpu.fractions == [] and free_and_total() == (51.0, 80.0)


@pytest.fixture
def start(gpu, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """The start of a stage's engines without DeepSpeed, on a machine whose GPU was not measured."""
    monkeypatch.setattr(engine_memory, "stored_constants", lambda: None)
    monkeypatch.setattr(build, "engine_jsons", lambda run: {})
    monkeypatch.setattr(build, "start_deepspeed", lambda **given: None)
    return build.start_engines


def run_on(device: torch.device, gib: float, ranks: int = 1) -> Any:
    config = SimpleNamespace(run=SimpleNamespace(gpu_memory_gib=gib, deterministic=False, verbose=False))
    return SimpleNamespace(world=SimpleNamespace(device=device, size=ranks), resolved=SimpleNamespace(config=config))


def test_a_run_counts_cudas_own_as_its_plan_does(gpu, start, monkeypatch):
    """0.6 GiB for CUDA and 0.5 for NCCL, or what was measured on this machine's GPU."""
    for ranks in (1, 2):
        start(run_on(GPU, 24, ranks))
    kept = DeviceConstants("X", "2026-11-22", 80 * GIB, 1.0, 1.0, 1.0, context=GIB, nccl=GIB // 4)
    monkeypatch.setattr(engine_memory, "stored_constants", lambda: kept)
    start(run_on(GPU, 24, 2))
    shares = [fraction * 80 for fraction, _ in gpu.fractions]
    assert shares == pytest.approx([24 - 0.6, 24 - 0.6 - 0.5, 24 - 1.25])


def test_without_the_flag_and_on_a_cpu_nothing_is_limited(gpu, start):
    start(run_on(GPU, 0))
    start(run_on(torch.device("cpu"), 24))
    assert gpu.fractions == [] and free_and_total() == (51.0, 80.0)


def test_the_questions_of_a_rollout_are_answered_within_the_limit(gpu, monkeypatch):
    """20 GiB of weights and eight slots of 128 MiB fit into 0.9 of 51 GiB, not of the 19 that a limit leaves."""
    forward: Any = SimpleNamespace(device=GPU, cache_layout=SimpleNamespace(bytes_per_token=GIB // 100))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(loaded.dist, "has_gpu", lambda: True)
    before = cached_tokens_that_fit(forward), loaded.memory_limits()[0] / GIB
    assert whole_weights_fit(20 * GIB, GIB // 8, GPU) and before == (4590, pytest.approx(0.8 * 51))
    check_copies_fit(20 * GIB, GPU)
    limit_memory(24, GPU, outside=2 * GIB)
    after = cached_tokens_that_fit(forward), loaded.memory_limits()[0] / GIB
    assert not whole_weights_fit(20 * GIB, GIB // 8, GPU) and after == (1710, pytest.approx(0.8 * 19))
    (line,) = refusal(check_copies_fit, 20 * GIB, GPU)
    assert "19.00 GiB are free" in line


@pytest.mark.parametrize(("gib", "once"), [(0, True), (9, True), (7, False)])
def test_weights_are_gathered_at_once_where_they_are_an_eighth_of_the_limit(gpu, monkeypatch, gib, once):
    module = torch.nn.Linear(2**15, 2**14, bias=False, dtype=torch.bfloat16, device="meta")  # 1 GiB
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(zero3.dist, "max_over_ranks", lambda value, device: value)
    if gib:
        limit_memory(gib, GPU, outside=GIB)
    assert zero3.gathers_once(module, {"zero_optimization": {"stage": 3}}, "auto") is once


def test_nothing_else_asks_torch_for_the_memory_of_a_device():
    """But the program that measures a device, whole, for plans."""
    names = ("mem_get_info", "total_memory", "set_per_process_memory_fraction")
    asking = {
        relative(path)
        for path in source_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    assert asking == {"pipeline/cache_memory.py", "pipeline/run/measure_device.py"}
