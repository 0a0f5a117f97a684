"""Estimate how long GPUs exchange tensors in each phase of a step.

The estimate takes collectives as rings with the target's bandwidths (benchmarks/reports/scale.md) and lets none overlap
with computation. It leaves out Python's time at each parameter under ZeRO stage 3, and metrics and lengths, which are a
few bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pipeline.configuration.ds_config import Json, device_of
from pipeline.launching.target import LINKS, Target
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.needs import Rollout, StageNeeds
from pipeline.planning.states import gathers_once, gradient_bytes

# Seconds to start a collective (measured in rollouts that two and four GPUs shared), and of each hop of its ring (from
# NCCL's model).
START, HOP = 15e-6, 3.4e-6


@dataclass(frozen=True, slots=True)
class Ring:
    """GPUs that exchange tensors in rings.

    ranks: number of GPUs.
    bytes_per_s: bytes that each of them sends per second.
    """

    ranks: int
    bytes_per_s: float

    @classmethod
    def of(cls, target: Target, ranks: int) -> Self:
        """Return the ring of `ranks` neighbouring GPUs. All GPUs of a machine share its network."""
        is_local = target.hosts_of(ranks) == 1
        gb_per_s = target.link_gb_per_s if is_local else min(target.link_gb_per_s, target.network_gb_per_s)
        return cls(ranks, gb_per_s * 1e9 * LINKS)

    def gather(self, num_bytes: float, calls: float = 1) -> float:
        """Return the seconds of `calls` all-gathers or reduce-scatters; num_bytes: whole tensors of all calls."""
        if self.ranks == 1:
            return 0.0
        steps = self.ranks - 1
        return steps / self.ranks * num_bytes / self.bytes_per_s + calls * (START + steps * HOP)

    def reduce(self, num_bytes: float, calls: float = 1) -> float:
        """Return the seconds of all-reduces: a reduce-scatter and an all-gather, started once."""
        return 2 * self.gather(num_bytes, calls) - (calls * START if self.ranks > 1 else 0.0)


def exchange_seconds(
    needs: StageNeeds, engines: Mapping[str, Json], plan: MemoryPlan, target: Target, *, gather: str
) -> Mapping[str, float]:
    """Return the seconds of exchange in each phase of `phase_seconds`; {} if the bandwidths are not known.

    gather: --zero3-gather.
    """
    if target.num_gpus > 1 and not (target.link_gb_per_s and (target.hosts == 1 or target.network_gb_per_s)):
        return {}
    ring, seconds = Ring.of(target, target.num_gpus), dict[str, float]()
    for name, passes in needs.phases.items():
        if name == "evaluate":
            continue
        roles = dict.fromkeys(work.role for work in passes)
        trained = {role: sum(work.times for work in passes if work.role == role and work.trains) for role in roles}
        seconds[name] = sum(
            gradient_seconds(ring, plan, role, engines[role], micro_batches=times, steps=needs.steps_each)
            for role, times in trained.items()
            if times
        )
        for role in roles:
            zero, size = engines[role]["zero_optimization"], plan.sizes[role]
            if zero["stage"] < 3 or device_of(zero, "offload_param") != "none":
                continue
            once = name == "generate" or gathers_once(size, gather, target.memory)
            times = sum((2 if work.trains else 1) * work.times for work in passes if work.role == role)
            seconds[name] += (1 if once else times) * ring.gather(size.num_bytes, size.num_layers)
    if plan.rollout:
        seconds["generate"] += rollout_seconds(plan.rollout, plan, target)
    return seconds


def gradient_seconds(ring: Ring, plan: MemoryPlan, role: str, engine: Json, *, micro_batches: int, steps: int) -> float:
    """Return the seconds to reduce a model's gradients and, at ZeRO stages 1 and 2, to gather its new weights."""
    zero, size = engine["zero_optimization"], plan.sizes[role]
    num_bytes = gradient_bytes(size, engine) * size.trained
    buckets = math.ceil(size.trained / zero.get("reduce_bucket_size", 500_000_000))
    if zero["stage"] == 3:
        return micro_batches * ring.gather(num_bytes, buckets)
    reduced = (micro_batches if zero["stage"] == 2 else steps) * ring.reduce(num_bytes, buckets)
    return reduced + (steps * ring.gather(size.trained * size.element, buckets) if zero["stage"] else 0.0)


def rollout_seconds(rollout: Rollout, plan: MemoryPlan, target: Target) -> float:
    """Return the seconds of exchange between the GPUs that share the weights of a rollout."""
    size, decode_steps = plan.sizes["actor"], rollout.rounds(plan.slots) * rollout.num_new_tokens
    if rollout.gathers_per_step:
        ring = Ring.of(target, target.num_gpus)
        return decode_steps * ring.gather(size.linear * size.element, rollout.gathers_per_step)
    group = Ring.of(target, rollout.tensor_parallel_size)
    calls = 2 * size.num_layers  # after attention and after the MLP of each layer
    rows = min(plan.slots, rollout.num_responses) * rollout.tensor_parallel_size
    return decode_steps * group.reduce(calls * rows * rollout.hidden_bytes, calls)
