"""Return what a rank needs in stage 3, for the planner: models, passes of three phases, buffers of rollouts.

Models, schedule, options, backend and copied weights come from the functions that the run itself calls.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from pipeline.data.batching import SCORING_TOKENS
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.errors import counted
from pipeline.generation.backends import choose_backend
from pipeline.generation.forwards.fused_weights import DecodeWeights, SlicedWeights
from pipeline.generation.forwards.kv_cache import CacheLayout
from pipeline.generation.forwards.projections import Shard
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE, MAX_PREFILL_TOKENS, GenerationOptions, why_not_streamed
from pipeline.generation.sources import check_tensor_parallelism
from pipeline.models.decoders.families import read_architecture
from pipeline.models.forward.packed_attention import may_take_bounds
from pipeline.models.loading import DTYPES, base_model
from pipeline.models.partitions import mark_partitioned
from pipeline.planning.measurement import build, count_pass, model_size, planned_config
from pipeline.planning.needs import ModelUse, Pass, Rollout, StageNeeds, step_arithmetic
from pipeline.tensor_ops import round_up
from pipeline.training.micro_batches import LENGTH_UNIT, unit_size
from step3_ppo.config import PPOConfig
from step3_ppo.models.roles import COMPARED
from step3_ppo.rollout import Schedule, generation_options, make_schedule

TRUNCATION_BYTES = 24  # bytes for each logit, to scale, mask, sort, normalise, sum and compare it in fp32


def needs(config: PPOConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `base_of_output`: folder of an earlier stage's output -> the model it starts from."""
    schedule = make_schedule(config, num_prompts=1, world_size=ranks)
    models = models_of(config, base_of_output)
    whose = {"old_log_probs": old_log_probs(config, models[0], dtype, ranks)}
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update=whose)})
    buffers = rollout(config, schedule, models[0], dtype, ranks)
    sharing = Sharing.of(config, schedule, models, dtype, ranks)
    return StageNeeds(
        models=models,
        phases={
            "generate": [prefill(config, buffers)],
            "score": sharing.applied(scoring(config, buffers.num_responses, {use.role for use in models})),
            "train": [
                *sharing.applied(
                    updates(config, buffers.num_responses, [role.name for role in config.held_roles]),
                    shuffled=config.ppo.ppo_epochs > 1,
                ),
                *text_passes(config, buffers.num_responses),
            ],
        },
        batch=batch_lines(config, schedule, ranks),
        rollout=buffers,
        steps_each=schedule.steps_per_rollout,
        num_steps=lambda prompts: make_schedule(config, num_prompts=prompts, world_size=ranks).total_steps,
        steps_at_most=config.ppo.replace_equal_groups,
        idle_states_leave=config.sampling.offload_optimizer_during_rollout,
    )


def models_of(config: PPOConfig, base_of_output: Mapping[str, str]) -> list[ModelUse]:
    """Return the models that stage 3 has in memory."""
    return [
        ModelUse(
            role.title,
            base_of_output.get(config.start_of(role), config.start_of(role)),
            config.flags_of(role),
            trained=role.is_trained,
            has_values=role.has_values,
            only_lora=config.deepspeed.only_optimize_lora,
            averaged=role.name == "actor" and config.ppo.enable_ema,
        )
        for role in config.held_roles
    ]


def old_log_probs(
    config: PPOConfig, actor: ModelUse, dtype: str, ranks: int, device: torch.device | None = None
) -> str:
    """Return the value of `--old-log-probs` on a device (None: a GPU), "trainer" or "sampler".

    A run calls this before it loads a model, and its plan before the run starts.

    Raises InputError: the backend that was requested by name cannot be used.
    """
    if config.ppo.old_log_probs != "auto":
        return config.ppo.old_log_probs
    if not config.may_take_sampled_log_probs(dtype, ranks):
        return "trainer"
    options = of_weights(generation_options(config, ranks))
    return "sampler" if backend_of(actor, dtype, options, device) == "fused" else "trainer"


def of_weights(options: GenerationOptions) -> GenerationOptions:
    """Return the options with only what determines the backend and the weights that it copies."""
    return replace(options, max_sequence_length=0, release_cache=False, min_slots=0)


@lru_cache(maxsize=64)
def backend_of(actor: ModelUse, dtype: str, options: GenerationOptions, device: torch.device | None) -> str:
    """Return the backend that samples from the actor on a device; None: on a GPU with triton."""
    return choose_backend(as_trained(actor, dtype), options, device)[0]


def prefill(config: PPOConfig, buffers: Rollout) -> Pass:
    """Return the first pass over prompts: as many as there are slots, up to the token limit of a prefill."""
    length = config.data.max_prompt_seq_len
    rows = min(buffers.slots, max(1, MAX_PREFILL_TOKENS // length))
    times = -(-buffers.num_responses // rows)
    return Pass("actor", rows, length, rows, times=times, without_adapters=buffers.merges_adapters)


def scoring(config: PPOConfig, num_responses: int, roles: set[str]) -> list[Pass]:
    """Return the largest passes of a rollout without gradients; the policy's, if any, has the shape of updates."""
    longest = config.sampling.max_answer_seq_len
    length = sequence_length(config)
    micro = config.optimizer.per_device_train_batch_size
    rows = min(num_responses, max(1, SCORING_TOKENS // length))
    passes, times = list[Pass](), -(-num_responses // rows)
    if config.ppo.old_log_probs != "sampler":
        passes.append(Pass("actor", micro, length, micro * longest, times=-(-num_responses // micro)))
    # Without a separate model, the actor with its adapters off is the reference, and so is the critic the reward model.
    reference = next((name for name in COMPARED if name in roles), "actor")
    if config.ppo.has_reference and not config.compares_in_updates:
        passes.append(Pass(reference, rows, length, rows * longest, times=times, without_adapters=reference == "actor"))
    reward = "reward model" if "reward model" in roles else "critic"
    if "critic" in roles:
        passes.append(Pass("critic", rows, length, times=times))
    if not config.has_reward_model:
        return passes
    passes.append(Pass(reward, rows, length, times=times, without_adapters=reward == "critic"))
    further = [role.title for role in config.roles if role.number]
    return passes + [Pass(title, rows, length, times=times) for title in further]


def updates(config: PPOConfig, num_responses: int, roles: list[str]) -> list[Pass]:
    """Return the passes of an optimizer step over responses: trained models on a micro-batch.

    With an exact divergence in the loss the reference's or the teacher's too.
    """
    longest, optimizer = config.sampling.max_answer_seq_len, config.optimizer
    rows, accumulates = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps > 1
    times, length = num_responses * config.ppo.ppo_epochs // rows, sequence_length(config)
    divergence = config.ppo.divergence
    step = Pass("actor", rows, length, rows * longest, trains=True, accumulates=accumulates, times=times)
    passes = [replace(step, divergence=divergence)]
    if divergence:
        compared = next(name for name in COMPARED if name in roles)
        passes.append(Pass(compared, rows, length, rows * longest, times=times))
    if "critic" in roles:
        passes.append(Pass("critic", rows, length, trains=True, accumulates=accumulates, times=times))
    return passes


def text_passes(config: PPOConfig, num_responses: int) -> list[Pass]:
    """Return the passes of an optimizer step over ptx text, by the actor; none without text."""
    if not config.data.unsupervised_data_path:
        return []
    rows, length = config.optimizer.per_device_train_batch_size, sequence_length(config)
    times = num_responses * config.ppo.ppo_epochs // rows
    return [Pass("actor", rows, length, rows * (length - 1), trains=True, accumulates=True, times=times)]


def sequence_length(config: PPOConfig) -> int:
    """Return the tokens of the longest sequence, rounded up as passes on a GPU are."""
    return round_up(config.max_sequence_length, LENGTH_UNIT)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The rows of a stage's passes that share their prompts on a GPU.

    group: responses to a prompt; 1: the models do not pack rows, so none share.
    rows_per_step: rows of an optimizer step over all ranks.
    prompt: tokens of the longest prompt.
    ranks: number of ranks.
    key_bytes: role -> bytes of a token's keys and values that a pass holds, with a backward pass and without.
    """

    group: int
    rows_per_step: int
    prompt: int
    ranks: int
    key_bytes: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, config: PPOConfig, schedule: Schedule, models: list[ModelUse], dtype: str, ranks: int) -> "Sharing":
        """Return what the models of a run share."""
        configs = {use.role: planned_config(use.path) for use in models}
        # Devices without the kernel have no bf16 either; in fp16 the plan counts as if all were such.
        packs = dtype == "bf16" and all(
            may_take_bounds(configs[use.role], DTYPES[dtype]) and use.settings.attn_implementation in ("auto", "sdpa")
            for use in models
        )
        key_bytes = dict[str, tuple[int, int]]()
        for use in models if packs else ():
            layout = CacheLayout.of(configs[use.role], DTYPES[dtype])
            layer = layout.bytes_per_token // layout.num_layers
            key_bytes[use.role] = layer if use.settings.gradient_checkpointing else layout.bytes_per_token, layer
        return cls(
            config.sampling.num_samples_per_prompt if packs else 1,
            schedule.rows_per_step,
            config.data.max_prompt_seq_len,
            ranks,
            key_bytes,
        )

    def applied(self, passes: list[Pass], *, shuffled: bool = False) -> list[Pass]:
        """Return the passes with what their rows share; nothing where epochs after the first shuffle the rows."""
        return passes if shuffled else [self.shared(one) for one in passes]

    def shared(self, one: Pass) -> Pass:
        """Return a pass with what its rows share."""
        group = math.gcd(self.group, self.rows_per_step)  # a step may end within a group
        size = unit_size(group, self.rows_per_step, world_size=self.ranks, most=one.rows)
        if size == 1:
            return one
        tokens = (one.rows - -(-one.rows // size)) * self.prompt
        return replace(one, shared=tokens, copied=tokens * self.key_bytes[one.role][0 if one.trains else 1])


def rollout(config: PPOConfig, schedule: Schedule, actor: ModelUse, dtype: str, ranks: int) -> Rollout:
    """Return the buffers of generation on a GPU, where the fused backend runs the models that it supports."""
    sampling, size, options = config.sampling, model_size(actor, dtype), generation_options(config, ranks)
    # Sampling recomputes no activations, so gradient checkpointing does not change the result: cache one.
    sampled = replace(actor, settings=actor.settings.model_copy(update={"gradient_checkpointing": False}))
    model_config, weights = planned_config(actor.path), decode_needs(sampled, dtype, of_weights(options), ranks)
    step = Pass("actor", options.min_slots, 1)  # a decode step of transformers' modules
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0
    buffers = Rollout(
        slots=options.min_slots,
        cache_length=round_up(options.max_sequence_length, CACHE_LENGTH_MULTIPLE),
        bytes_per_token=CacheLayout.of(model_config, DTYPES[dtype]).bytes_per_token,
        copied_bytes=weights.num_bytes if weights else 0,
        num_responses=schedule.prompts_per_rollout * sampling.num_samples_per_prompt // ranks,
        num_new_tokens=sampling.max_answer_seq_len,
        always_released=options.release_cache,
        merges_adapters=bool(weights and config.actor.lora_dim) and config.actor.quantization == "none",
        tensor_parallel_size=options.tensor_parallel_size,
        logits_bytes=model_config.vocab_size * (size.element + (TRUNCATION_BYTES if truncates else 0)),
        kernels_per_step=weights.kernels if weights else sum(count_pass(actor, dtype, step).kernels.values()),
    )
    if weights is None or not weights.groups:
        return buffers
    streamed = replace(buffers, copied_bytes=weights.streamed_bytes, is_streamed=True)
    return streamed if options.weights == "streamed" else replace(buffers, streamed=streamed)


@dataclass(frozen=True, slots=True)
class DecodeNeeds:
    """Bytes and kernels of the fused backend on a GPU.

    num_bytes: bytes of whole weights that it copies.
    kernels: kernels of a decode step.
    streamed_bytes: bytes of streamed weights that it copies, with their buffers.
    groups: number of groups of layers, gathered one at a time; 0: weights are not streamed.
    """

    num_bytes: int
    kernels: int
    streamed_bytes: int = 0
    groups: int = 0


@lru_cache(maxsize=64)
def decode_needs(actor: ModelUse, dtype: str, options: GenerationOptions, ranks: int) -> DecodeNeeds | None:
    """Return the needs of the fused backend; None for another backend. Raises like `decode_weights`."""
    weights, sliced = decode_weights(actor, dtype, options, ranks)
    if weights is None:
        return None
    streamed = (sliced.num_bytes_to_copy, len(sliced.groups)) if sliced else ()
    return DecodeNeeds(weights.num_bytes_to_copy, decode_kernels(weights), *streamed)


def decode_weights(
    actor: ModelUse, dtype: str, options: GenerationOptions, ranks: int
) -> tuple[DecodeWeights | None, SlicedWeights | None]:
    """Return the weights that the fused backend would read on a GPU, without values: whole, and streamed.

    Whole weights are None for another backend. Streamed ones are None if the run cannot or shall not stream them.

    Raises InputError: the backend that was requested by name cannot be used, or ranks cannot share the weights.
    """
    model = as_trained(actor, dtype)
    backend = backend_of(actor, dtype, options, None)
    size = options.tensor_parallel_size
    check_tensor_parallelism(model, size, backend)
    if backend != "fused":
        return None, None
    why_not = why_not_streamed(
        partitioned=actor.settings.partitioned == "weights", ranks=ranks, tensor_parallel_size=size, backend=backend
    )
    may_stream = options.weights == "streamed" or options.decides_by_memory(why_not)
    sliced = SlicedWeights(read_architecture(model), ranks) if may_stream else None
    return DecodeWeights(read_architecture(model), Shard(size=size)), sliced


@lru_cache(maxsize=8)
def as_trained(actor: ModelUse, dtype: str) -> nn.Module:
    """Return a copy of the actor on the meta device whose parameters lie in memory as an engine places them.

    At ZeRO stages 1 and 2 the parameters of an optimizer group are contiguous; at stage 3 they are partitioned. Plans
    of many settings share this cached copy, so callers must not change it.
    """
    module, settings = deepcopy(build(actor, dtype)), actor.settings
    for parameter in module.parameters():
        if settings.partitioned == "weights":
            mark_partitioned(parameter)
        if settings.quantization == "nf4":
            parameter.quant_state = None
    for group in parameter_groups(module, settings) if settings.partitioned == "states" else ():
        sizes = [parameter.numel() for parameter in group["params"]]
        flat = torch.empty(sum(sizes), dtype=module.model.dtype, device="meta")
        for parameter, part in zip(group["params"], flat.split(sizes), strict=True):
            parameter.data = part.view(parameter.shape)
    base_model(module.model).config._attn_implementation = "sdpa"  # the kernel that the planner counts
    model: nn.Module = module.model
    return model


def decode_kernels(weights: DecodeWeights) -> int:
    """Return the kernels of a decode step of the fused backend in all layers.

    A layer has matrix products (adapters have their own), attention and two norms. Many architectures also have a
    rotation and an activation.
    """
    others = 3 + bool(weights.architecture.rotary) + (weights.architecture.activation != "relu")
    return sum(others + sum(3 if one.adapters else 1 for one in block.projections) for block in weights.blocks)


def batch_lines(config: PPOConfig, schedule: Schedule, ranks: int) -> list[str]:
    """Return the arithmetic of a rollout and of its optimizer steps."""
    rollout, epochs = config.rollout_size(ranks), counted(config.ppo.ppo_epochs, "epoch")
    return [
        rollout.line,
        step_arithmetic(config.optimizer, ranks, f"responses (at most {config.max_sequence_length} tokens a sequence)"),
        f"{counted(rollout.responses, 'response')} x {epochs} / {counted(schedule.rows_per_step, 'row')} = "
        f"{counted(schedule.steps_per_rollout, 'optimizer step')} a rollout",
    ]
