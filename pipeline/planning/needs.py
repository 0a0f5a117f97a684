"""Types of a stage's needs: the models and passes of each phase, as its own `needs.py` tells them to the planner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.configuration.groups import ModelConfig, OptimizerConfig
from pipeline.errors import counted


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A model that a stage holds on every rank.

    role: the name of its engine, as in the stage's DeepSpeed JSONs. path: the folder or hub id whose config.json has
    its shape. settings: its flags, or those of its trained twin. has_values: a scalar head, not a language model's.
    only_lora: with LoRA, nothing else is trained. averaged: a moving average is kept in fp32.
    on_cpu: it computes without the kernels of a GPU.
    """

    role: str
    path: str
    settings: ModelConfig
    trained: bool = True
    has_values: bool = False
    only_lora: bool = True
    averaged: bool = False
    on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """The largest forward pass of a model in a phase, or forward and backward pass, on one rank.

    num_head_tokens: tokens that pass through a language model's head. accumulates: gradients of an earlier pass exist.
    times: passes like it in a step, or in stage 3 in a rollout. without_adapters: those of LoRA are switched off.
    """

    role: str
    rows: int
    length: int
    num_head_tokens: int = 0
    trains: bool = False
    accumulates: bool = False
    times: int = 1
    without_adapters: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """The buffers of generation: a KV cache of `slots` rows of `cache_length` tokens, and copied weights.

    bytes_per_token: keys and values of a token, in all layers. copied_bytes: weights that generation copies, at most.
    num_responses, num_new_tokens: of a rollout on a rank, at most. share_of_free: of the free memory that the cache may
    take; with fewer slots the other responses wait. always_released: the buffers are given back before the update; else
    they are where it has no memory beside them. tensor_parallel_size: GPUs that share the weights, each with as many
    rows; hidden_bytes: of a token's hidden state, which they exchange. logits_bytes: of a slot's logits at a decode
    step, with what the draw makes of them.
    gathers_per_step: collectives in which all GPUs gather the layers at a decode step; 0: they are not streamed.
    kernels_per_step: of a decode step.
    """

    slots: int
    cache_length: int
    bytes_per_token: int
    copied_bytes: int
    share_of_free: float
    num_responses: int
    num_new_tokens: int
    always_released: bool
    tensor_parallel_size: int
    hidden_bytes: int
    logits_bytes: int
    gathers_per_step: int
    kernels_per_step: int

    def rounds(self, slots: int) -> int:
        """Return how often a cache of so many rows is filled for all responses, where they are of full length."""
        return -(-self.num_responses // slots)

    def slots_that_fit(self, free: int) -> int:
        """Return the rows of a cache beside which a device has so many free bytes, one at least."""
        slot = self.cache_length * self.bytes_per_token
        return max(1, min(self.slots, int(self.share_of_free * (free - self.copied_bytes) // slot)))

    def num_bytes(self, slots: int) -> int:
        """Return the bytes of copied weights and of a cache of so many rows."""
        return slots * self.cache_length * self.bytes_per_token + self.copied_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """The needs of a stage on one rank.

    phases: passes by the names of phases (generate, score, train). batch: lines of batch arithmetic. idle_states_leave:
    optimizer states are in host memory outside the training phase. steps_each: optimizer steps that the phases take.
    """

    models: Sequence[ModelUse]
    phases: Mapping[str, Sequence[Pass]]
    batch: Sequence[str]
    rollout: Rollout | None = None
    idle_states_leave: bool = False
    steps_each: int = 1


def step_arithmetic(optimizer: OptimizerConfig, ranks: int, rows: str) -> str:
    """Return the line `4 rows x 2 accumulated x 8 ranks = 64 rows an optimizer step`; `rows` says what they are."""
    micro, accumulation = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps
    product = f"micro-batch {micro} x {accumulation} accumulated x {counted(ranks, 'rank')}"
    return f"{product} = {micro * accumulation * ranks} {rows} an optimizer step"
