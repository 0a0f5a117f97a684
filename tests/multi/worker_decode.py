"""Fast generation over ranks: what tests/multi/test_ranks_decode.py compares."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stages import current_world
from support.decode_models import EOS, KEY, PAD, llama, opt, random_prompts, shaken_all
from support.ds_arguments import PARTITIONED, built
from worker_ppo import responses_of, setup

from pipeline import dist
from pipeline.configuration.groups import ModelConfig
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.generation import scheduler
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import GenerationStopped, Rollout, Sampling, Vocabulary
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.partitions import gathered
from pipeline.rendezvous import num_ranks
from pipeline.training.steps import step_together
from step3_ppo.models.hybrid_engine import HybridEngine

FUSED, EAGER = (GenerationOptions(backend=backend) for backend in ("fused", "eager"))
PROMPTS = random_prompts((3, 5, 1))
ENDS = frozenset({EOS, *range(20, 60)})
STOP = ("--stop-strings", "a", "e", "s")
MAKERS = {
    "opt": opt,
    "opt-350m": partial(opt, do_layer_norm_before=False, word_embed_proj_dim=16),
    "llama": partial(llama, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
}


def engine_of(model: Any, zero_stage: int) -> TrainingEngine:
    module = CausalLM(model)
    settings = built(
        user_json=PARTITIONED, zero_stage=zero_stage, dtype="fp32", micro_batch_size=1, gradient_accumulation_steps=1,
        world_size=dist.world_size(), max_grad_norm=0.0, device="cpu",
    )  # fmt: skip
    # A gradient that is zero but for rounding must not become a step of full size.
    groups = parameter_groups(module, ModelConfig(learning_rate=1e-2, weight_decay=0.0, lora_learning_rate=1e-2))
    return TrainingEngine(module.train(), groups, settings, betas=(0.9, 0.95), eps=1e-2)


def change_weights(engine: TrainingEngine) -> None:
    """A step on the same rows on every rank, and another value for every number."""
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(2))
    chosen = torch.ones(2, 8, dtype=torch.bool)
    loss = -engine(ids, attention_mask=torch.ones_like(ids, dtype=torch.bool), selected=chosen).log_probs.mean()
    engine.backward(loss, last=True)
    assert step_together([engine], 1.0, loss=loss)
    parameters = list(engine.module.parameters())
    with gathered(parameters, writer=True):
        shaken_all(parameters)


def hybrid_of(engine: TrainingEngine, options: GenerationOptions) -> HybridEngine:
    return HybridEngine(engine, Vocabulary(ENDS, PAD), options=options)


def sampled(hybrid: HybridEngine, length: int = 4, **more: Any) -> Rollout:
    with hybrid.generation():
        return hybrid.generate(PROMPTS, num_samples=2, sampling=Sampling(length), key=KEY, batch_size=2, **more)


def findings(results: Rollout) -> dict[str, Any]:
    return {
        "responses": [row.tolist() for row in results.responses],
        "log_probs": torch.cat(results.log_probs),
        "finished": results.finished.tolist(),
    }


def shared(inputs: Path, name: str, stage: int = 0, size: int | None = None) -> dict[str, Any]:
    """Rollouts before and after a change of weights, sharded over `size` ranks (or all); one rank samples eagerly."""
    engine = engine_of(MAKERS[name](), stage)
    hybrid = hybrid_of(
        engine, EAGER if dist.world_size() == 1 else replace(FUSED, tensor_parallel_size=size or dist.world_size())
    )
    first = findings(sampled(hybrid))
    change_weights(engine)
    return {"first": first, "second": findings(sampled(hybrid))}


def uneven(inputs: Path) -> dict[str, Any]:
    """Under ZeRO-3 ranks draw different numbers of tokens, train on, and draw again."""
    engine = engine_of(opt(), 3)
    hybrid = hybrid_of(engine, FUSED)
    first = sampled(hybrid, length=2 if current_world().rank else 7)
    change_weights(engine)
    return {"longest": max(map(len, first.responses)), "second": findings(sampled(hybrid))}


def stopped(inputs: Path) -> dict[str, Any]:
    """One rank of a group is asked to stop: none continues, and the next rollout is whole."""
    return stopped_by_the_last_rank(
        hybrid_of(engine_of(opt(), 0), replace(FUSED, tensor_parallel_size=dist.world_size())), sampled
    )


def stopped_by_the_last_rank(hybrid: HybridEngine, sample: Callable[..., Rollout]) -> dict[str, Any]:
    """Return whether a rollout was stopped on this rank, how often it asked, and the next rollout."""
    asked: list[None] = []

    def should_stop() -> bool:
        asked.append(None)
        return current_world().rank == dist.world_size() - 1 and len(asked) > 2

    try:
        sample(hybrid, should_stop=should_stop)
        ended = False
    except GenerationStopped:
        ended = True
    return {"stopped": ended, "asked": len(asked), "next": findings(sample(hybrid))}


def step_3(inputs: Path) -> dict[str, Any]:
    """The responses of a rollout of step 3: eager on one rank; several ranks share and copy the weights."""
    size = dist.world_size()
    backend = ("--generation-engine", "eager") if size == 1 else ("--generation-engine", "fused")
    words = (*backend, "--inference-tp-size", size, "--max-answer-seq-len", 4, *STOP)
    loop = setup(inputs, 2 // size, words)
    responses = responses_of(loop.collect().responses)
    generator = loop.ppo.hybrid._generator
    copied = generator.forward.num_copied_bytes if generator else 0
    return {"responses": responses, "copied bytes": copied, "stopped": num_stopped(responses)}


def num_stopped(responses: dict[str, torch.Tensor]) -> int:
    """How many responses have ended, but not by an EOS."""
    last = (responses["prompt_lengths"] + responses["response_lengths"] - 1).unsqueeze(1)
    ends = responses["sequences"].gather(1, last).squeeze(1) == EOS
    return int((responses["finished"] & ~ends).sum())


def cases() -> dict[str, Any]:
    scheduler.POLL_INTERVAL, scheduler.POLL_INTERVAL_WHILE_WAITING = 2, 1
    results: dict[str, Any] = {f"shared {name}": partial(shared, name=name) for name in MAKERS}
    if num_ranks() > 1:
        results["shared llama z3"] = partial(shared, name="llama", stage=3)
        results["whole llama z3"] = partial(shared, name="llama", stage=3, size=1)
        results["uneven z3"] = uneven
        results["stopped"] = stopped
    results["step 3"] = step_3
    return results
