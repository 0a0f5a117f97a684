"""Greedy tokens of every family over 64 steps: each generation backend against `generate` of transformers, in fp32.

The backends sample prompts of several lengths in one batch; transformers continues each prompt alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.decode_models import (
    DEVICE,
    EXPERTS,
    KEY,
    NOT_STATIC,
    PAD,
    eagerly,
    family,
    fused,
    generator_of,
    random_prompts,
)
from support.families import FAMILIES

from pipeline.generation.episodes import generate
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.rollouts import Rollout, Sampling

GREEDY = Sampling(64, top_k=1)
PROMPTS = random_prompts((5, 2, 9))
REQUEST: dict[str, Any] = {"num_samples": 1, "sampling": GREEDY, "key": KEY}


def by_eager(model: Any) -> Rollout:
    return eagerly(model, PROMPTS, ends=(), **REQUEST)


def by_static(model: Any) -> Rollout:
    return generate(generator_of(StaticCacheForward(model), ends=()), PROMPTS, num_slots=3, **REQUEST)


def by_fused(model: Any) -> Rollout:
    return generate(generator_of(fused(model), ends=()), PROMPTS, num_slots=3, **REQUEST)


# On a CPU the kernels are interpreted, half a minute for each of these; the others run on a GPU.
INTERPRETED = ("gemma-2", "phi-4-mini")
CASES = [
    *(pytest.param(by_eager, name, marks=() if name in ("gpt2", "gemma-3") else pytest.mark.slow) for name in FAMILIES),
    *(pytest.param(by_static, name, marks=pytest.mark.slow) for name in FAMILIES if name not in NOT_STATIC),
    *(
        pytest.param(by_fused, name, marks=pytest.mark.slow if name in INTERPRETED else pytest.mark.gpu)
        for name in FAMILIES
        if name not in ("bloom", *EXPERTS)
    ),
]


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_greedy_tokens_are_those_of_transformers(backend: Callable[[Any], Rollout], name: str) -> None:
    model: Any = family(name)
    found = backend(model)
    for prompt, response in zip(PROMPTS, found.responses, strict=True):
        ids = torch.tensor([prompt.ids], device=DEVICE)
        plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, "max_new_tokens": 64}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **plain)[0, ids.shape[1] :]
        assert response.tolist() == expected.tolist()
