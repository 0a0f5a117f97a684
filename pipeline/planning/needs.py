"""The needs of a stage: its models, and the passes of each phase. Each stage's `needs` returns them to the planner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.cache_memory import leave_slots, tokens_that_fit
from pipeline.configuration.groups import ModelConfig, OptimizerConfig
from pipeline.configuration.stage import SupervisedConfig
from pipeline.data.batching import total_steps
from pipeline.errors import counted
from pipeline.kernels.divergences import Divergence


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A model that a stage holds on every rank.

    role: the name of its engine, as in the stage's DeepSpeed JSONs.
    path: the folder or hub id whose config.json has its shape.
    settings: the model's flags; a frozen model may share those of a trained one.
    trained: the model has an optimizer.
    has_values: the model has a scalar head in place of the language model's.
    only_lora: with LoRA, only the adapters are trained.
    averaged: the model has a moving average in fp32.
    on_cpu: the model computes without the kernels of a GPU.
    stores_logits: logits of a language model are stored for the backward pass, see `CausalLM`.
    """

    role: str
    path: str
    settings: ModelConfig
    trained: bool = True
    has_values: bool = False
    only_lora: bool = True
    averaged: bool = False
    on_cpu: bool = False
    stores_logits: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """The largest forward pass of a model in a phase on one rank, with its backward pass if the model trains.

    role: the role of the model.
    rows: sequences of the pass.
    length: tokens of each sequence.
    num_head_tokens: tokens that pass through a language model's head.
    trains: there is a backward pass.
    accumulates: gradients of an earlier pass exist.
    times: number of such passes in an optimizer step, or in a rollout of stage 3.
    without_adapters: LoRA's adapters are switched off.
    divergence: how each token's distribution is compared with another model's; None: it is not.
    shared: tokens of these rows that do not pass on a GPU, since they are another row's too.
    copied: bytes of the keys and values that are copied for these tokens.
    """

    role: str
    rows: int
    length: int
    num_head_tokens: int = 0
    trains: bool = False
    accumulates: bool = False
    times: int = 1
    without_adapters: bool = False
    divergence: Divergence | None = None
    shared: int = 0
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """The buffers of generation: a KV cache, and copied weights.

    slots: rows of the KV cache, at most; if fewer fit, some responses wait for a free slot.
    cache_length: tokens of a slot.
    bytes_per_token: bytes of a token's keys and values, in all layers.
    copied_bytes: bytes of the weights that generation copies.
    num_responses: responses of a rollout on a rank, at most.
    num_new_tokens: tokens of a response, at most.
    always_released: the KV cache is freed before every update; False: only if an update would not fit beside it.
    merges_adapters: LoRA's adapters are merged into the copied weights.
    tensor_parallel_size: GPUs that share the weights; each has as many rows.
    logits_bytes: bytes of a slot's logits at a decode step, and of the tensors that the draw computes from them.
    kernels_per_step: kernels of a decode step.
    is_streamed: all GPUs gather the layers at each decode step.
    streamed: the buffers with streamed weights, if free memory decides whether to stream; else None.
    """

    slots: int
    cache_length: int
    bytes_per_token: int
    copied_bytes: int
    num_responses: int
    num_new_tokens: int
    always_released: bool
    merges_adapters: bool
    tensor_parallel_size: int
    logits_bytes: int
    kernels_per_step: int
    is_streamed: bool = False
    streamed: "Rollout | None" = None

    def as_decided(self, free: int) -> "Rollout":
        """Return the buffers of a run on a device with `free` bytes: these, or those with streamed weights."""
        if self.streamed is None or leave_slots(self.copied_bytes, self.cache_length * self.bytes_per_token, free):
            return self
        return self.streamed

    def rounds(self, slots: int) -> int:
        """Return how often a cache of `slots` rows is filled for all responses, if each has full length."""
        return -(-self.num_responses // slots)

    def slots_that_fit(self, free: int) -> int:
        """Return the rows of the cache that fit in `free` bytes beside the copied weights; at least one."""
        tokens = tokens_that_fit(free - self.copied_bytes, self.bytes_per_token)
        return max(1, min(self.slots, tokens // self.cache_length))

    def num_bytes(self, slots: int) -> int:
        """Return the bytes of copied weights and of a cache of `slots` rows."""
        return slots * self.cache_length * self.bytes_per_token + self.copied_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """The needs of a stage on one rank.

    models: models that the stage holds.
    phases: passes by the names of phases (generate, score, train, evaluate).
    batch: lines of batch arithmetic.
    num_steps: number of rows or prompts -> optimizer steps of a run.
    steps_at_most: the run may take fewer steps than `num_steps`.
    rollout: the buffers of generation; None for a stage that samples nothing.
    idle_states_leave: optimizer states are in host memory outside the training phase.
    steps_each: optimizer steps in one pass through the phases.
    """

    models: Sequence[ModelUse]
    phases: Mapping[str, Sequence[Pass]]
    batch: Sequence[str]
    num_steps: Callable[[int], int]
    steps_at_most: bool = False
    rollout: Rollout | None = None
    idle_states_leave: bool = False
    steps_each: int = 1


def step_arithmetic(optimizer: OptimizerConfig, ranks: int, rows: str) -> str:
    """Return the line `micro-batch 4 x 2 accumulated x 8 ranks = 64 ROWS an optimizer step`; rows: the word there."""
    micro, accumulation = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps
    product = f"micro-batch {micro} x {accumulation} accumulated x {counted(ranks, 'rank')}"
    return f"{product} = {micro * accumulation * ranks} {rows} an optimizer step"


def supervised_needs(
    config: SupervisedConfig,
    base_of_output: Mapping[str, str],
    ranks: int,
    *,
    length: int,
    what: str,
    sequences: int = 1,
    has_values: bool = False,
) -> StageNeeds:
    """Return the needs of one rank in a stage that trains one model on rows of data.

    Args:
        base_of_output: folder of an earlier stage's output -> the model that it starts from.
        length: tokens of a sequence.
        what: the word for rows.
        sequences: sequences of a row.
        has_values: the model has a scalar head.
    """
    optimizer, path, run = config.optimizer, config.model.model_name_or_path, config.run
    steps, micro = optimizer.gradient_accumulation_steps, optimizer.per_device_train_batch_size

    def forward(rows: int) -> Pass:
        return Pass("model", sequences * rows, length, 0 if has_values else sequences * rows * (length - 1))

    path, only_lora = base_of_output.get(path, path), config.deepspeed.only_optimize_lora
    return StageNeeds(
        models=[ModelUse("model", path, config.model, has_values=has_values, only_lora=only_lora)],
        phases={
            "train": [replace(forward(micro), trains=True, accumulates=steps > 1, times=steps)],
            "evaluate": [forward(optimizer.per_device_eval_batch_size)],
        },
        batch=[step_arithmetic(optimizer, ranks, what)],
        num_steps=lambda rows: total_steps(
            rows, micro * steps * ranks, epochs=run.num_train_epochs, max_steps=run.max_steps
        ),
    )
