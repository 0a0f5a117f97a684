"""The user's own DeepSpeed JSON: read, checked, turned into flags, joined with the one that we build.

Pure: no torch, no deepspeed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_keys import MODEL_BLOCKS, check_keys
from pipeline.errors import InputError

Json = dict[str, Any]

# Where a flag's value stands in the JSON.
FLAG_OF_KEY = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "communication_data_type": "communication_data_type",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.reduce_bucket_size": "reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "allgather_bucket_size",
    "zero_optimization.overlap_comm": "overlap_comm",
    "zero_optimization.stage3_param_persistence_threshold": "stage3_param_persistence_threshold",
    "zero_optimization.offload_optimizer.device": "offload",
    "zero_optimization.offload_param.device": "offload_parameters",
    "fp16.enabled": "dtype",
    "fp16.loss_scale": "loss_scale",
    "fp16.initial_scale_power": "initial_scale_power",
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
    "fp16.min_loss_scale": "min_loss_scale",
    "bf16.enabled": "dtype",
    "tensorboard.enabled": "deepspeed_monitor",
    "csv_monitor.enabled": "deepspeed_monitor",
    "wandb.enabled": "deepspeed_monitor",
}
# What stands for a block that is not there.
NO_OFFLOAD = {"zero_optimization.offload_optimizer.device": "none", "zero_optimization.offload_param.device": "none"}
# Two keys make one flag, or the flag is a list: flags_from_json treats them apart, or not at all.
NOT_ONE_TO_ONE = ("dtype", "offload", "offload_parameters", "deepspeed_monitor")


def read_user_json(path: str | Path) -> Json:
    """The user's DeepSpeed JSON with its keys checked and under their usual names.

    Raises:
        InputError: no such file, not JSON (with the line), a key that stands twice, not an object, unknown keys,
            an optimizer or scheduler, bf16 and fp16 together.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise InputError(f"--deepspeed_config: {path}: cannot read it: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"--deepspeed_config: {path}: line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError, InputError) as error:
        raise InputError(f"--deepspeed_config: {path}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"--deepspeed_config: {path}: found a {type(content).__name__}, wanted an object {{...}}")
    check_keys(content, str(path))
    refuse_optimizer(content, str(path))
    content = usual_names(content)
    if all(dict(leaves(content)).get(f"{dtype}.enabled") is True for dtype in ("bf16", "fp16")):
        raise InputError(f"--deepspeed_config: {path}: bf16 and fp16: both are enabled, wanted one")
    return content


def usual_names(content: Json) -> Json:
    """`bfloat16` as `bf16`, and ZeRO's fields that have a `stage3_` name under that one, as we write them."""
    result = {"bf16" if key == "bfloat16" else key: value for key, value in content.items()}
    zero, known = result.get("zero_optimization"), MODEL_BLOCKS["zero_optimization"]
    if isinstance(zero, dict):
        named = ((f"stage3_{key}" if f"stage3_{key}" in known else key, value) for key, value in zero.items())
        result["zero_optimization"] = dict(named)
    return result


def unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object whose keys all differ; raises InputError where one stands twice."""
    result: Json = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"{key}: stands twice in one block")
        result[key] = value
    return result


def leaves(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything below `block` that is no block itself."""
    for key, value in block.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from leaves(value, inner)
        else:
            yield inner, value


def flags_from_json(user: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Flag -> (key of the JSON, value) for all that the user's JSON says about flags; 'auto' says nothing.

    Step 3's `actor_zero_stage` and `critic_zero_stage` both follow `zero_stage`.
    """
    said = {key: value for key, value in leaves(user) if value != "auto"}
    flags = {flag: (key, said[key]) for key, flag in FLAG_OF_KEY.items() if key in said and flag not in NOT_ONE_TO_ONE}
    for flag, block in (("offload", "offload_optimizer"), ("offload_parameters", "offload_param")):
        key = f"zero_optimization.{block}.device"
        # nvme stays the JSON's own: no flag says it.
        if (device := said.get(key)) in ("cpu", "none"):
            flags[flag] = (key, device == "cpu")
    for dtype in ("bf16", "fp16"):
        if said.get(f"{dtype}.enabled") is True:
            flags["dtype"] = (f"{dtype}.enabled", dtype)
    if said.get("bf16.enabled") is False and said.get("fp16.enabled") is False:
        flags["dtype"] = ("bf16.enabled", "fp32")
    return flags


def merge_user_json(
    built: Json,
    user: Mapping[str, Any],
    origins: Mapping[str, str] | None = None,
    *,
    source: str = "DeepSpeed JSON",
) -> Json:
    """The user's JSON joined with the one built from the flags, as a new dict.

    For every value of the user's JSON:
    1. "auto" becomes ours; where we have none the key is left out and DeepSpeed's own default holds.
    2. A value equal to ours is fine.
    3. A micro-batch or accumulation that differs from ours is refused, since the loaders follow the flags.
    4. A value that differs from a flag which was given (its origin is not "default") is refused.
    5. Any other value wins over ours.
    What the user's JSON does not mention is ours. An optimizer or scheduler block is refused unless all of it is
    "auto". `parse` has already turned the JSON's values into flags (`flags_from_json`), so that after it only values
    without a flag are left to rule 5.

    Raises:
        InputError: one line for each value that rules 3 and 4 refuse.
    """
    refuse_optimizer(user, source)
    ours, origins = NO_OFFLOAD | dict(leaves(built)), origins or {}
    errors = []
    for key, value in leaves(user):
        flag = FLAG_OF_KEY.get(key, "")
        if value == "auto" or not flag or value == ours.get(key):
            continue
        given = [
            f"--{name} ({origin})" for name, origin in origins.items() if is_flag(name, flag) and origin != "default"
        ]
        if given or key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            by = " and ".join(given) or f"--{flag}"
            errors.append(f"{source}: {key}: found {value!r}, but {by} makes it {ours.get(key)!r}")
    if errors:
        raise InputError("\n".join(errors))
    return overlay(built, {key: value for key, value in user.items() if key not in ("optimizer", "scheduler")})


def is_flag(name: str, leaf: str) -> bool:
    """Whether the flat flag `name` is `leaf`, or `leaf` with the prefix of one of step 3's two models."""
    return name.removeprefix("actor_").removeprefix("critic_") == leaf


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Json:
    """`base` with the values of `top`, block by block; 'auto' in `top` changes nothing."""
    result = dict(base)
    for key, value in top.items():
        if isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = overlay(inner if isinstance(inner, Mapping) else {}, value)
        elif value != "auto":
            result[key] = value
    return result


def refuse_optimizer(user: Mapping[str, Any], source: str) -> None:
    """Raises InputError for an optimizer or scheduler block that says more than "auto"."""
    for block in ("optimizer", "scheduler"):
        content = user.get(block) or "auto"
        said = dict(leaves({block: content})) if isinstance(content, Mapping) else {block: content}
        if block == "optimizer" and said.get("optimizer.type") in ("Adam", "AdamW"):
            del said["optimizer.type"]
        if wrong := [f"{key} {value!r}" for key, value in said.items() if value != "auto"]:
            raise InputError(
                f"{source}: {wrong[0]}: the optimizer is torch.optim.AdamW and the schedule ours; remove the {block}"
                ' block or write "auto", and use --learning_rate, --adam_beta1, --lr_scheduler_type, ...'
            )


def check_global_batch(config: Json, world_size: int, source: str) -> None:
    """Raises InputError where train_batch_size is given and is not micro-batch x accumulation x ranks."""
    micro, accumulation = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    found, wanted = config.get("train_batch_size"), micro * accumulation * world_size
    if found not in (None, wanted):
        fitting = [f'"train_batch_size": {wanted} (or "auto")']
        for flag, rest in (
            ("gradient_accumulation_steps", micro * world_size),
            ("per_device_train_batch_size", accumulation * world_size),
        ):
            if isinstance(found, int) and found > 0 and found % rest == 0:
                fitting.append(f"--{flag} {found // rest}")
        raise InputError(
            f"{source}: train_batch_size: found {found}, but --per_device_train_batch_size {micro} x"
            f" --gradient_accumulation_steps {accumulation} x {world_size} ranks = {wanted};"
            f" right are {' or '.join(fitting)}"
        )
