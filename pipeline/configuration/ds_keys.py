"""The tables of a DeepSpeed JSON's keys: DeepSpeed ignores most that it does not know, so we refuse those by name.

tests/configuration/test_ds_config.py compares them with the installed DeepSpeed. Blocks without a table (optimizer
parameters, autotuning, what may only be switched off) are not checked. The module does not import deepspeed, so that
`--help` is fast.
"""

import difflib
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from pipeline.errors import InputError, nearest

Kind = str  # of a key's value, as an error names it; "" for blocks and texts
SWITCH, NUMBER, OTHER = "true or false", "a number", ""


def keys(*, switches: str = "", numbers: str = "", others: str = "") -> dict[str, Kind]:
    """Return the keys of a block with the kinds of their values."""
    kinds = {SWITCH: switches, NUMBER: numbers, OTHER: others}
    return {name: kind for kind, names in kinds.items() for name in names.split()}


# Keys that DeepSpeedConfig reads; `bfloat16` is an alias of `bf16`.
TOP_LEVEL = keys(
    switches="""
    dataloader_drop_last disable_allgather disable_python_gc dump_state managed_gradient_accumulation memory_breakdown
    prescale_gradients sparse_gradients use_data_before_expert_parallelism wall_clock_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """,
    numbers="""
    gradient_accumulation_steps gradient_clipping gradient_predivide_factor steps_per_print train_batch_size
    train_micro_batch_size_per_gpu vocabulary_size
    """,
    others="""
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types datastates_ckpt eigenvalue
    elasticity expert_parallel flops_profiler fp16 gradient_allreduce_op graph_harvesting hybrid_engine log_level nebula
    optimizer pipeline progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type
    sparse_attention tensor_parallel tensorboard timers torch_autocast wandb weight_quantization zero_optimization
    """,
)

# Blocks that are pydantic models in DeepSpeed, with both names of fields that have an alias.
MODEL_BLOCKS = {
    "zero_optimization": keys(
        switches="""
        contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
        compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload_param cpu_offload_use_pin_memory
        cpu_offload gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
        use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential
        stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1
        round_robin_gradients parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
        """,
        numbers="""
        stage reduce_bucket_size allgather_bucket_size sub_group_size prefetch_bucket_size stage3_prefetch_bucket_size
        param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold
        stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance
        stage3_max_reuse_distance module_granularity_threshold stage3_module_granularity_threshold
        zero_hpz_partition_size
        """,
        others="offload_param offload_optimizer zenflow leaf_module",
    ),
    "zero_optimization.offload_param": keys(
        switches="pin_memory", numbers="buffer_count buffer_size max_in_cpu", others="device nvme_path"
    ),
    "zero_optimization.offload_optimizer": keys(
        switches="pin_memory pipeline_read pipeline_write fast_init super_offload",
        numbers="buffer_count ratio cpuadam_cores_perc",
        others="device nvme_path",
    ),
    "zero_optimization.leaf_module": keys(others="classes names name_suffixes"),
    "fp16": keys(
        switches="enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        numbers="loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
    ),
    "bf16": keys(
        switches="""
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
        """
    ),
    "tensorboard": keys(switches="enabled", others="output_path job_name"),
    "wandb": keys(switches="enabled", others="group team project"),
    "csv_monitor": keys(switches="enabled", others="output_path job_name"),
    "comet": keys(
        switches="enabled online",
        numbers="samples_log_interval",
        others="project workspace api_key experiment_name experiment_key mode",
    ),
    "comms_logger": keys(switches="enabled prof_all verbose debug", others="prof_ops"),
    "timers.throughput": keys(switches="enabled synchronized"),
}

# Blocks that DeepSpeed reads key by key, so that a wrong one has no effect and no message.
LOOSE_BLOCKS = {
    "flops_profiler": keys(
        switches="enabled detailed",
        numbers="recompute_fwd_factor profile_step module_depth top_modules",
        others="output_file",
    ),
    "activation_checkpointing": keys(
        switches="""
        partition_activations contiguous_memory_optimization synchronize_checkpoint_boundary profile cpu_checkpointing
        """,
        others="number_checkpoints",
    ),
    "aio": keys(switches="single_submit overlap_events use_gds", numbers="block_size queue_depth intra_op_parallelism"),
    "checkpoint": keys(
        switches="load_universal use_node_local_storage checkpoint_serialization",
        others="tag_validation parallel_write writer",
    ),
    "checkpoint.parallel_write": keys(switches="pipeline_stage"),
    "checkpoint.writer": keys(
        switches="io_buffer_double show_statistics decoupled",
        numbers="io_buffer_size io_multiplier",
        others="type data_parallel",
    ),
    "data_types": keys(others="grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules"),
    "timers": keys(others="throughput"),
}

BLOCKS = {"": TOP_LEVEL, **MODEL_BLOCKS, **LOOSE_BLOCKS, "bfloat16": MODEL_BLOCKS["bf16"]}

GONE = "DeepSpeed has removed it"
OWN_ADAM = "the optimizer is torch.optim.AdamW, also in host memory"
OWN_STEP = "this project cuts steps and reads gradients itself"
FEWER_BITS = "it changes the numbers of a step; zero_hpz_partition_size alone keeps them"
# Keys that DeepSpeed knows and that may only be switched off here -> why, and what is right.
REFUSED = {
    "amp": f"{GONE}; use --dtype",
    "compression_training": GONE,
    "curriculum_learning": GONE,
    "eigenvalue": GONE,
    "elasticity": f"{GONE}; a run resumes on any number of ranks",
    "graph_harvesting": GONE,
    "nebula": f"{GONE}; use --save-steps, --save-in-background",
    "progressive_layer_drop": GONE,
    "quantize_training": GONE,
    "sparse_attention": f"{GONE}; use --attn-implementation",
    "sparse_gradients": GONE,
    "zero_optimization.mics_shard_size": f"{GONE}; use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": f"{GONE}; use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": GONE,
    "zero_optimization.cpu_offload": 'its new name is offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'its new name is offload_param: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "its new name is pin_memory, in offload_optimizer or offload_param",
    "zero_optimization.zero_quantized_weights": FEWER_BITS,
    "zero_optimization.zero_quantized_nontrainable_weights": f"{FEWER_BITS}; frozen weights: --quantization",
    "zero_optimization.zero_quantized_gradients": FEWER_BITS,
    "zero_optimization.offload_optimizer.super_offload": OWN_ADAM,
    "zero_optimization.zenflow": "late updates change the numbers of a step",
    "data_efficiency": "rows are drawn by this project's own data loader",
    "datastates_ckpt": "checkpoints are this project's own; use --save-steps, --save-in-background",
    "expert_parallel": "mixtures of experts are not supported",
    "hybrid_engine": "generation is this project's own; use --inference-tp-size, --release-inference-cache",
    "compile": "models are not compiled",
    "pipeline": "there is no pipeline parallelism",
    "tensor_parallel": "there is no tensor parallelism in training; rollouts have --inference-tp-size",
    "torch_autocast": "use --dtype",
    "weight_quantization": "it is for inference; use --quantization with LoRA",
    "zero_force_ds_cpu_optimizer": OWN_ADAM,
    "fp16.fp16_master_weights_and_grads": OWN_ADAM,
}
# Keys with one right value.
ONLY = {
    "gradient_allreduce_op": ("mean", OWN_STEP),
    "managed_gradient_accumulation": (True, OWN_STEP),
    "zero_optimization.compute_grad_norm": (True, OWN_STEP),
    "zero_optimization.offload_optimizer.ratio": (1, OWN_ADAM),
}
# Keys without effect in this project -> why, or what has one.
IDLE = {
    "activation_checkpointing": "use --gradient-checkpointing",
    "checkpoint": "checkpoints have a format of their own",
    "checkpoint.use_node_local_storage": "ranks find out whether hosts share storage; else each keeps a copy",
    "zero_allow_untested_optimizer": "the optimizer is AdamW; for that of bitsandbytes use --optimizer-states 8bit",
    "dataloader_drop_last": "a last partial step is filled with padding rows",
    "zero_optimization.elastic_checkpoint": "any checkpoint fits any number of ranks",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold fp32 weights",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "models are always saved whole",
}
MONITORS = ("tensorboard", "csv_monitor", "wandb")  # blocks of DeepSpeed's own monitors
# Keys that many files have -> DeepSpeed's default, of which nothing is said.
USUAL = {
    "wall_clock_breakdown": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.min_loss_scale": 1,
}
# Keys of zero_optimization that DeepSpeed reads at some ZeRO stages alone -> those stages.
READ_AT = {
    name: stages
    for stages, names in (
        ({1, 2, 3}, "reduce_bucket_size contiguous_gradients reduce_scatter overlap_comm"),
        (
            {1, 2},
            "allgather_bucket_size round_robin_gradients ignore_unused_parameters use_multi_rank_bucket_allreduce"
            " parameter_alignment",
        ),
        (
            {3},
            "sub_group_size zero_hpz_partition_size memory_efficient_linear leaf_module override_module_apply"
            " log_trace_cache_warnings enable_sanity_checks"
            " stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold"
            " stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold"
            " stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
        ),
    )
    for name in names.split()
}
OFFLOAD_DEVICES, DTYPES = ("none", "cpu", "nvme"), ("fp32", "fp16", "bf16")
FREE_BLOCKS = ("optimizer", "scheduler", "autotuning")  # blocks without a table
# Numbers that the engine divides by or counts down, in the middle of a step; texts that become parts of a path.
DIVISORS = (
    "steps_per_print", "gradient_predivide_factor", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale",
)  # fmt: skip
TEXTS = ("nvme_path", "output_path", "job_name")
COUNTED = ("zero_optimization.", "aio.", "fp16.")  # blocks whose numbers are 0 or more
FRACTIONS = ("ratio", "cpuadam_cores_perc", "loss_scale")  # the only ones of them that need not be whole
# Keys whose value is one of a few words.
CHOICES: dict[str, tuple[object, ...]] = {
    "zero_optimization.stage": (0, 1, 2, 3),
    "zero_optimization.offload_optimizer.device": OFFLOAD_DEVICES,
    "zero_optimization.offload_param.device": OFFLOAD_DEVICES,
    "data_types.grad_accum_dtype": DTYPES,
    "data_types.param_dtype": DTYPES,
    "data_types.buffer_dtype": DTYPES,
    "communication_data_type": DTYPES,
    "seq_parallel_communication_data_type": DTYPES,
    "log_level": ("debug", "info", "warning", "error", "critical"),
}
# Names from other tools or versions -> the right one.
OTHER_NAMES = {
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "deepspeed_config_file": "--deepspeed-config",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "gradient_checkpointing": "--gradient-checkpointing",
    "learning_rate": "--learning-rate",
    "lr": "--learning-rate",
    "max_grad_norm": "gradient_clipping",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "mixed_precision": "bf16.enabled or fp16.enabled",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "thread_count": "aio.intra_op_parallelism",
    "weight_decay": "--weight-decay",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_stage": "zero_optimization.stage",
}
MOST_HOMES = 3  # `enabled` is a key of many blocks


def check_keys(user_json: Mapping[str, Any], source: str = "DeepSpeed JSON") -> None:
    """Refuse keys that DeepSpeed does not read or this project cannot follow, and values of the wrong kind.

    Raises:
        InputError: one line for each of them, with its path and what would be right.
    """
    if errors := list(wrong_keys(user_json, "")):
        raise InputError("\n".join(f"{source}: {error}" for error in errors))


def wrong_keys(block: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a line for each wrong key or value of `block` and of the blocks in it. `path` is dotted; "": the JSON."""
    valid = BLOCKS.get(path)
    for key, value in block.items():
        inner = f"{path}.{key}" if path else key
        kind = (valid or {}).get(key, OTHER)
        if inner in REFUSED:
            if is_on(value):
                yield f"{inner}: got {shown(value)}: {REFUSED[inner]}; remove it"
        elif valid is not None and key not in valid:
            yield f"{inner}: {right_key(key, path)}"
        elif isinstance(value, Mapping):
            if kind == OTHER and (valid is None or inner in BLOCKS or inner in FREE_BLOCKS):
                yield from wrong_keys(value, inner)
            else:
                yield f"{inner}: got a block, expected {kind or wanted(CHOICES.get(inner, ('a value',)))}"
        elif value == "auto" or (value is None and path in ("zero_optimization", "data_types")):
            continue  # ours; a null offload block switches offload off, a null type is DeepSpeed's choice
        elif inner in BLOCKS:
            yield f"{inner}: got {value!r}, expected a block {{...}}"
        elif kind != OTHER and not fits(value, kind):
            yield f"{inner}: got {value!r}, expected {kind}"
        elif kind == NUMBER and not isfinite(value):
            yield f"{inner}: got {value!r}, expected a finite number"
        elif kind == NUMBER and inner.startswith(COUNTED) and not value >= 0:
            yield f"{inner}: got {value!r}, expected 0 or more"
        elif kind == NUMBER and inner.startswith(COUNTED) and value % 1 and key not in FRACTIONS:
            yield f"{inner}: got {value!r}, expected a whole number"
        elif inner in DIVISORS and not value > 0:
            yield f"{inner}: got {value!r}, expected more than 0"
        elif key in TEXTS and not isinstance(value, str | None):
            yield f"{inner}: got {value!r}, expected a text"
        elif inner in ONLY and value != ONLY[inner][0]:
            right, reason = ONLY[inner]
            yield f"{inner}: got {value!r}, expected {right!r}: {reason}"
        elif inner in CHOICES and value not in CHOICES[inner]:
            yield f"{inner}: got {value!r}, expected {wanted(CHOICES[inner])}"


def wanted(choices: tuple[object, ...]) -> str:
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def right_key(key: str, path: str) -> str:
    """Return what is wrong with `key` in the block `path`, and the key that was meant."""
    parts = key.lower().replace("-", "_").split(".")
    name = parts[-1]
    homes = homes_of(name)
    if name in OTHER_NAMES:
        return f"DeepSpeed has no such key; write {OTHER_NAMES[name]}"
    if 0 < len(homes) <= MOST_HOMES and (len(parts) > 1 or name not in BLOCKS[path]):
        if len(parts) == 1:
            return f"DeepSpeed reads it in another block; write {' or '.join(homes)}"
        return (
            f"DeepSpeed opens no block at a dot; write {homes[0].replace('.', ': {')}: ...{'}' * homes[0].count('.')}"
        )
    hint = nearest(name, BLOCKS[path])
    if not hint and (close := difflib.get_close_matches(name, {inner for names in BLOCKS.values() for inner in names})):
        hint = f"; did you mean {' or '.join(homes_of(close[0])[:MOST_HOMES])}?"
    return f"DeepSpeed has no such key and would ignore it{hint}"


def homes_of(name: str) -> list[str]:
    """Return the dotted keys that end in `name`."""
    return [f"{path}.{name}".lstrip(".") for path, names in BLOCKS.items() if name in names and path != "bfloat16"]


def is_on(value: Any) -> bool:
    """Return True if a key's value switches something on: its `enabled` if it has one, else any value in it."""
    if isinstance(value, Mapping):
        return is_on(value["enabled"]) if "enabled" in value else any(map(is_on, value.values()))
    return value not in (False, None, 0, "", "none", "auto")


def shown(value: Any) -> str:
    return "a block" if isinstance(value, Mapping) else repr(value)


def fits(value: Any, kind: Kind) -> bool:
    """Return True if a JSON value is of this kind; DeepSpeed would take "false" for true in some places."""
    return isinstance(value, bool) if kind == SWITCH else isinstance(value, int | float) and not isinstance(value, bool)
