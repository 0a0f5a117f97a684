"""Streamed weights over ranks: the cases that tests/multi/test_ranks_streaming.py compares."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stages import current_world
from support.decode_models import KEY, NUM_TOKENS, PAD, llama, opt, random_prompts
from worker_decode import FUSED, STOP, change_weights, engine_of, findings, num_stopped, stopped_by_the_last_rank
from worker_ppo import responses_of, setup

from pipeline.engine.engine import TrainingEngine
from pipeline.generation import prefills, scheduler, sources
from pipeline.generation.forwards import fused_weights, streaming
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import Rollout, Sampling, Vocabulary
from pipeline.models.lora import add_lora
from step3_ppo.models.hybrid_engine import HybridEngine

WHOLE, STREAMED = (replace(FUSED, weights=weights) for weights in ("whole", "streamed"))
# Of rank 0 and of rank 1: six responses in four slots, two in two.
PROMPTS = [random_prompts((3, 5, 1), seed=4), random_prompts((4,), seed=7)]
PROMPTS_AT_ONCE = [2, 1]
# Every other token, so that short responses end at different times.
ENDS = frozenset(range(2, NUM_TOKENS, 2))


def lora() -> Any:
    settings: dict[str, Any] = {"dim": 3, "alpha": 12, "dropout": 0.0, "module_name": "all-linear", "seed": 1}
    return add_lora(opt(num_attention_heads=1), only_lora=True, task="CAUSAL_LM", **settings)


MAKERS = {
    "opt": partial(opt, num_attention_heads=1),
    "llama": partial(llama, num_hidden_layers=3, attention_bias=True),
    "lora": lora,
}


def hybrid_of(engine: TrainingEngine, options: GenerationOptions) -> HybridEngine:
    return HybridEngine(engine, Vocabulary(ENDS, PAD), options=options)


def sampled(hybrid: HybridEngine, **more: Any) -> Rollout:
    rank = current_world().rank
    with hybrid.generation():
        return hybrid.generate(
            PROMPTS[rank], num_samples=2, sampling=Sampling(3), key=KEY, batch_size=PROMPTS_AT_ONCE[rank], **more
        )


def groups_of(hybrid: HybridEngine) -> list[int]:
    """Layers of each group that is gathered; none where the weights are whole."""
    weights = hybrid._generator.forward.weights
    return [len(group.layers) for group in weights.groups] if isinstance(weights, streaming.StreamedWeights) else []


def compared(inputs: Path, name: str) -> dict[str, Any]:
    """Rollouts before and after a change of all weights, whole and streamed."""
    engine = engine_of(MAKERS[name](), 3)
    hybrids = {"whole": hybrid_of(engine, WHOLE), "streamed": hybrid_of(engine, STREAMED)}
    first = {kind: findings(sampled(hybrid)) for kind, hybrid in hybrids.items()}
    addresses = hybrids["streamed"]._generator.forward.addresses()
    change_weights(engine)
    second = {kind: findings(sampled(hybrid)) for kind, hybrid in hybrids.items()}
    weights = hybrids["streamed"]._generator.forward.weights
    return {
        "first": first,
        "second": second,
        "groups": {kind: groups_of(hybrid) for kind, hybrid in hybrids.items()},
        "same addresses": addresses == hybrids["streamed"]._generator.forward.addresses(),
        "bytes": [weights.num_copied_bytes, weights.slice_bytes, weights.gather_bytes],
    }


def stopped(inputs: Path) -> dict[str, Any]:
    """One rank is asked to stop: none goes on; the next rollout is whole."""
    return stopped_by_the_last_rank(hybrid_of(engine_of(MAKERS["opt"](), 3), STREAMED), sampled)


def decided(inputs: Path) -> dict[str, Any]:
    """Weights that do not fit on rank 1 alone are streamed on both."""
    engine = engine_of(MAKERS["opt"](), 3)
    results = {}
    for what, fit in {"does not fit": current_world().rank == 0, "fits": True}.items():
        sources.whole_weights_fit = lambda *_, fit=fit: fit
        hybrid = hybrid_of(engine, FUSED)
        with hybrid.generation():
            results[what] = groups_of(hybrid)
    return results


def step_3(inputs: Path) -> dict[str, Any]:
    """The responses of a rollout of step 3 with the flag."""
    words = ("--generation-engine", "fused", "--rollout-weights", "streamed", "--max-answer-seq-len", 2, *STOP)
    loop = setup(inputs, 1, words, stage=3)
    hybrid = loop.ppo.hybrid
    streamed = responses_of(loop.collect().responses)
    groups = groups_of(hybrid)
    whole = HybridEngine(hybrid.engine, hybrid.vocabulary, options=WHOLE)
    loop.ppo = replace(loop.ppo, hybrid=whole)
    found = {"streamed": streamed, "whole": responses_of(loop.collect().responses)}
    return {**found, "groups": groups, "stopped": num_stopped(streamed)}


def cases() -> dict[str, Any]:
    scheduler.POLL_INTERVAL, scheduler.POLL_INTERVAL_WHILE_WAITING = 2, 1
    # Prompts of six tokens at once, padding counted: slots are filled by several prefills, fewer on one rank.
    prefills.MAX_PREFILL_TOKENS = 6
    fused_weights.GROUP_BYTES = 1  # each layer is a group
    results: dict[str, Any] = {name: partial(compared, name=name) for name in MAKERS}
    return results | {"stopped": stopped, "decided": decided, "step 3": step_3}
