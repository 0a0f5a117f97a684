"""Sampling from a model that is being trained: the trained weights, the mode, DeepSpeed's hooks."""

import pytest
import torch
from support.ppo_updates import engine_of, make_experience, make_responses, make_updater, update
from support.tiny_models import EOS, PAD, random_rows

from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Sampling, Vocabulary
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from step3_ppo.models.hybrid_engine import HybridEngine


def test_sampling_uses_the_trained_weights_and_leaves_the_mode(world, opt):
    engine = engine_of(CausalLM(load_causal_lm(opt.actor, dtype=torch.float32)))
    hybrid = HybridEngine(engine, Vocabulary(frozenset({EOS}), PAD))
    settings = {"num_samples": 2, "sampling": Sampling(6), "key": RandomKey(1, "rollout")}
    prompts = [Prompt(row.tolist(), n) for n, row in enumerate(random_rows(3))]
    with pytest.raises(RuntimeError, match="outside generation"):
        hybrid.generate(prompts, **settings)
    with hybrid.generation():
        assert not engine.module.training
        first = hybrid.generate(prompts, **settings)
    assert engine.module.training
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.5)
    with hybrid.generation():
        second = hybrid.generate(prompts, **settings)
    assert not all(a.equal(b) for a, b in zip(first.responses, second.responses, strict=True))
    with pytest.raises(ValueError, match="inside"), hybrid.generation():
        raise ValueError("inside")
    assert engine.module.training
    with pytest.raises(RuntimeError, match="outside generation"):
        hybrid.generate(prompts, **settings)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_training_goes_on_after_generation_was_broken_off(world, opt, zero_stage):
    """Under ZeRO-3 generation takes DeepSpeed's hooks off: they must be back."""
    responses = make_responses()
    experience = make_experience(opt, responses)
    updater, fresh = (make_updater(world, opt, zero_stage=zero_stage) for _ in range(2))
    hybrid = HybridEngine(updater.actor, Vocabulary(frozenset({EOS}), PAD))
    settings = {"num_samples": 2, "sampling": Sampling(6), "key": RandomKey(1, "rollout")}
    prompts = [Prompt(row.tolist(), n) for n, row in enumerate(random_rows(3))]
    with hybrid.generation():
        expected = hybrid.generate(prompts, **settings)
    with pytest.raises(GenerationStopped), hybrid.generation():
        hybrid.generate(prompts, **settings, should_stop=lambda: True)
    metrics, stepped = update(updater, responses, experience)
    plain, _ = update(fresh, responses, experience)
    assert stepped and metrics["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-6)
    assert len(expected.responses) == 2 * len(prompts)
    hooks = [
        [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in one.actor.module.modules()]
        for one in (updater, fresh)
    ]
    assert hooks[0] == hooks[1] and (sum(hooks[0]) > 2) == (zero_stage == 3)
