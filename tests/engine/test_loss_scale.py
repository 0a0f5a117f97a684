"""When a step that overflowed may be the doing of fp16's dynamic loss scale: as long as the scale can still fall."""

from types import SimpleNamespace

import pytest

from pipeline.engine.engine import TrainingEngine


def engine_with(optimizer: SimpleNamespace, *, fp16: bool = True, dynamic: bool = True) -> TrainingEngine:
    engine = object.__new__(TrainingEngine)
    engine.optimizer = optimizer
    engine.deepspeed = SimpleNamespace(fp16_enabled=lambda: fp16, dynamic_loss_scale=lambda: dynamic)
    return engine


def of_zero(scale: float) -> SimpleNamespace:
    """As DeepSpeed's optimizers of stages 1 to 3 hold it."""
    return SimpleNamespace(loss_scaler=SimpleNamespace(cur_scale=scale, min_scale=4.0))


def of_stage_0(scale: float) -> SimpleNamespace:
    return SimpleNamespace(loss_scale_config=SimpleNamespace(cur_scale=scale, min_loss_scale=4.0))


@pytest.mark.parametrize("optimizer", [of_zero, of_stage_0])
def test_a_scale_at_its_floor_no_longer_excuses_a_bad_step(optimizer):
    """Else a run whose gradients are never finite would go on for ever (DeepSpeed issue 697)."""
    assert engine_with(optimizer(8.0)).loss_scale_can_fall
    assert not engine_with(optimizer(4.0)).loss_scale_can_fall


@pytest.mark.parametrize("settings", [{"fp16": False}, {"dynamic": False}])
def test_without_a_dynamic_scale_nothing_is_excused(settings):
    assert not engine_with(of_zero(8.0), **settings).loss_scale_can_fall
