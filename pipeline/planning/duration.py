"""Estimate the time of a stage's phases from operations, bytes and data sheets; rough, and labelled so.

The shares of a data sheet's figures that are reached were measured on an H200, full fine-tuning in micro-batches of
thousands of tokens (docs/memory.md); other devices are taken to reach the same. Exchange between GPUs is counted by
`exchange.py`. Not counted: the optimizer's own step, offload, data, evaluation and saving.
"""

from collections.abc import Mapping

from pipeline.launching.target import Target
from pipeline.models.flops import TrainingWork, training_work
from pipeline.planning.measurement import build, model_size
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.needs import ModelUse, Pass, StageNeeds

TRAINED, SCORED = 0.5, 0.55  # of the TFLOP/s: with gradients, and without
READ = 0.65  # of the bandwidth, by decode steps
# A graph is captured after two decode steps that are launched one kernel after the other, like itself; the host takes
# so many seconds for a layer (OPT-1.3B's 256 decode steps of 24 layers took 1.92 s so, docs/benchmarks).
LAUNCHED_STEPS, LAUNCH_S = 3, 0.3e-3


def forward_flops(work: TrainingWork, step: Pass) -> float:
    """Count the operations of one forward pass: 2 for each weight and token, attention by the squared length."""
    head = 2.0 * work.head_weights * step.num_head_tokens
    attention = 2.0 * work.layers * work.attention_width * step.rows * step.length**2
    return 2.0 * work.weights * step.rows * step.length + head + attention


def pass_flops(use: ModelUse, dtype: str, step: Pass) -> float:
    """Count the operations of all passes like `step`, with those that checkpointing repeats."""
    work = training_work(build(use, dtype).model)
    forward = forward_flops(work, step)
    if not step.trains:
        return step.times * forward
    tokens = step.rows * step.length
    both = work.flops(num_tokens=tokens, num_squares=tokens * step.length, num_head_tokens=step.num_head_tokens)
    return step.times * (both + (forward if use.settings.gradient_checkpointing else 0.0))


def renewal_seconds(needs: StageNeeds, plan: MemoryPlan, target: Target) -> float:
    """Return the seconds in which a rollout gets back what left the device after the last one; 0: none, or not known.

    The KV cache is zeroed and its graph captured; optimizer states go to the host and back at its measured speed. What
    the driver takes to free and allocate is not counted.
    """
    seconds = 0.0
    if needs.rollout and target.tb_per_s and not plan.keeps_rollout:
        cache = needs.rollout.num_bytes(plan.slots) - needs.rollout.copied_bytes
        seconds += cache / (target.tb_per_s * 1e12 * READ) + LAUNCHED_STEPS * LAUNCH_S * plan.sizes["actor"].num_layers
    if needs.idle_states_leave and target.measured:
        leaving = sum(held.optimizer for held in plan.states.values())
        seconds += 2 * leaving / (target.measured.host_gb_per_s * 1e9)
    return seconds


def phase_seconds(needs: StageNeeds, dtype: str, target: Target, *, slots: int) -> Mapping[str, float]:
    """Return the seconds of each phase of a step, of stage 3 of a rollout with its steps, for rows of full length.

    Empty where the target's speeds, or the work of a model, are not known. slots: rows of the KV cache.
    """
    if not (target.tflops and target.tb_per_s):
        return {}
    uses = {use.role: use for use in needs.models}
    if not all(training_work(build(use, dtype).model).weights for use in needs.models):
        return {}
    seconds = dict[str, float]()
    for name, passes in needs.phases.items():
        if name == "evaluate":
            continue
        for step in passes:
            rate = target.tflops * 1e12 * (TRAINED if step.trains else SCORED)
            seconds[name] = seconds.get(name, 0.0) + pass_flops(uses[step.role], dtype, step) / rate
    if rollout := needs.rollout:
        weights = model_size(uses["actor"], dtype).num_bytes / rollout.tensor_parallel_size
        length = rollout.cache_length - rollout.num_new_tokens / 2
        read = weights + min(slots, rollout.num_responses) * length * rollout.bytes_per_token
        seconds["generate"] += rollout.rounds(slots) * rollout.num_new_tokens * read / (target.tb_per_s * 1e12 * READ)
    return seconds
