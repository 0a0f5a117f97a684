"""Fixtures of step 3's tests: a process group of one, tiny models, the gradients of each step."""

from types import SimpleNamespace

import pytest
from support.ppo_updates import MEAN, STD, gradients
from support.tiny_models import give_template, save_tiny

from pipeline.training.steps import step_together
from step3_ppo import updater as updater_module


@pytest.fixture(scope="module", params=["opt", "llama"])
def folders(request, tiny_folders):
    return SimpleNamespace(actor=tiny_folders[request.param], reward=tiny_folders[f"{request.param}-reward"])


@pytest.fixture(scope="module")
def opt(tiny_folders):
    return SimpleNamespace(actor=tiny_folders["opt"], reward=tiny_folders["opt-reward"])


@pytest.fixture
def seen_gradients(monkeypatch):
    """The gradients of each engine as they are when the step is to be taken."""
    seen = []

    def watched(engines, rate_factor, *, loss):
        seen.extend(gradients(engine.module.model) for engine in engines)
        return step_together(engines, rate_factor, loss=loss)

    monkeypatch.setattr(updater_module, "step_together", watched)
    return seen


@pytest.fixture(scope="module")
def trained_folders(bpe_folder, tmp_path_factory):
    """An actor and a reward model with the constants of step 2."""
    parent = tmp_path_factory.mktemp("ppo")
    actor = save_tiny("opt", bpe_folder, parent / "sft")
    reward = save_tiny("opt", bpe_folder, parent / "reward", reward=True, score_mean=MEAN, score_std=STD)
    give_template(actor, reward)
    return SimpleNamespace(actor=actor, reward=reward)
