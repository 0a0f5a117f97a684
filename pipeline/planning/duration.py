"""Estimate the time of a stage's phases from its kernels and the data sheets of devices. The estimate is rough.

- A pass takes the device's time for its kernels or the host's time to launch them, whichever is longer.
- A decode step takes the time to read its data, and a constant for each kernel.

Kernels are those of the pass on the meta device (`counting.py`). Where its comment names no other source, a constant
was measured on H200s (benchmarks/reports/times.md); other devices are assumed to reach the same shares of their data
sheets. Of offload, only the moves of optimizer states around a rollout are estimated (`states_seconds`). The exchange
between GPUs, data, evaluation and saving are not included.
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

# The comment of each constant names the runs that it was measured in, or its other source. Without the constant, at
# least one phase in the table of benchmarks/reports/times.md changes by 5 % or more.
# Share of the data sheet's TFLOP/s that matrix products of a pass reach (a step of OPT-1.3B): 97 % of
# target.PRODUCTS, the share that large products alone reach.
PRODUCTS = 0.78
# Share of the TFLOP/s that attention would reach with infinitely wide heads, and the head width at which products take
# as long as the exponentials. Both lie between the flash kernel and cuDNN's on H100s (Shah et al. 2024,
# FlashAttention-3, figures 5 and 6): a plan does not know which of the two a run uses.
ATTENTION, EXPONENTIALS = 0.53, 40
# Share of the bandwidth that all other kernels of a pass reach (steps of OPT-1.3B with 16 to 64 rows).
MOVED = 0.47
# Seconds of the host to launch a kernel of a pass (training of Llama-7B with LoRA, four rows).
LAUNCH_S = 33e-6
# Share of the bandwidth that kernels of a pass reach when they dequantise int8 codes (scoring of Llama-7B in int8).
DEQUANTISED = 0.11
# Share of the bandwidth at which products of a decode step read int8 codes (a rollout of Llama-7B in int8).
CODES = 0.17
# Bytes that an optimizer step reads and writes for each byte of its states, at the speed of copies: counted, not
# measured. Per weight: gradients flattened (2 + 2), normed (2), in fp32 (2 + 4), clipped (4 + 4), AdamW (16 + 12), new
# weights (4 + 2); the states have 12 bytes.
STEP_TRAFFIC = 54 / 12
# Seconds that a kernel adds to a decode step, besides reading at the speed of copies (OPT-1.3B, 64 rows).
DECODE_KERNEL_S = 4e-6
# Seconds to free the KV cache and allocate it again with its graph (a rollout of Qwen2.5-1.5B on an H100;
# benchmarks/reports/experiments.md, "What it costs to give the KV cache back").
RECREATE_CACHE_S = 0.3
# Seconds of DeepSpeed's Python on the host, measured with GPT2-XL: to run a gradient's hook (ZeRO-2 and 3), to gather a
# layer around a pass (ZeRO-3; zero3.py), and to check one weight's gradient for inf and NaN (ZeRO-0). The device waits
# for the last two.
HOOK_S, GATHER_S, CHECK_S = 220e-6, 3e-3, 100e-6


def pass_seconds(use: ModelUse, dtype: str, step: Pass, target: Target, *, hooked: bool = False) -> float:
    """Return the seconds of all `step.times` passes of one kind: the device's or the host's, whichever are more.

    The host launches kernels. If `hooked`, it also runs the hooks of gradients.

    Args:
        step: the pass: its rows, their length, and how often it runs; not an optimizer step.
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
    """Tell whether DeepSpeed runs a hook for each gradient under the JSON `engine`."""
    zero = engine["zero_optimization"]
    return zero["stage"] == 3 or bool(zero["stage"] and zero.get("contiguous_gradients"))


def kernel_seconds(kernel: Kernel, target: Target) -> float:
    """Return the seconds of a kernel on the device: for its operations or for its bytes, whichever is longer."""
    moved = target.tb_per_s * 1e12 * (DEQUANTISED if kernel.dequantises else MOVED)
    width = kernel.head_width
    share = ATTENTION * width / (width + EXPONENTIALS) if width else PRODUCTS
    return max(kernel.operations / (target.tflops * 1e12 * share), kernel.num_bytes / moved)


def decode_seconds(actor: ModelUse, dtype: str, rollout: Rollout, target: Target, *, slots: int) -> float:
    """Return the seconds of a rollout's decode steps. Each reads the weights, and a KV cache of mean length.

    Embedding tables do not count: a step reads a few of their rows.

    Args:
        slots: number of responses that a rank decodes at the same time.
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
    """Return the seconds to move optimizer states to the host and back around a rollout.

    0 if they stay on the GPU, or if the speed of copies from the host was not measured on the target.
    """
    if not (needs.idle_states_leave and target.measured):
        return 0.0
    return 2 * sum(states.optimizer for states in plan.states.values()) / (target.measured.host_gb_per_s * 1e9)


def phase_seconds(
    needs: StageNeeds, engines: Mapping[str, Json], plan: MemoryPlan, dtype: str, target: Target
) -> Mapping[str, float]:
    """Return the seconds of each phase of a step (in stage 3: of a rollout with its steps), for rows of full length.

    {} in fp32, since a target's TFLOP/s are for 16 bits. {} too if its speeds or a model's operations are not known.
    """
    if not (target.tflops and target.tb_per_s) or dtype == "fp32":
        return {}
    uses = {use.role: replace(use, stores_logits=plan.stores_logits) for use in needs.models}
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

    - ZeRO stage 3: a layer is gathered around each forward pass (also a recomputed one) and each backward pass, unless
      weights are gathered once a phase.
    - ZeRO stage 0: each weight's gradient is checked for inf and NaN in an optimizer step.

    Args:
        gather: --zero3-gather.
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
                seconds[name] += needs.steps_each * num_trained(use, dtype) * CHECK_S
    return seconds
