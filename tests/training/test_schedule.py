"""Learning rates as a share of the peak."""

import math

import pytest

from pipeline.configuration.groups import OptimizerConfig
from pipeline.training.steps import rate_factor


def settings(name: str, warmup: int, floor: float = 0.0) -> OptimizerConfig:
    return OptimizerConfig(lr_scheduler_type=name, num_warmup_steps=warmup, min_learning_rate_ratio=floor)


def factors(name: str, *, warmup: int, total: int, floor: float = 0.0) -> list[float]:
    factor = rate_factor(settings(name, warmup, floor), total_steps=total)
    return [factor(step) for step in range(total)]


def test_linear_by_hand():
    # Warm-up over 2 steps counts from 1: 1/3, 2/3. Then from 1 straight to 0 at step 6, which is not taken.
    assert factors("linear", warmup=2, total=6) == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])


def test_cosine_by_hand():
    expected = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert factors("cosine", warmup=0, total=8) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup"])
def test_constant(name):
    assert factors(name, warmup=1, total=4) == pytest.approx([0.5, 1, 1, 1])


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "cosine_with_restarts"])
def test_the_floor_scales_the_shape_and_is_never_crossed(name):
    free, floored = factors(name, warmup=3, total=20), factors(name, warmup=3, total=20, floor=0.1)
    assert floored[:3] == free[:3] == pytest.approx([0.25, 0.5, 0.75])
    assert floored[3] == pytest.approx(1.0)
    assert floored[3:] == pytest.approx([0.1 + 0.9 * value for value in free[3:]])
    assert min(floored[3:]) >= 0.1 and max(floored) <= 1.0 and all(value > 0 for value in free)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_rates_rise_and_then_fall(name):
    found = factors(name, warmup=4, total=20)
    assert found[:5] == sorted(found[:5]) and found[4:] == sorted(found[4:], reverse=True)


def test_a_warm_up_longer_than_the_run_is_cut():
    assert factors("cosine", warmup=100, total=3) == pytest.approx([0.25, 0.5, 0.75])


def test_the_rate_is_a_function_of_the_step_alone():
    factor = rate_factor(settings("cosine", 2), total_steps=10)
    forwards = [factor(step) for step in range(10)]
    assert [factor(step) for step in reversed(range(10))] == forwards[::-1]
