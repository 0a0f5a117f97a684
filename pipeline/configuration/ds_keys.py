"""The tables of a DeepSpeed JSON's keys: DeepSpeed ignores a key that it does not know, so we refuse it by name.

tests/configuration/test_ds_config.py compares the tables with the installed DeepSpeed. Blocks without a table
(optimizer parameters, compression_training, autotuning, ...) are not checked. No import of deepspeed: `--help` and
tests stay fast.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import InputError, nearest


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What DeepSpeedConfig asks its dict for; `bfloat16` is an alias of `bf16`.
TOP_LEVEL = words(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel
    flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation
    memory_breakdown nebula optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
    """
)

# Blocks that are pydantic models in DeepSpeed, with both names of fields that have an alias.
MODEL_BLOCKS = {
    "zero_optimization": words(
        """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights
        elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param
        cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size
        param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold
        stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance
        stage3_max_reuse_distance gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
        module_granularity_threshold stage3_module_granularity_threshold use_all_reduce_for_fetch_params
        stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
        stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
        parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
        """
    ),
    "zero_optimization.offload_param": words(
        """
        device nvme_path buffer_count buffer_size max_in_cpu pin_memory
        """
    ),
    "zero_optimization.offload_optimizer": words(
        """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc
        """
    ),
    "fp16": words(
        """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads
        """
    ),
    "bf16": words(
        """
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
        """
    ),
    "tensorboard": words(
        """
        enabled output_path job_name
        """
    ),
    "wandb": words(
        """
        enabled group team project
        """
    ),
    "csv_monitor": words(
        """
        enabled output_path job_name
        """
    ),
    "comet": words(
        """
        enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode
        """
    ),
    "comms_logger": words(
        """
        enabled prof_all prof_ops verbose debug
        """
    ),
    "hybrid_engine": words(
        """
        enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size
        enable_cuda_graph
        """
    ),
    "compile": words(
        """
        deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation
        offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log offload_parameters
        sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors
        keep_all_input_tensors passes
        """
    ),
    "timers.throughput": words(
        """
        enabled synchronized
        """
    ),
    "zero_optimization.leaf_module": words("classes names name_suffixes"),
}

# Blocks that DeepSpeed reads key by key, so that a wrong one has no effect and no message.
LOOSE_BLOCKS = {
    "flops_profiler": words("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    "activation_checkpointing": words(
        """
        partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile
        cpu_checkpointing
        """
    ),
    "aio": words("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds"),
    "checkpoint": words("tag_validation load_universal use_node_local_storage parallel_write writer"),
    "checkpoint.parallel_write": words("pipeline_stage"),
    "data_types": words("grad_accum_dtype"),
    "timers": words("throughput"),
    "torch_autocast": words("enabled dtype lower_precision_safe_modules"),
}

BLOCKS = {"": TOP_LEVEL, **MODEL_BLOCKS, **LOOSE_BLOCKS, "bfloat16": MODEL_BLOCKS["bf16"]}


def check_keys(user_json: Mapping[str, Any], source: str = "DeepSpeed JSON") -> None:
    """Refuse keys that DeepSpeed does not read.

    Raises:
        InputError: one line for each unknown key, with its path and the nearest valid key of its block.
    """
    if errors := list(unknown_keys(user_json, "")):
        raise InputError("\n".join(f"{source}: {error}" for error in errors))


def unknown_keys(block: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a line for each unknown key of `block` and of the blocks in it. `path` is dotted; "" is the whole JSON."""
    valid = BLOCKS.get(path)
    for key, value in block.items():
        inner = f"{path}.{key}" if path else key
        if valid is not None and key not in valid:
            yield f"{inner}: DeepSpeed has no such key and would ignore it{nearest(key, valid)}"
        elif isinstance(value, Mapping):
            yield from unknown_keys(value, inner)
        elif inner in BLOCKS and value != "auto" and not takes_scalar(inner, value):
            yield f"{inner}: found {value!r}, wanted a block {{...}}"


def takes_scalar(path: str, value: Any) -> bool:
    """Tell whether DeepSpeed takes `value` in place of the block `path`: a null offload block switches offload off."""
    return value is None and path.startswith("zero_optimization.")
