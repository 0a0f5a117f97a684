"""Build the DeepSpeed JSON of an engine from flags and join the user's own; no torch, no deepspeed.

The check before a run and the ranks of the run call the same two functions. Nothing edits the dict afterwards.
DeepSpeed gets the micro-batch and the accumulation and infers the global batch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.configuration.ds_json import block_of, check_ranks, merge_user_json, overlay, read_user_json
from pipeline.configuration.ds_keys import MONITORS
from pipeline.configuration.flag_table import ZERO_STAGE, flag_table, flags_of_key
from pipeline.configuration.groups import PERSISTENCE, STAGE, DeepSpeedConfig, Group, ModelConfig, Offload
from pipeline.configuration.origins import Origins
from pipeline.configuration.resolved import Resolved
from pipeline.errors import InputError, dashed, raise_lines

Json = dict[str, Any]
EngineDtype = Literal["bf16", "fp16", "fp32"]

# DeepSpeed prints its own progress line every so many steps; ours come from pipeline/training/metrics.py.
NEVER_PRINT = 1_000_000_000
# Elements of a bucket. DeepSpeed's default of 5e8 takes 1.9 GiB of a GPU with overlap and is no faster.
BUCKET = 200_000_000
# Settings with which ZeRO stage 1 has no hook at each parameter.
WITHOUT_HOOKS = {"overlap_comm": False, "contiguous_gradients": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The machine of an engine, as far as the DeepSpeed JSON depends on it.

    device: kind of the device that the engine computes on.
    dtype: `--dtype` with auto resolved.
    ranks: number of ranks; None where only the launcher will know.
    run_dir: folder of the run; DeepSpeed's monitors write to `<run_dir>/deepspeed`.
    one_node: all ranks are on one machine.
    """

    device: Literal["cpu", "cuda"]
    dtype: EngineDtype
    ranks: int | None
    run_dir: Path
    one_node: bool = False


def training_json(
    resolved: Resolved, model: ModelConfig, placement: Placement, *, accumulation: int | None = None
) -> Json:
    """Build the DeepSpeed JSON of an engine that trains.

    Args:
        resolved: the configuration of the stage.
        model: its group of the model that is trained.
        accumulation: micro-batches of an optimizer step, if not `--gradient-accumulation-steps`.

    Raises:
        InputError: settings that do not go together, or a user's JSON that does not fit them.
    """
    config, origins = resolved.config, resolved.origins
    settings, optimizer, ranks = config.deepspeed, config.optimizer, placement.ranks
    refuse_combinations(resolved, model, placement)
    user = read_user_json(settings.deepspeed_config) if settings.deepspeed_config else {}
    built: Json = {
        "train_micro_batch_size_per_gpu": optimizer.per_device_train_batch_size,
        "gradient_accumulation_steps": accumulation or optimizer.gradient_accumulation_steps,
        "gradient_clipping": optimizer.max_grad_norm,
        "steps_per_print": NEVER_PRINT,
        "wall_clock_breakdown": False,
        "zero_optimization": zero_block(settings, model, placement.device),
        # It waits for the device at each forward pass.
        "timers": {"throughput": {"enabled": False}},
        # The optimizer is torch's AdamW, also when its states are in host memory.
        "zero_force_ds_cpu_optimizer": False,
        **precision_blocks(placement.dtype),
        **monitor_blocks(user, placement.run_dir),
    }
    role = role_of(config, model)
    of_model, given = for_model(user, origins, model) if role else (user, origins)
    built = merge_user_json(built, of_model, flag_table(type(config)), given, source=settings.deepspeed_config)
    weights_on_disk(built, role)
    if optimizer.optimizer_states == "8bit":
        built = with_8_bit_states(built)
    if ranks is not None:
        check_ranks(built, ranks, settings.deepspeed_config)
    if ranks == 1:
        return built | {"zero_optimization": for_one_rank(built)}
    given_hooks = user.get("zero_optimization", {}).keys() & WITHOUT_HOOKS.keys()
    if placement.one_node and not given_hooks:
        return built | {"zero_optimization": without_hooks(built)}
    return built


def role_of(config: Group, model: ModelConfig) -> str:
    """Return which of stage 3's trained models this group of `config` is: actor or critic; '' in the other stages."""
    return next((role for role in ("actor", "critic") if getattr(config, role, None) is model), "")


def for_model(user: Json, origins: Origins, model: ModelConfig) -> tuple[Json, Origins]:
    """Return the user's JSON, and the flags that hold against it, for one of stage 3's models.

    A flag of this model alone (`--critic-offload-weights cpu`) takes the place of what the JSON says for both; whether
    it pins memory stays.
    """
    offloads = {"offload_optimizer": model.offload_optimizer, "offload_param": model.offload_weights}
    zero = user.get("zero_optimization") or {}
    remaining = {name: value for name, value in zero.items() if offloads.get(name, "auto") == "auto"}
    pinned = {name: block_of(zero, name).get("pin_memory", "auto") for name in offloads if offloads[name] == "cpu"}
    remaining |= {name: {"pin_memory": value} for name, value in pinned.items()}
    given = {
        name: origin for name, origin in origins.items() if not name.endswith(("offload_optimizer", "offload_weights"))
    }
    return user | {"zero_optimization": remaining}, given


def is_on_nvme(config: Json, block: Literal["offload_optimizer", "offload_param"]) -> bool:
    """Return True if a DeepSpeed JSON puts optimizer states or weights on NVMe."""
    return device_of(config.get("zero_optimization") or {}, block) == "nvme"


def device_of(zero: Json, block: str) -> str:
    """Return where ZeRO's block puts optimizer states or weights: none (the device), cpu or nvme."""
    return str((zero.get(block) or {}).get("device", "none"))


def weights_on_disk(config: Json, role: str) -> None:
    """Give weights on NVMe a folder of their model's, and no prefetching, in which DeepSpeed 0.19.8 loses its buffers.

    The folder is needed because DeepSpeed deletes what it finds in one when it starts a model.

    Raises:
        InputError: prefetching is asked for all the same.
    """
    if not is_on_nvme(config, "offload_param"):
        return
    zero = config["zero_optimization"]
    weights = zero["offload_param"]
    zero["offload_param"] = weights | {"nvme_path": str(Path(weights["nvme_path"]) / role)}
    if bucket := zero.setdefault("stage3_prefetch_bucket_size", 0):
        raise InputError(
            f"zero_optimization.stage3_prefetch_bucket_size: got {bucket}, expected 0 with weights on NVMe: DeepSpeed"
            " loses track of its buffers"
        )


def with_8_bit_states(config: Json) -> Json:
    """Let DeepSpeed take the AdamW of bitsandbytes. Raises InputError for states that it would not update."""
    zero = config["zero_optimization"]
    device = device_of(zero, "offload_optimizer")
    if zero["stage"] == 3 or device != "none":
        cause = f"optimizer states on {device}" if device != "none" else "ZeRO stage 3"
        raise InputError(f"--optimizer-states 8bit: needs ZeRO stage 0, 1 or 2 and no offload, got {cause}; give fp32")
    return config | {"zero_allow_untested_optimizer": True}


def without_hooks(config: Json) -> Json:
    """Build the zero_optimization block of `config` for ranks of one machine: ZeRO stage 1 reduces at the end.

    Over NVLink that takes 4 ms a GB. Overlapping it with the last backward pass takes a Python function at each
    parameter of every pass instead, and small models then wait for the host: 0.05 s a step of OPT-1.3B and OPT-350M.
    """
    zero = dict(config["zero_optimization"])
    return zero | WITHOUT_HOOKS if zero["stage"] == 1 and not is_special(config) else zero


def is_special(config: Json) -> bool:
    """Return True if DeepSpeed takes another optimizer for ZeRO stage 1 than for 2, or other paths through it."""
    offloads = device_of(config["zero_optimization"], "offload_optimizer") != "none"
    return offloads or "data_types" in config


def for_one_rank(config: Json) -> Json:
    """Build the zero_optimization block of `config` for one rank: the same numbers without what only several need.

    With no other rank, overlapping holds a second bucket and waits for the device after each backward pass. ZeRO stage
    2 partitions nothing, but copies every gradient four times a micro-batch, from Python; ZeRO stage 1 lets autograd
    add them up, and copies once a step. Without contiguous gradients it has no hook at each parameter either.
    """
    zero = dict(config["zero_optimization"])
    if zero["stage"] in (1, 2):
        zero["overlap_comm"] = False
    if zero["stage"] in (1, 2) and not is_special(config):
        zero |= {"stage": 1, **WITHOUT_HOOKS}
    return zero


def frozen_json(
    settings: DeepSpeedConfig, model: ModelConfig, placement: Placement, *, offload: bool, role: str = ""
) -> Json:
    """Build the DeepSpeed JSON of a model that is only read: ZeRO stage 3 where its trained twin `model` has it.

    Args:
        offload: its weights are in host memory, or on the disk of weights that the user's JSON names.
        role: of the model: reference or reward.

    Raises:
        InputError: offload at ZeRO stage 0, where DeepSpeed would ignore it.
    """
    zero: Json = {"stage": 3 if model.partitioned == "weights" else 0}
    if offload and zero["stage"] == 0:
        raise InputError(
            "--offload-reference-model / --offload-reward-model: need ZeRO stage 3, got 0; give it to the models that"
            " they start from (--actor-zero-stage 3, --critic-zero-stage 3), --reward-model-zero-stage 3 to the reward"
            " model, or leave the flag out"
        )
    if offload and settings.zero3_gather == "once":
        raise InputError(
            "--zero3-gather once: needs weights on the device, got --offload-reference-model or"
            " --offload-reward-model; use auto or layers"
        )
    if zero["stage"] == 3 and model.quantization != "none":
        raise InputError(
            f"--{role}-model-quantization {model.quantization}: ZeRO stage 3 does not partition quantised weights; give"
            f" --{role}-model-zero-stage 0"
        )
    user = read_user_json(settings.deepspeed_config) if settings.deepspeed_config else {}
    if zero["stage"] == 3:
        zero = overlay(zero, {PERSISTENCE: block_of(user, "zero_optimization").get(PERSISTENCE, "auto")})
    if offload:
        on_disk = is_on_nvme(user, "offload_param")
        zero["offload_param"] = (
            user["zero_optimization"]["offload_param"] if on_disk else {"device": "cpu", "pin_memory": True}
        )
    built = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": placement.ranks or 1,
        "steps_per_print": NEVER_PRINT,
        "zero_optimization": zero,
        **precision_blocks(placement.dtype),
        **{key: value for key, value in user.items() if offload and key == "aio"},
    }
    weights_on_disk(built, role)
    return built


def refuse_combinations(resolved: Resolved, model: ModelConfig, placement: Placement) -> None:
    """Raise InputError with a line for each combination that DeepSpeed cannot do, or would silently not do."""
    settings, stage, errors = resolved.config.deepspeed, model.zero_stage, []
    role = f"{role_of(resolved.config, model)}_".removeprefix("_")
    offloaded = offloads(settings, model)
    optimizer = "--offload" if model.offload_optimizer == "auto" else f"{dashed(role + 'offload_optimizer')} cpu"
    weights = "--offload-parameters" if model.offload_weights == "auto" else f"{dashed(role + 'offload_weights')} cpu"
    if offloaded["offload_optimizer"] and stage == 0:
        flags = " / ".join(dashed(name) for name in flags_of_key(type(resolved.config), ZERO_STAGE))
        errors.append(f"{optimizer}: needs ZeRO stage 1, 2 or 3, got stage 0; raise {flags} or leave {optimizer} out")
    if offloaded["offload_weights"] and stage < 3:
        errors.append(f"{weights}: needs ZeRO stage 3, got stage {stage}; give {dashed(role + STAGE)} 3")
    if offloaded["offload_weights"] and settings.zero3_gather == "once":
        errors.append(f"--zero3-gather once: needs weights on the device, got {weights}; use layers")
    if model.quantization != "none":
        name = f"{dashed(role + 'quantization')} {model.quantization}"
        if stage == 3:
            errors.append(f"{name}: ZeRO stage 3 does not partition quantised weights; give {dashed(role + STAGE)} 2")
        if not model.lora_dim:
            errors.append(f"{name}: quantised weights are not trained; give {dashed(role + 'lora_dim')} 16, got 0")
        elif not settings.only_optimize_lora:
            errors.append(f"{name}: quantised weights are not trained; leave --only-optimize-lora false out")
    if model.lora_dim and settings.save_adapter_only and not settings.only_optimize_lora and role != "critic_":
        errors.append("--save-adapter-only: what --only-optimize-lora false trains beside it is not saved; drop one")
    if placement.dtype == "fp16" and placement.device == "cpu":
        errors.append("--dtype fp16: DeepSpeed has no fp16 on the CPU; use bf16 or fp32")
    raise_lines(errors)


def offloads(settings: DeepSpeedConfig, model: ModelConfig) -> dict[str, bool]:
    """Return what of a model is offloaded to host memory, by the flags of this model."""
    switches: dict[str, tuple[Offload, bool]] = {
        "offload_optimizer": (model.offload_optimizer, settings.offload),
        "offload_weights": (model.offload_weights, settings.offload_parameters),
    }
    return {name: value == "cpu" or (value == "auto" and shared) for name, (value, shared) in switches.items()}


def zero_block(settings: DeepSpeedConfig, model: ModelConfig, device: str) -> Json:
    """Build the zero_optimization block: only the ZeRO stage where nothing is partitioned."""
    stage, offloaded = model.zero_stage, offloads(settings, model)
    block: Json = {"stage": stage}
    if stage == 0:
        return block
    block |= {
        "reduce_bucket_size": BUCKET,
        # There are no streams on a CPU: overlapping would only hold a second bucket.
        "overlap_comm": device == "cuda",
        "contiguous_gradients": True,
    }
    if stage < 3:
        block["allgather_bucket_size"] = BUCKET
    else:
        block |= {
            "stage3_max_live_parameters": settings.stage3_max_live_parameters,
            "sub_group_size": settings.sub_group_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    on_host = {"device": "cpu", "pin_memory": device == "cuda"}
    if offloaded["offload_optimizer"]:
        block["offload_optimizer"] = on_host
    if offloaded["offload_weights"]:
        block["offload_param"] = dict(on_host)
    return block


def precision_blocks(dtype: str) -> Json:
    """Build the bf16 and fp16 blocks; both are off for fp32."""
    return {"bf16": {"enabled": dtype == "bf16"}, "fp16": {"enabled": dtype == "fp16"}}


def monitor_blocks(user: Json, run_dir: Path) -> Json:
    """Build the blocks of the monitors that a user's JSON enables: folders apart from the run's metrics."""
    enabled = [name for name in MONITORS if block_of(user, name).get("enabled") is True]
    return {
        name: {"group": str(run_dir)}
        if name == "wandb"
        else {"output_path": str(run_dir / "deepspeed"), "job_name": name}
        for name in enabled
    }
