"""Estimate the time of a stage's phases from its kernels and data sheets; rough, and labelled so.

A pass takes the longer of its kernels on the device and of launching them from the host, a decode step what it reads
and a little for each kernel. Kernels are those of the pass on the meta device (`counting.py`). The constants were set
from runs on H200s (docs/memory.md); other devices are taken to reach the same shares of their data sheets. Exchange
between GPUs is counted by `exchange.py`. Not counted: offload, data, evaluation and saving.
"""

from collections.abc import Mapping
from dataclasses import replace

from pipeline.configuration.ds_config import Json
from pipeline.launching.target import COPIES, Target
from pipeline.models.flops import training_work
from pipeline.planning.counting import Kernel
from pipeline.planning.measurement import build, count_pass, model_size
from pipeline.planning.memory import MemoryPlan, device_of, gathers_once
from pipeline.planning.needs import ModelUse, Pass, Rollout, StageNeeds

# Each constant with the runs on H200s that it was set from; docs/memory.md compares them with all others.
# Of the TFLOP/s, by products and attention: 97 % of what large products reach, as in the profile of a step of OPT-1.3B.
# Of the bandwidth, by all other kernels of a pass: steps of OPT-1.3B with 16 to 64 rows.
PRODUCTS, MOVED = 0.78, 0.47
LAUNCH_S = 33e-6  # of the host, for a kernel of a pass: training of Llama-7B with LoRA, four rows
# Of the bandwidth, by kernels that dequantise int8 codes: for a pass, and in the products of a decode step, which read
# codes alone. Scoring and the rollout of Llama-7B in int8.
DEQUANTISED, CODES = 0.11, 0.17
# Bytes that an optimizer step reads and writes, at the speed of copies, for each of its states: gradients flattened
# (2 + 2 bytes a weight), normed (2), in fp32 (2 + 4), clipped (4 + 4), AdamW (16 + 12), new weights (4 + 2); 12 states.
STEP_TRAFFIC = 54 / 12
DECODE_KERNEL_S = 4e-6  # for a kernel of a decode step beside what it reads at the speed of copies: OPT-1.3B, 64 rows
# DeepSpeed's Python: for a hook at the gradient of a parameter, in which the host works (GPT2-XL, ZeRO-2 and 3); to
# gather a layer around a pass (zero3.py) and, at stage 0, to look at a gradient (GPT2-XL), for which the device waits.
HOOK_S, GATHER_S, LOOK_S = 220e-6, 3e-3, 100e-6
# A graph is captured after two decode steps that are launched one kernel after the other, like itself; the host takes
# so many seconds for a layer (OPT-1.3B's 256 decode steps of 24 layers took 1.92 s so, docs/benchmarks).
LAUNCHED_STEPS, LAYER_S = 3, 0.3e-3


def pass_seconds(use: ModelUse, dtype: str, step: Pass, target: Target, *, hooked: bool = False) -> float:
    """Return the seconds of all passes like `step`: those of the device, or where they are longer those of the host.

    The host launches kernels, and calls hooks at the gradients of parameters if there are any.
    """
    use = replace(use, on_cpu=target.is_cpu, trained=use.trained and not step.without_adapters)
    kernels = count_pass(use, dtype, replace(step, times=1, without_adapters=False)).kernels
    on_device = sum(times * kernel_seconds(kernel, target) for kernel, times in kernels.items())
    on_host = LAUNCH_S * sum(kernels.values())
    if step.trains and hooked:
        on_host += HOOK_S * num_trained(use, dtype)
    return step.times * max(on_device, on_host)


def num_trained(use: ModelUse, dtype: str) -> int:
    """Return the number of trained parameters of a model, as tensors."""
    return sum(parameter.requires_grad for parameter in build(use, dtype).parameters())


def has_hooks(engine: Json) -> bool:
    """Tell whether DeepSpeed has a hook at each gradient under the JSON `engine`: ZeRO stage 1 can do without."""
    zero = engine["zero_optimization"]
    return zero["stage"] == 3 or bool(zero["stage"] and zero.get("contiguous_gradients"))


def kernel_seconds(kernel: Kernel, target: Target) -> float:
    """Return the seconds of a kernel on the device: of its operations or of its bytes, whichever is longer."""
    moved = target.tb_per_s * 1e12 * (DEQUANTISED if kernel.dequantises else MOVED)
    return max(kernel.operations / (target.tflops * 1e12 * PRODUCTS), kernel.num_bytes / moved)


def decode_seconds(actor: ModelUse, dtype: str, rollout: Rollout, target: Target, *, slots: int) -> float:
    """Return the seconds of a rollout's decode steps, which read weights, and keys and values of half the new tokens.

    Tables of embeddings are looked up, not read.
    """
    size, head = model_size(actor, dtype), training_work(build(actor, dtype).model).head_weights
    weights = (size.num_bytes - (size.embeddings - head) * size.element) / rollout.tensor_parallel_size
    length = rollout.cache_length - rollout.num_new_tokens / 2
    read = weights + min(slots, rollout.num_responses) * length * rollout.bytes_per_token
    codes = size.linear / rollout.tensor_parallel_size if actor.settings.quantization == "int8" else 0
    step = (read - codes) / (target.tb_per_s * 1e12 * COPIES) + codes / (target.tb_per_s * 1e12 * CODES)
    step += rollout.kernels_per_step * DECODE_KERNEL_S
    return rollout.rounds(slots) * rollout.num_new_tokens * step


def renewal_seconds(needs: StageNeeds, plan: MemoryPlan, target: Target) -> float:
    """Return the seconds in which a rollout gets back what left the device after the last one; 0: none, or not known.

    The KV cache is zeroed and its graph captured; optimizer states go to the host and back at its measured speed. What
    the driver takes to free and allocate is not counted.
    """
    seconds = 0.0
    if needs.rollout and target.tb_per_s and not plan.keeps_rollout:
        cache = needs.rollout.num_bytes(plan.slots) - needs.rollout.copied_bytes
        seconds += cache / (target.tb_per_s * 1e12 * COPIES) + LAUNCHED_STEPS * LAYER_S * plan.sizes["actor"].num_layers
    if needs.idle_states_leave and target.measured:
        leaving = sum(held.optimizer for held in plan.states.values())
        seconds += 2 * leaving / (target.measured.host_gb_per_s * 1e9)
    return seconds


def phase_seconds(
    needs: StageNeeds, engines: Mapping[str, Json], plan: MemoryPlan, dtype: str, target: Target
) -> Mapping[str, float]:
    """Return the seconds of each phase of a step, of stage 3 of a rollout with its steps, for rows of full length.

    Empty where the target's speeds, or the work of a model, are not known; its TFLOP/s are those of 16 bits.
    """
    if not (target.tflops and target.tb_per_s) or dtype == "fp32":
        return {}
    uses = {use.role: use for use in needs.models}
    if not all(training_work(build(use, dtype).model).weights for use in needs.models):
        return {}
    seconds = {
        name: sum(
            pass_seconds(uses[step.role], dtype, step, target, hooked=has_hooks(engines[step.role])) for step in passes
        )
        for name, passes in needs.phases.items()
        if name != "evaluate"
    }
    states = sum(held.optimizer for held in plan.states.values())
    seconds["train"] += needs.steps_each * STEP_TRAFFIC * states / (target.tb_per_s * 1e12 * COPIES)
    if needs.rollout:
        seconds["generate"] += decode_seconds(uses["actor"], dtype, needs.rollout, target, slots=plan.slots)
    return seconds


def waiting_seconds(
    needs: StageNeeds, engines: Mapping[str, Json], plan: MemoryPlan, dtype: str, target: Target, *, gather: str
) -> Mapping[str, float]:
    """Return the seconds that the device waits for DeepSpeed's Python in training and scoring.

    Under ZeRO stage 3 a layer that is not gathered once a phase is gathered around each forward pass, recomputed ones
    too, and each backward pass; at stage 0 each gradient is looked at in an optimizer step. gather: --zero3_gather.
    """
    uses, seconds = {use.role: use for use in needs.models}, dict.fromkeys(needs.phases, 0.0)
    for name, passes in needs.phases.items():
        for step in passes:
            use, size, zero = uses[step.role], plan.sizes[step.role], engines[step.role]["zero_optimization"]
            is_whole = name == "generate" or gathers_once(size, gather, target.memory)
            if zero["stage"] == 3 and device_of(zero, "offload_param") == "none" and not is_whole:
                gathers = 2 + use.settings.gradient_checkpointing if step.trains else 1
                seconds[name] += step.times * gathers * size.num_layers * GATHER_S
            if zero["stage"] == 0 and step.trains:
                seconds[name] += needs.steps_each * num_trained(use, dtype) * LOOK_S
    return seconds
