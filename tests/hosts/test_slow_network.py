"""The time that hosts exchange tensors over a network of a known speed, planned and measured."""

import re
from pathlib import Path

import pytest
from cluster import Cluster
from host_runs import flags
from namespaces import slow_network
from support.tiny_run import read_metrics
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pipeline.planning.exchange import Ring

pytestmark = pytest.mark.hosts
MB_PER_S, STEPS, BYTES = 20, 8, 4


@pytest.fixture(scope="module")
def wide(two: Cluster) -> tuple[Path, int]:
    """A model of some 7 million fp32 weights, whose exchange takes longer than anything else; its number of weights."""
    two.require_namespaces("a network of a known speed")
    tokenizer = AutoTokenizer.from_pretrained(two.disk / "data" / "base")
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes))
    for part in (model, tokenizer):
        part.save_pretrained(two.disk / "wide")
    return two.disk / "wide", sum(weight.numel() for weight in model.parameters())


def step_seconds(two: Cluster, model: Path, output: str, zero_stage: int) -> float:
    """Return the seconds of the quickest step of stage 1: others wait for what else the machine does."""
    words = ("--step", 1, "--max-steps", STEPS, "--sft.num-train-epochs", 1000, "--sft.zero-stage", zero_stage)
    run = two.train("node-a", *flags(two.disk, output, *words, "--actor-model", model))
    assert run.wait() == 0, run.text
    return min(line["step_s"] for line in read_metrics(two.disk / output / "runs/sft") if "step_s" in line)


def measured_link(two: Cluster) -> float:
    """Return the bytes that `--check` saw each host send in a second."""
    run = two.train("node-a", "--check", *flags(two.disk, "checked", "--step", 1))
    assert run.wait() == 0, run.text
    found = re.search(r"each sends ([0-9.]+) GB/s", run.text)
    assert found, run.text
    return float(found[1]) * 1e9


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_step_over_a_slow_network_is_longer_by_the_planned_exchange(zero_stage, two, wide):
    """Gradients are summed once a step; at stage 1 weights are gathered after it."""
    model, num_weights = wide
    quick = step_seconds(two, model, f"quick-{zero_stage}", zero_stage)
    with slow_network(list(two.hosts), MB_PER_S):
        ring = Ring(2, measured_link(two))
        slow = step_seconds(two, model, f"slow-{zero_stage}", zero_stage)
    planned = ring.reduce(BYTES * num_weights) + (ring.gather(BYTES * num_weights) if zero_stage else 0.0)
    print(
        f"ZeRO-{zero_stage}: {ring.bytes_per_s / 1e6:.0f} MB/s, planned {planned:.2f} s, measured {slow - quick:.2f} s"
    )
    assert ring.bytes_per_s == pytest.approx(MB_PER_S * 1e6, rel=0.15)
    assert slow - quick == pytest.approx(planned, rel=0.25)
