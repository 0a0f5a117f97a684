"""The private names of DeepSpeed and torch that this project uses, compared with the installed versions.

`start_deepspeed` makes the comparison, so that an unsupported version ends a run at its start and not within a step. A
test compares the lists with the source. Documented names of DeepSpeed and torch are not listed.
"""

import dis
import inspect
import logging
from functools import cache
from operator import attrgetter
from types import CodeType, FunctionType

import deepspeed
import torch

from pipeline.errors import EnvironmentFault

log = logging.getLogger(__name__)

TESTED = "torch 2.13.0 with deepspeed 0.19.8"

# Attributes of torch; if one is missing, slower public functions compute the same.
TORCH = ("_addmm_activation", "_foreach_norm", "ops.aten._flash_attention_forward")
# Attributes of torch that a dry run needs for its plan.
TORCH_OF_PLANS = (
    "ops.aten._scaled_dot_product_efficient_attention",
    "ops.aten._scaled_dot_product_flash_attention",
    "utils._python_dispatch.TorchDispatchMode",
)

# Class or module of DeepSpeed -> attributes that it has, or that its methods set on some object; no public function
# returns them.
DEEPSPEED = {
    "utils.groups": "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "utils.nvtx": "enable_nvtx",
    "utils.tensor_fragment": "hp_fragment_address lp_fragment_address",
    "utils.mixed_precision_linkage": "_hp_mapping",
    "runtime.engine.DeepSpeedEngine": "dynamic_loss_scale fp16_enabled global_samples global_steps micro_steps "
    "skipped_steps",
    "runtime.fp16.loss_scaler.DynamicLossScaler": "cur_hysteresis cur_iter cur_scale last_overflow_iter min_scale",
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": "_update_scale fp16_groups fp32_groups loss_scale "
    "loss_scale_config overflow_checker refresh_fp32_params",
    "runtime.zero.stage_1_and_2": "INITIAL_MICRO_STEP_ID",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "_backward_active_depth _release_ipg_buffers "
    "_update_model_bit16_weights _update_scale all_grad_tensors averaged_gradients bit16_groups check_overflow "
    "contiguous_gradients cpu_offload exit_backward extra_large_param_to_reduce "
    "independent_gradient_partition_epilogue ipg_buckets loss_scale loss_scaler micro_step_id overlap_comm "
    "params_already_reduced reduce_ipg_grads reduction_stream reset_cpu_buffers scaled_global_norm "
    "single_partition_of_fp32_groups update_lp_params",
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "_backward_active_depth _get_norm_groups "
    "_optimizer_states_and_gradient_swap_in _optimizer_states_and_gradient_swap_out _overflow_clean_up "
    "_reassign_or_swap_out_partitioned_parameters _swappable_optimizer_subgroup _update_scale averaged_gradients "
    "check_overflow exit_backward final_location fp16_groups fp32_partitioned_groups_flat invalidate_secondary_tensor "
    "ipg_buckets loss_scale loss_scaler optimizer_swapper parameter_offload params_already_reduced "
    "persistent_parameters reduce_and_partition_stream",
    "runtime.swap_tensor.optimizer_utils.OptimizerSwapper": "swap_params_info",
    "runtime.swap_tensor.optimizer_utils.OptimizerStateSwapInfo": "get_compute_tensors get_swap_paths",
    "runtime.zero.parameter_offload.DeepSpeedZeRoOffload": "_register_deepspeed_module backward_hooks forward_hooks "
    "get_param_coordinator partition_all_parameters",
    "runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator": "_clean_inflight_param_registry",
    "runtime.zero.partition_parameters.Init": "all_gather all_gather_coalesced ds_active_sub_modules ds_id ds_numel "
    "ds_persist ds_secondary_tensor ds_shape ds_status ds_tensor partition partition_numel",
}


def check_private_names() -> None:
    """Compare the lists with the installed libraries; a missing name of torch is logged only.

    Raises:
        EnvironmentFault: DeepSpeed lacks a name.
    """
    installed = f"torch {torch.__version__} with deepspeed {deepspeed.__version__}"
    missing = [
        f"deepspeed.{owner}.{name}"
        for owner, names in DEEPSPEED.items()
        for name in names.split()
        if not deepspeed_has(owner, name)
    ]
    if missing:
        raise EnvironmentFault(f"{', '.join(missing)}: missing in {installed}; tested is {TESTED}")
    for name in (*TORCH, *TORCH_OF_PLANS):
        try:
            attrgetter(name)(torch)
        except AttributeError:
            instead = "a slower public function is used" if name in TORCH else "a dry run makes no plan"
            log.info("torch.%s: missing in %s, %s", name, installed, instead)


def deepspeed_has(owner: str, name: str) -> bool:
    """Return whether a class or module of DeepSpeed has the attribute `name`, or one of its methods sets it."""
    try:
        holder = attrgetter(owner)(deepspeed)
    except AttributeError:
        return False
    members = [
        getattr(member, "__func__", member)
        for part in (holder.__mro__ if isinstance(holder, type) else [holder])
        for member in vars(part).values()
    ]
    functions = (inspect.unwrap(member) for member in members if isinstance(member, FunctionType))
    return hasattr(holder, name) or any(sets_attribute(function.__code__, name) for function in functions)


def sets_attribute(code: CodeType, name: str) -> bool:
    """Return whether a function, or one defined inside it, contains `x.name = ...`."""
    here = name in code.co_names and name in attributes_set(code)  # disassembling all functions would be slow
    return here or any(sets_attribute(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


@cache
def attributes_set(code: CodeType) -> frozenset[str]:
    """Return the names of all attributes that a function sets on any object, without functions inside it."""
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
