"""Memory options: ways to change flags so that a stage takes less memory, the cheapest first.

An option reads values of flags and a target, and knows no plan. `remedies.py` chooses among them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from pipeline.configuration.groups import STAGE
from pipeline.configuration.rank_rules import BATCHES, EVALUATED, GENERATED, SHARED, divisors
from pipeline.configuration.rollout_size import RolloutSize
from pipeline.launching.target import Target

Values = Mapping[str, Any]
ChangeOf = Callable[[Values, Target], dict[str, Any]]
LORA_DIM = 16
OFFLOAD_DURING_ROLLOUT = "offload_optimizer_during_rollout"
STREAMED = "rollout_weights"
NF4, BACKEND, STATIC = "nf4", "generation_engine", "static"
# Sizes of ZeRO stage 3's buffers in elements, and the smallest size that an option sets.
BUFFERS, BUFFER = ("stage3_max_live_parameters", "sub_group_size"), 50_000_000


def named(values: Values, flag: str) -> list[str]:
    """Return the flags of this name: one, or in stage 3 one for each trained model."""
    return [name for name in (flag, f"actor_{flag}", f"critic_{flag}") if name in values]


def smaller_micro_batch(values: Values, target: Target) -> dict[str, Any]:
    """Halve the micro-batch, rounded to a divisor of a rank's rows in an optimizer step. Those rows stay the same.

    Their number follows from --train-batch-size, rounded if the ranks do not divide it.
    """
    micro, meant, ranks = values["per_device_train_batch_size"], values["train_batch_size"], target.num_gpus
    rows = micro * values["gradient_accumulation_steps"]
    total: dict[str, Any] = {}
    if meant and meant % ranks == 0:
        rows = meant // ranks
    elif meant:
        total = {"train_batch_size": rows * ranks}  # accumulation follows from it
    sizes = [size for size in range(1, micro) if rows % size == 0 and size <= -(-micro // 2)]
    if not sizes:
        return {}
    return {"per_device_train_batch_size": sizes[-1], "gradient_accumulation_steps": rows // sizes[-1], **total}


def smaller_evaluation_batch(values: Values, target: Target) -> dict[str, Any]:
    return {EVALUATED: values[EVALUATED] // 2} if values[EVALUATED] > 1 else {}


def fewer_prompts_at_once(values: Values, target: Target) -> dict[str, Any]:
    """Halve the prompts sampled at once, rounded to a divisor of a rank's prompts in a rollout, which stay the same."""
    if GENERATED not in values:
        return {}
    ranks = target.num_gpus
    of_run = {**values, "ranks": ranks}
    size = RolloutSize(**{field.name: of_run[field.name] for field in fields(RolloutSize)})
    prompts = max(1, size.prompts // ranks)
    sizes = divisors(prompts, up_to=size.at_once // 2)
    return {GENERATED: sizes[-1], **({BATCHES: prompts // sizes[-1]} if values[BATCHES] else {})} if sizes else {}


def with_checkpointing(values: Values, target: Target) -> dict[str, Any]:
    return {name: True for name in named(values, "gradient_checkpointing") if not values[name]}


def save_synchronously(values: Values, target: Target) -> dict[str, Any]:
    return {"save_in_background": False} if values["save_in_background"] else {}


def shared_rollout(values: Values, target: Target) -> dict[str, Any]:
    """Let more GPUs of a machine share the actor's weights in a rollout, unless the weights are streamed."""
    if values.get(STREAMED) in (None, "streamed"):
        return {}
    sizes = [size for size in range(values[SHARED] + 1, target.gpus + 1) if all(n % size == 0 for n in target.slots)]
    return {SHARED: sizes[0]} if sizes else {}


def streamed_rollout(values: Values, target: Target) -> dict[str, Any]:
    return {} if STREAMED not in values else {SHARED: 1, STREAMED: "streamed"}


def partitioned(stage: int) -> ChangeOf:
    """Return the change to a ZeRO stage if there are several ranks; stage 3 is not used for quantised weights."""

    def change(values: Values, target: Target) -> dict[str, Any]:
        names = [name for name in named(values, STAGE) if target.num_gpus > 1 and values[name] < stage]
        new: dict[str, Any] = {
            name: stage for name in names if stage < 3 or values[f"{name.removesuffix(STAGE)}quantization"] == "none"
        }
        return new | {"optimizer_states": "fp32"} if new and stage == 3 else new

    return change


def states_in_8_bits(values: Values, target: Target) -> dict[str, Any]:
    """Store the moments in 8 bits if bitsandbytes is installed; offload and ZeRO stage 3 need fp32."""
    return {"optimizer_states": "8bit"} if find_spec("bitsandbytes") else {}


def offload_states_during_rollout(values: Values, target: Target) -> dict[str, Any]:
    """Keep optimizer states in host memory during rollouts; a stage without rollouts has no such flag."""
    return {} if values["offload"] or OFFLOAD_DURING_ROLLOUT not in values else {OFFLOAD_DURING_ROLLOUT: True}


def optimizer_offload(values: Values, target: Target) -> dict[str, Any]:
    """Keep optimizer states in host memory always; it needs ZeRO stage 1 or higher. On one GPU 2 streams gradients."""
    if values["offload"]:
        return {}
    stages = {name: 1 if target.num_gpus > 1 else 2 for name in named(values, STAGE) if not values[name]}
    changed = {"offload": True, "optimizer_states": "fp32"} | stages
    return changed | ({OFFLOAD_DURING_ROLLOUT: False} if OFFLOAD_DURING_ROLLOUT in values else {})


def parameter_offload(values: Values, target: Target) -> dict[str, Any]:
    """Keep weights that are not quantised in host memory, under ZeRO stage 3; this works on one rank too."""
    stages = named(values, STAGE)
    whole = [name.removesuffix(STAGE) for name in stages if values[f"{name.removesuffix(STAGE)}quantization"] == "none"]
    if values["offload_parameters"] or not whole or values.get(BACKEND) == STATIC:
        return {}
    new = {f"{prefix}{STAGE}": 3 for prefix in whole} | {"optimizer_states": "fp32"}
    if len(whole) == len(stages):
        return new | {"offload_parameters": True}
    return new | {f"{prefix}offload_weights": "cpu" for prefix in whole}


def frozen_offload(values: Values, target: Target) -> dict[str, Any]:
    """Keep the weights of the frozen models in host memory, as those of the models whose flags they share."""
    return {name: True for name in ("offload_reference_model", "offload_reward_model") if name in values}


def smaller_buffers(values: Values, target: Target) -> dict[str, Any]:
    return {name: min(values[name], BUFFER) for name in BUFFERS}


def other_sampling(values: Values, target: Target) -> dict[str, Any]:
    """Sample by the backend that copies no weights, except under ZeRO stage 3, where it would gather all of them."""
    return {BACKEND: STATIC} if values.get(BACKEND) == "auto" and values[f"actor_{STAGE}"] < 3 else {}


def rounded_rewards(values: Values, target: Target) -> dict[str, Any]:
    """Quantise the reward model only. It shares the critic's flags, but the critic may train all of its weights."""
    name = "reward_model_quantization"
    return {name: "int8", f"reward_model_{STAGE}": "0"} if values.get(name) in ("auto", "none") else {}


def adapters(index: int, base: str = "none") -> ChangeOf:
    """Return the change to LoRA adapters for the stage's first trained model (index 0) or its second (1).

    base: quantisation of the frozen weights; ZeRO stage 3 cannot partition quantised weights.
    """

    def change(values: Values, target: Target) -> dict[str, Any]:
        dims, bases, stages = (named(values, flag)[index : index + 1] for flag in ("lora_dim", "quantization", STAGE))
        new: dict[str, Any] = {name: LORA_DIM for name in dims if not values[name]}
        unavailable = base == NF4 and not find_spec("bitsandbytes")
        if base == "none" or unavailable or any(values[name] in (base, NF4) for name in bases):
            return new
        below_3 = {name: min(2, values[name]) for name in stages}
        return dict.fromkeys(bases, base) | below_3 | new | ({"offload_parameters": False} if bases else {})

    return change


@dataclass(frozen=True, slots=True)
class MemoryOption:
    """A way to change flags.

    change: values of flags, target -> the values that change.
    cost: the cost in words.
    times: how often the change is applied.
    """

    change: ChangeOf
    cost: str
    times: int = 1


# The cheapest first. Options that need no host memory:
LIGHT = (
    MemoryOption(save_synchronously, "training waits for each checkpoint"),
    MemoryOption(smaller_micro_batch, "smaller products"),
    MemoryOption(smaller_evaluation_batch, "smaller passes of an evaluation"),
    MemoryOption(with_checkpointing, "one more forward pass"),
    MemoryOption(partitioned(1), "the weights are gathered once a step"),
    MemoryOption(partitioned(2), "gradients are reduced in each micro-batch"),
    MemoryOption(shared_rollout, "GPUs exchange hidden states for each token"),
    MemoryOption(streamed_rollout, "GPUs gather all layers for each token"),
)
# Options that need host memory, or time in each pass:
HEAVY = (
    MemoryOption(offload_states_during_rollout, "states cross the bus twice a rollout"),
    MemoryOption(fewer_prompts_at_once, "more decode steps, each for fewer rows"),
    MemoryOption(optimizer_offload, "states cross the bus each step"),
    MemoryOption(other_sampling, "decode steps run the model's own layers and take several times as long"),
    MemoryOption(partitioned(3), "weights are gathered in each pass"),
    MemoryOption(parameter_offload, "weights cross the bus in each pass"),
    MemoryOption(frozen_offload, "weights of frozen models cross the bus in each pass"),
    MemoryOption(smaller_buffers, "more and smaller transfers"),
)
# Options that change what is trained:
OTHER = (
    MemoryOption(states_in_8_bits, "8-bit moments"),
    MemoryOption(adapters(0), "adapters only"),
    MemoryOption(adapters(0, "int8"), "adapters on 8-bit weights"),
    MemoryOption(adapters(1), "adapters only"),
    MemoryOption(adapters(1, "int8"), "adapters on 8-bit weights"),
    MemoryOption(rounded_rewards, "8-bit weights of the reward model"),
    MemoryOption(adapters(0, NF4), "adapters on 4-bit weights"),
    MemoryOption(adapters(1, NF4), "adapters on 4-bit weights"),
)
QUANTISED = tuple(option for option in OTHER if "weights" in option.cost)  # quantised weights are not offloaded
ON_HOST = tuple(option for option in HEAVY if "weights" in option.cost)  # weights under ZeRO stage 3
BY_BUS = tuple(option for option in HEAVY if "bus" in option.cost)  # options that take host memory
