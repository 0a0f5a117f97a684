"""Estimate the time of a stage's phases from its kernels and data sheets; rough, and labelled so.

A pass takes the device's time for its kernels or the host's time to launch them, whichever is longer; a decode step
takes the time to read its data and a constant for each kernel. Kernels are those of the pass on the meta device
(`counting.py`). The constants were set from runs on H200s (benchmarks/reports/times.md); other devices are assumed to
reach the same shares of their data sheets. `exchange.py` counts exchange between GPUs. Not counted: offload, data,
evaluation, saving.
"""

from collections.abc import Mapping
from dataclasses import replace

from pipeline.configuration.ds_config import Json, device_of
from pipeline.launching.target import COPIES, Target
from pipeline.models.flops import training_work
from pipeline.planning.counting import Kernel
from pipeline.planning.measurement import build, count_pass, model_size
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.needs import ModelUse, Pass, Rollout, StageNeeds
from pipeline.planning.states import gathers_once

# Each constant names the runs on H200s that it was set from; without it at least one phase of
# benchmarks/reports/times.md moves by 5 %.
# Share of the TFLOP/s that products reach: 97 % of what large products do, as in the profile of a step of OPT-1.3B.
PRODUCTS = 0.78
# Share that attention would reach with endless heads, and the width whose products take as long as the exponentials of
# a head: between the rates of the flash kernel and of cuDNN's on H100s (Shah et al. 2024, FlashAttention-3, figures 5
# and 6). A plan does not know which of them a run takes: cuDNN's only for shapes that recur.
ATTENTION, EXPONENTIALS = 0.53, 40
# Share of the bandwidth that all other kernels of a pass reach: steps of OPT-1.3B with 16 to 64 rows.
MOVED = 0.47
# Seconds that the host takes to launch a kernel of a pass: training of Llama-7B with LoRA, four rows.
LAUNCH_S = 33e-6
# Share of the bandwidth that kernels reach which dequantise int8 codes, in passes: scoring of Llama-7B in int8.
DEQUANTISED = 0.11
# Share of the bandwidth at which products of a decode step read int8 codes: the rollout of Llama-7B in int8.
CODES = 0.17
# Bytes that an optimizer step reads and writes, at the speed of copies, for each of its states: gradients flattened
# (2 + 2 bytes a weight), normed (2), in fp32 (2 + 4), clipped (4 + 4), AdamW (16 + 12), new weights (4 + 2); 12 states.
STEP_TRAFFIC = 54 / 12
# Seconds that a kernel adds to a decode step, besides reading at the speed of copies: OPT-1.3B, 64 rows.
DECODE_KERNEL_S = 4e-6
# Seconds in which a KV cache that is given back is freed and made again, with its graph: a rollout of Qwen2.5-1.5B on
# an H100 (benchmarks/reports/experiments.md, "What it costs to give the KV cache back").
GIVEN_BACK_S = 0.3
# Seconds of DeepSpeed's Python on the host: to run the hook of a gradient (GPT2-XL, ZeRO-2 and 3), to gather a layer
# around a pass (zero3.py), and to check a gradient at stage 0 (GPT2-XL). The device waits for the last two.
HOOK_S, GATHER_S, LOOK_S = 220e-6, 3e-3, 100e-6


def pass_seconds(use: ModelUse, dtype: str, step: Pass, target: Target, *, hooked: bool = False) -> float:
    """Return the seconds of all passes like `step`: the device's or the host's, whichever are more.

    The host launches kernels, and if the model is `hooked` runs the hooks of gradients.
    """
    use = replace(use, on_cpu=target.is_cpu, trained=use.trained and not step.without_adapters)
    kernels = count_pass(use, dtype, step).kernels
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
    width = kernel.head_width
    share = ATTENTION * width / (width + EXPONENTIALS) if width else PRODUCTS
    return max(kernel.operations / (target.tflops * 1e12 * share), kernel.num_bytes / moved)


def decode_seconds(actor: ModelUse, dtype: str, rollout: Rollout, target: Target, *, slots: int) -> float:
    """Return the seconds of a rollout's decode steps, which read the weights, and a KV cache of mean length.

    Embedding tables are not read as a whole.
    """
    size, head = model_size(actor, dtype), training_work(build(actor, dtype).model).head_weights
    weights = (size.num_bytes - (size.embeddings - head) * size.element) / rollout.tensor_parallel_size
    length = rollout.cache_length - rollout.num_new_tokens / 2
    read = weights + min(slots, rollout.num_responses) * length * rollout.bytes_per_token
    codes = size.linear / rollout.tensor_parallel_size if actor.settings.quantization == "int8" else 0
    step = (read - codes) / (target.tb_per_s * 1e12 * COPIES) + codes / (target.tb_per_s * 1e12 * CODES)
    step += rollout.kernels_per_step * DECODE_KERNEL_S
    return rollout.rounds(slots) * rollout.num_new_tokens * step


def states_seconds(needs: StageNeeds, plan: MemoryPlan, target: Target) -> float:
    """Return the seconds in which optimizer states move to the host and back around a rollout; 0: none, or unknown."""
    if not (needs.idle_states_leave and target.measured):
        return 0.0
    return 2 * sum(states.optimizer for states in plan.states.values()) / (target.measured.host_gb_per_s * 1e9)


def phase_seconds(
    needs: StageNeeds, engines: Mapping[str, Json], plan: MemoryPlan, dtype: str, target: Target
) -> Mapping[str, float]:
    """Return the seconds of each phase of a step, of stage 3 of a rollout with its steps, for rows of full length.

    Empty in fp32, since a target's TFLOP/s are those of 16 bits, and where its speeds or a model's operations are not
    known.
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
    states = sum(states.optimizer for states in plan.states.values())
    seconds["train"] += needs.steps_each * STEP_TRAFFIC * states / (target.tb_per_s * 1e12 * COPIES)
    if plan.rollout:
        seconds["generate"] += decode_seconds(uses["actor"], dtype, plan.rollout, target, slots=plan.slots)
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
