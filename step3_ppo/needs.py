"""The needs of stage 3 for the planner: four models, three phases, the buffers of rollouts."""

from collections.abc import Mapping

from pipeline.errors import counted
from pipeline.generation.backends import CACHE_MEMORY_FRACTION
from pipeline.generation.options import CACHE_LENGTH_MULTIPLE, GROUP_BYTES, MAX_PREFILL_TOKENS, cache_bytes_per_token
from pipeline.models.architecture import Architecture, Rows, UnsupportedModel, linear_of, read_architecture
from pipeline.planning.measurement import build, count_pass, model_size, planned_config
from pipeline.planning.needs import ModelUse, Pass, Rollout, StageNeeds, step_arithmetic
from pipeline.tensor_ops import round_up
from pipeline.training.micro_batches import LENGTH_UNIT, SCORING_TOKENS
from step3_ppo.config import PPOConfig

TRUNCATION_BYTES = 24  # of a logit: it is scaled, masked, ordered, made a probability, summed and compared, all in fp32


def needs(config: PPOConfig, made: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `made`: folder of an earlier stage's output -> the model which that starts from."""
    models, optimizer = models_of(config, made), config.optimizer
    rows_per_step = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps
    roles = [use.role for use in models]
    return StageNeeds(
        models=models,
        phases={
            "generate": [prefill(config, models[0], dtype)],
            "score": scoring(config, roles),
            "train": updates(config),
        },
        batch=batch_lines(config, ranks),
        rollout=rollout(config, models[0], dtype, ranks),
        steps_each=num_responses(config) * config.ppo.ppo_epochs // rows_per_step,
        idle_states_leave=config.sampling.offload_optimizer_during_rollout,
    )


def models_of(config: PPOConfig, made: Mapping[str, str]) -> list[ModelUse]:
    """Return the models that stage 3 holds, as `models.py` loads them: actor, critic, reference, reward model."""
    only_lora = config.deepspeed.only_optimize_lora
    paths = [settings.model_name_or_path for settings in (config.actor, config.critic)]
    actor, critic = (made.get(path, path) for path in paths)
    reward = config.reward_model_name_or_path or config.critic.model_name_or_path
    models = [
        ModelUse("actor", actor, config.actor, only_lora=only_lora, averaged=config.ppo.enable_ema),
        ModelUse("critic", critic, config.critic, has_values=True, only_lora=only_lora),
    ]
    if not (config.actor.lora_dim and only_lora):
        models.append(ModelUse("reference", actor, config.actor, trained=False))
    if not (config.critic.lora_dim and only_lora and reward == config.critic.model_name_or_path):
        path = made.get(reward, reward)
        models.append(ModelUse("reward model", path, config.critic, trained=False, has_values=True))
    return models


def prefill(config: PPOConfig, actor: ModelUse, dtype: str) -> Pass:
    """Return the first pass over prompts: as many as there are slots, within the limit of a prefill.

    Only the fused backend merges adapters: the others run the module that is trained.
    """
    length = config.data.max_prompt_seq_len
    rows = min(num_slots(config), max(1, MAX_PREFILL_TOKENS // length))
    adapted = config.actor.lora_dim and merges_adapters(config)
    merged = bool(adapted) and fused_architecture(config, actor, dtype) is not None
    return Pass("actor", rows, length, rows, times=-(-num_responses(config) // rows), without_adapters=merged)


def scoring(config: PPOConfig, roles: list[str]) -> list[Pass]:
    """Return the largest passes of a rollout without gradients: the policy's in the shape of updates, if it is made."""
    answer = config.sampling.max_answer_seq_len
    length = round_up(config.data.max_prompt_seq_len + answer, LENGTH_UNIT)
    micro, responses = config.optimizer.per_device_train_batch_size, num_responses(config)
    rows = min(responses, max(1, SCORING_TOKENS // length))
    passes, times = list[Pass](), -(-responses // rows)
    if config.ppo.old_log_probs == "trainer":
        passes.append(Pass("actor", micro, length, micro * answer, times=-(-responses // micro)))
    reference = "reference" if "reference" in roles else "actor"  # its adapters switched off; so is the critic scored
    passes.append(Pass(reference, rows, length, rows * answer, times=times, without_adapters=reference == "actor"))
    reward = "reward model" if "reward model" in roles else "critic"
    passes.append(Pass("critic", rows, length, times=times))
    return [*passes, Pass(reward, rows, length, times=times, without_adapters=reward == "critic")]


def updates(config: PPOConfig) -> list[Pass]:
    """Return the passes of an optimizer step: actor and critic on a micro-batch, and the actor on text."""
    answer, optimizer = config.sampling.max_answer_seq_len, config.optimizer
    length = round_up(config.data.max_prompt_seq_len + answer, LENGTH_UNIT)
    rows, accumulates = optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps > 1
    times = num_responses(config) * config.ppo.ppo_epochs // rows
    passes = [Pass("actor", rows, length, rows * answer, trains=True, accumulates=accumulates, times=times)]
    passes.append(Pass("critic", rows, length, trains=True, accumulates=accumulates, times=times))
    if config.data.unsupervised_data_path:
        passes.append(Pass("actor", rows, length, rows * (length - 1), trains=True, accumulates=True, times=times))
    return passes


def merges_adapters(config: PPOConfig) -> bool:
    """Return whether the fused backend samples with adapters of LoRA merged into the weights."""
    return config.sampling.merge_lora_for_generation and config.actor.quantization == "none"


def num_responses(config: PPOConfig) -> int:
    """Return the responses of a rollout on a rank."""
    sampling = config.sampling
    prompts = sampling.per_device_generation_batch_size * sampling.generation_batches
    return prompts * sampling.num_samples_per_prompt


def num_slots(config: PPOConfig) -> int:
    """Return the rows of the KV cache, as `models.generation_options` asks for them."""
    sampling = config.sampling
    sampled = sampling.per_device_generation_batch_size * sampling.num_samples_per_prompt
    return max(sampled, config.optimizer.per_device_eval_batch_size)


def rollout(config: PPOConfig, actor: ModelUse, dtype: str, ranks: int) -> Rollout:
    """Return the buffers of generation on a GPU, where the fused backend serves if it knows the model."""
    sampling, size = config.sampling, model_size(actor, dtype)
    longest = config.data.max_prompt_seq_len + sampling.max_answer_seq_len
    model_config, streamed = planned_config(actor.path), sampling.rollout_weights == "streamed"
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0
    return Rollout(
        slots=num_slots(config),
        cache_length=round_up(longest, CACHE_LENGTH_MULTIPLE),
        bytes_per_token=cache_bytes_per_token(model_config, size.element),
        copied_bytes=copied_bytes(config, actor, dtype, ranks),
        num_responses=num_responses(config),
        num_new_tokens=sampling.max_answer_seq_len,
        share_of_free=CACHE_MEMORY_FRACTION,
        always_released=sampling.release_inference_cache or sampling.offload_optimizer_during_rollout,
        tensor_parallel_size=sampling.inference_tp_size,
        hidden_bytes=model_config.hidden_size * size.element,
        logits_bytes=model_config.vocab_size * (size.element + (TRUNCATION_BYTES if truncates else 0)),
        gathers_per_step=-(-size.linear * size.element // GROUP_BYTES) if streamed else 0,
        kernels_per_step=decode_kernels(config, actor, dtype),
    )


def fused_architecture(config: PPOConfig, actor: ModelUse, dtype: str) -> Architecture | None:
    """Return the parts of an actor that the fused backend samples with; None where another one serves (backends.py)."""
    quantization, adapted = config.actor.quantization, config.actor.lora_dim and not merges_adapters(config)
    if config.sampling.generation_engine not in ("auto", "fused") or quantization == "nf4":
        return None
    try:
        return None if adapted and quantization == "none" else read_architecture(build(actor, dtype).model)
    except UnsupportedModel:
        return None


def decode_kernels(config: PPOConfig, actor: ModelUse, dtype: str) -> int:
    """Return the kernels of a decode step in all layers: those of the fused backend, else of transformers' modules.

    A fused layer has four products, attention and two norms, and in many architectures rotation and an activation.
    """
    if (architecture := fused_architecture(config, actor, dtype)) is None:
        return sum(count_pass(actor, dtype, Pass("actor", num_slots(config), 1)).kernels.values())
    adapters = 0 if not config.actor.lora_dim or merges_adapters(config) else 2 * 4  # two products beside each
    each = 7 + bool(architecture.rotary) + (architecture.activation != "relu") + adapters
    return each * len(architecture.blocks)


def copied_bytes(config: PPOConfig, actor: ModelUse, dtype: str, ranks: int) -> int:
    """Return the bytes of weights that the fused backend copies; 0 where another one serves, or views are enough."""
    sampling, size = config.sampling, model_size(actor, dtype)
    if (architecture := fused_architecture(config, actor, dtype)) is None:
        return 0
    if config.actor.quantization == "int8":  # codes are views, adapters small
        return size.linear // sampling.inference_tp_size if sampling.inference_tp_size > 1 else 0
    if config.actor.partitioned == "weights":
        return size.num_bytes // (ranks if sampling.rollout_weights == "streamed" else sampling.inference_tp_size)
    if config.actor.lora_dim or sampling.inference_tp_size > 1:
        return size.linear * size.element // sampling.inference_tp_size
    if config.actor.partitioned == "states":
        return 0  # joined projections are views of DeepSpeed's flat buffer
    joined = [group for block in architecture.blocks for group in ((block.q, block.k, block.v), block.up)]
    apart = [group for group in joined if len(group) > 1 and not isinstance(group[0], Rows)]
    return sum(linear_of(layer).weight.numel() for group in apart for layer in group) * size.element


def batch_lines(config: PPOConfig, ranks: int) -> list[str]:
    """Return the arithmetic of a rollout and of its optimizer steps."""
    sampling, optimizer = config.sampling, config.optimizer
    prompts, samples = sampling.per_device_generation_batch_size, sampling.num_samples_per_prompt
    responses = num_responses(config) * ranks
    rows = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * ranks
    length = config.data.max_prompt_seq_len + sampling.max_answer_seq_len
    steps = responses * config.ppo.ppo_epochs // rows
    batches = counted(sampling.generation_batches, "generation batch")
    return [
        f"{counted(prompts, 'prompt')} x {counted(samples, 'sample')} x {batches} x {counted(ranks, 'rank')} = "
        f"{counted(responses, 'response')} a rollout",
        step_arithmetic(optimizer, ranks, f"responses of up to {length} tokens"),
        f"{counted(responses, 'response')} x {counted(config.ppo.ppo_epochs, 'epoch')} / {counted(rows, 'row')} = "
        f"{counted(steps, 'optimizer step')} a rollout",
    ]
