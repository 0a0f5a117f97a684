"""The DeepSpeed JSON of an engine, built from flags and joined with the user's own. Pure: no torch, no deepspeed.

Nothing edits the dict afterwards. DeepSpeed gets the micro-batch and the accumulation and infers the global batch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline.configuration.ds_json import check_global_batch, flags_from_json, merge_user_json, read_user_json
from pipeline.configuration.ds_keys import check_keys
from pipeline.configuration.groups import DeepSpeedConfig
from pipeline.errors import InputError

__all__ = ["check_keys", "flags_from_json", "frozen_config", "merge_user_json", "read_user_json", "training_config"]

Json = dict[str, Any]
EngineDtype = Literal["bf16", "fp16", "fp32"]

# DeepSpeed prints its own progress line every so many steps; ours come from pipeline/training/metrics.py.
NEVER_PRINT = 1_000_000_000
# With these stage 1 has no hook at each parameter.
WITHOUT_HOOKS = {"overlap_comm": False, "contiguous_gradients": False}


def training_config(
    settings: DeepSpeedConfig,
    *,
    zero_stage: int,
    dtype: EngineDtype,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    world_size: int,
    max_grad_norm: float,
    run_dir: str | Path,
    device: Literal["cpu", "cuda"],
    one_node: bool = False,
    user_json: Mapping[str, Any] | None = None,
    origins: Mapping[str, str] | None = None,
) -> Json:
    """The JSON of an engine that trains.

    Args:
        micro_batch_size: rows of one forward pass on one rank.
        one_node: all ranks are on one machine.
        run_dir: DeepSpeed's own monitors write to `<run_dir>/deepspeed`.
        user_json: the user's JSON, joined by the rules of `merge_user_json`.
        origins: where each flag's value came from (`Resolved.origins`).

    Raises:
        InputError: settings that do not go together, or a user's JSON that does not fit them.
    """
    refuse_combinations(settings, zero_stage=zero_stage, dtype=dtype, device=device)
    built: Json = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": max_grad_norm,
        "steps_per_print": NEVER_PRINT,
        "wall_clock_breakdown": settings.wall_clock_breakdown,
        "zero_optimization": zero_block(settings, zero_stage, device),
        # It waits for the device at each forward pass.
        "timers": {"throughput": {"enabled": False}},
        # The optimizer is torch's AdamW, also when its states are in host memory.
        "zero_force_ds_cpu_optimizer": False,
        **precision_blocks(settings, dtype),
        **monitor_blocks(settings, Path(run_dir)),
    }
    if settings.communication_data_type != "auto":
        built["communication_data_type"] = settings.communication_data_type
    if user_json is not None:
        source = settings.deepspeed_config or "DeepSpeed JSON"
        check_keys(user_json, source)
        built = merge_user_json(built, user_json, origins, source=source)
        check_global_batch(built, world_size, source)
    if world_size == 1:
        return built | {"zero_optimization": alone(built)}
    asked = (user_json or {}).get("zero_optimization", {}).keys() & WITHOUT_HOOKS.keys()
    if one_node and not asked and (origins or {}).get("overlap_comm", "default") == "default":
        return built | {"zero_optimization": without_hooks(built)}
    return built


def without_hooks(config: Json) -> Json:
    """The zero_optimization block of `config` for ranks of one machine: at stage 1 gradients are reduced at the end.

    Over NVLink that takes 4 ms a GB. Overlapping it with the last backward pass takes a Python function at each
    parameter of every pass instead, and small models then wait for the host: 0.05 s a step of OPT-1.3B and OPT-350M.
    """
    zero = dict(config["zero_optimization"])
    return zero | WITHOUT_HOOKS if zero["stage"] == 1 and not is_special(config) else zero


def is_special(config: Json) -> bool:
    """Whether DeepSpeed takes another optimizer for stage 1 than for stage 2, or other paths through it."""
    offloads = (config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none") != "none"
    return offloads or "data_types" in config


def alone(config: Json) -> Json:
    """The zero_optimization block of `config` for one rank: the same numbers without what serves several only.

    With nobody to talk to, overlapping holds a second bucket and waits for the device after each backward pass. Stage 2
    partitions nothing, but copies every gradient four times a micro-batch, from Python; stage 1 lets autograd add them
    up, and copies once a step. Without contiguous gradients it has no hook at each parameter either.
    """
    zero = dict(config["zero_optimization"])
    if zero["stage"] in (1, 2):
        zero["overlap_comm"] = False
    if zero["stage"] in (1, 2) and not is_special(config):
        zero |= {"stage": 1, **WITHOUT_HOOKS}
    return zero


def frozen_config(
    settings: DeepSpeedConfig,
    *,
    zero_stage: Literal[0, 3],
    dtype: EngineDtype,
    micro_batch_size: int,
    world_size: int,
    offload: bool,
) -> Json:
    """The JSON of a model that is only read. DeepSpeed has no stage 1 or 2 without an optimizer.

    Raises:
        InputError: a stage other than 0 and 3, or offload at stage 0, where DeepSpeed would ignore it.
    """
    if zero_stage not in (0, 3):
        raise InputError(f"zero_stage of a frozen model: found {zero_stage}, wanted 0 or 3")
    if offload and zero_stage != 3:
        raise InputError(
            "--offload_reference_model / --offload_reward_model: need stage 3, found 0; give --actor_zero_stage 3"
            " (reference) or --critic_zero_stage 3 (reward), or leave the flag out"
        )
    if offload and settings.zero3_gather == "once":
        raise InputError(
            "--zero3_gather once: needs weights on the device, found --offload_reference_model or"
            " --offload_reward_model; use auto or layers"
        )
    zero: Json = {"stage": zero_stage}
    if zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = settings.stage3_param_persistence_threshold
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "train_batch_size": micro_batch_size * world_size,
        "steps_per_print": NEVER_PRINT,
        "zero_optimization": zero,
        **precision_blocks(settings, dtype),
    }


def refuse_combinations(settings: DeepSpeedConfig, *, zero_stage: int, dtype: str, device: str) -> None:
    """Raises InputError with a line for each combination that DeepSpeed cannot do, or would silently not do."""
    errors = []
    if settings.offload and zero_stage == 0:
        errors.append("--offload: needs ZeRO stage 1, 2 or 3, found stage 0; raise --zero_stage or leave --offload out")
    if settings.offload_parameters and zero_stage < 3:
        errors.append(f"--offload_parameters: needs ZeRO stage 3, found stage {zero_stage}")
    if settings.offload_parameters and settings.zero3_gather == "once":
        errors.append("--zero3_gather once: needs weights on the device, found --offload_parameters; use layers")
    if dtype == "fp16" and device == "cpu":
        errors.append("--dtype fp16: DeepSpeed has no fp16 on the CPU; use bf16 or fp32")
    if errors:
        raise InputError("\n".join(errors))


def zero_block(settings: DeepSpeedConfig, stage: int, device: str) -> Json:
    """The zero_optimization block: nothing but the stage where nothing is partitioned."""
    block: Json = {"stage": stage}
    if stage == 0:
        return block
    block |= {
        "reduce_bucket_size": settings.reduce_bucket_size,
        # There are no streams on a CPU: overlapping would only hold a second bucket.
        "overlap_comm": settings.overlap_comm and device == "cuda",
        "contiguous_gradients": True,
    }
    if stage < 3:
        block["allgather_bucket_size"] = settings.allgather_bucket_size
    else:
        block["stage3_param_persistence_threshold"] = settings.stage3_param_persistence_threshold
        block["stage3_gather_16bit_weights_on_model_save"] = True
    if settings.offload:
        block["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
    if settings.offload_parameters:
        block["offload_param"] = {"device": "cpu", "pin_memory": device == "cuda"}
    return block


def precision_blocks(settings: DeepSpeedConfig, dtype: str) -> Json:
    """The bf16 and fp16 blocks; both off for fp32."""
    blocks: Json = {"bf16": {"enabled": dtype == "bf16"}, "fp16": {"enabled": dtype == "fp16"}}
    if dtype == "fp16":
        blocks["fp16"] |= {
            "loss_scale": settings.loss_scale,
            "initial_scale_power": settings.initial_scale_power,
            "loss_scale_window": settings.loss_scale_window,
            "hysteresis": settings.hysteresis,
            "min_loss_scale": settings.min_loss_scale,
        }
    return blocks


def monitor_blocks(settings: DeepSpeedConfig, run_dir: Path) -> Json:
    """DeepSpeed's own monitors, in a folder apart from the run's metrics."""
    blocks: Json = {}
    for name in settings.deepspeed_monitor:
        if name == "wandb":
            blocks[name] = {"enabled": True, "group": str(run_dir)}
        else:
            blocks[name] = {"enabled": True, "output_path": str(run_dir / "deepspeed"), "job_name": name}
    return blocks
