"""Check the settings of generation that contradict each other, without a model."""

from math import gcd

from pipeline.configuration.groups import ModelConfig
from pipeline.errors import counted, raise_lines
from pipeline.generation.options import why_not_streamed
from step3_ppo.flags.groups import SamplingConfig


def check_generation(sampling: SamplingConfig, actor: ModelConfig, ranks: int | None) -> None:
    """Raise InputError, a line each, for settings with which no model can generate; ranks None: not yet known."""
    partitioned = actor.partitioned == "weights"
    size, backend, errors = sampling.inference_tp_size, sampling.generation_engine, list[str]()
    if ranks is not None and ranks % size:
        errors.append(f"--inference-tp-size {size}: must divide the {counted(ranks, 'rank')}; give {gcd(size, ranks)}")
    if size > 1 and backend not in ("auto", "fused"):
        errors.append(f"--inference-tp-size {size}: needs the fused backend, got {backend}")
    reason = why_not_streamed(partitioned=partitioned, ranks=ranks, tensor_parallel_size=size, backend=backend)
    if sampling.rollout_weights == "streamed" and reason:
        errors.append(f"--rollout-weights streamed: {reason}; else give auto")
    unmerged = actor.lora_dim and not sampling.merge_lora_for_generation
    if backend == "fused" and unmerged and actor.quantization == "none":
        errors.append(
            "--generation-engine fused: it takes no unmerged adapters (--merge-lora-for-generation false); use auto"
        )
    if backend == "fused" and actor.quantization == "nf4":
        errors.append("--generation-engine fused: it reads no 4-bit weights (--actor-quantization nf4); use auto")
    raise_lines(errors)
