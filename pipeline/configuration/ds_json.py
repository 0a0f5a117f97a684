"""Read and check the user's own DeepSpeed JSON, turn it into flags and join it with the one we build.

Names of keys are checked in ds_keys.py. Nothing here imports torch or deepspeed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_keys import MODEL_BLOCKS, check_keys
from pipeline.configuration.flag_table import Flag
from pipeline.errors import InputError

Json = dict[str, Any]

# The value of a key whose block is missing.
NO_OFFLOAD = {"zero_optimization.offload_optimizer.device": "none", "zero_optimization.offload_param.device": "none"}


def read_user_json(path: str | Path) -> Json:
    """Read the user's DeepSpeed JSON, its keys checked and under their usual names.

    Raises:
        InputError: no such file, not JSON (with the line), a key that occurs twice, not an object, unknown keys,
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
    """Rename `bfloat16` to `bf16`, and ZeRO's fields that also have a `stage3_` name to that one."""
    result = {"bf16" if key == "bfloat16" else key: value for key, value in content.items()}
    zero, known = result.get("zero_optimization"), MODEL_BLOCKS["zero_optimization"]
    if isinstance(zero, dict):
        named = ((f"stage3_{key}" if f"stage3_{key}" in known else key, value) for key, value in zero.items())
        result["zero_optimization"] = dict(named)
    return result


def unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    """Make a dict of a JSON object's pairs; raise InputError where a key occurs twice."""
    result: Json = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"{key}: occurs twice in one block")
        result[key] = value
    return result


def leaves(block: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything below `block` that is no block itself."""
    for key, value in block.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from leaves(value, inner)
        else:
            yield inner, value


def flags_from_json(user: Mapping[str, Any], table: Mapping[str, Flag]) -> dict[str, tuple[str, Any]]:
    """Return {flag: (key of the JSON, value)} for all that the user's JSON says about flags; 'auto' says nothing."""
    said = {key: value for key, value in leaves(user) if value != "auto"}
    flags = {}
    for name, flag in table.items():
        # Where several keys belong to a flag, no value of a key is the flag's.
        key = flag.deepspeed[0] if len(flag.deepspeed) == 1 else ""
        if not key.endswith(".device") and key in said:
            flags[name] = key, said[key]
        elif said.get(key) in ("cpu", "none"):  # nvme stays the JSON's own: no flag says it
            flags[name] = key, said[key] == "cpu"
    for dtype in ("bf16", "fp16"):
        if said.get(f"{dtype}.enabled") is True:
            flags["dtype"] = (f"{dtype}.enabled", dtype)
    if said.get("bf16.enabled") is False and said.get("fp16.enabled") is False:
        flags["dtype"] = ("bf16.enabled", "fp32")
    return flags


def merge_user_json(
    built: Json, user: Mapping[str, Any], table: Mapping[str, Flag], origins: Mapping[str, str], *, source: str
) -> Json:
    """Join the user's JSON with the one built from the flags, as a new dict.

    For every value of the user's JSON:
    1. "auto" becomes ours; where we have none the key is left out and DeepSpeed's own default holds.
    2. A value equal to ours is fine.
    3. A micro-batch or accumulation that differs from ours is refused, since the loaders follow the flags.
    4. A value that differs from a flag which was given (its origin is not "default") is refused.
    5. Any other value wins over ours.
    What the user's JSON does not mention is ours. `parse` has already turned the JSON's values into flags
    (`flags_from_json`), so that after it only values without a flag are left to rule 5.

    Raises:
        InputError: one line for each value that rules 3 and 4 refuse.
    """
    ours, errors = NO_OFFLOAD | dict(leaves(built)), []
    for key, value in leaves(user):
        names = [name for name, flag in table.items() if key in flag.deepspeed]
        if value == "auto" or not names or value == ours.get(key):
            continue
        given = [f"--{name} ({origins[name]})" for name in names if origins.get(name, "default") != "default"]
        if given or key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            by = " and ".join(given) or f"--{names[0]}"
            errors.append(f"{source}: {key}: found {value!r}, but {by} makes it {ours.get(key)!r}")
    if errors:
        raise InputError("\n".join(errors))
    return overlay(built, {key: value for key, value in user.items() if key not in ("optimizer", "scheduler")})


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Json:
    """Put the values of `top` over those of `base`, block by block; 'auto' in `top` changes nothing."""
    result = dict(base)
    for key, value in top.items():
        if isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = overlay(inner if isinstance(inner, Mapping) else {}, value)
        elif value != "auto":
            result[key] = value
    return result


def refuse_optimizer(user: Mapping[str, Any], source: str) -> None:
    """Raise InputError for an optimizer or scheduler block that says more than "auto"."""
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
    """Raise InputError where train_batch_size is given and is not micro-batch x accumulation x ranks."""
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
