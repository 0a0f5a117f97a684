"""Read and check the user's DeepSpeed JSON, convert it to flags and merge it with the one that a run builds.

ds_keys.py checks the names of keys, for which it imports deepspeed.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_keys import IDLE, MONITORS, READ_AT, REFUSED, blocks, check_keys
from pipeline.configuration.flag_table import ZERO_STAGE, Flag
from pipeline.configuration.groups import ONLY_IN_JSON
from pipeline.configuration.origins import DEFAULT, Origins
from pipeline.errors import InputError, counted, dashed, raise_lines
from pipeline.files import readable
from pipeline.redact import shown

Json = dict[str, Any]

ACCUMULATION = "gradient_accumulation_steps"

# A remark of its author, as no key of DeepSpeed begins: "_comment", "//", "#", "$schema"; or "comment" alone.
REMARK = re.compile(r"[_/#$]|comments?$", re.IGNORECASE)
BASE64_OBJECT = "eyJ"  # the first bytes of an object, `{"`
# DeepSpeed's schedules -> the same as --lr-scheduler-type. With "auto" alone in their block they are no setting.
SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Keys that many files have -> DeepSpeed's default, of which nothing is said.
USUAL = {key: default for _, keys, default, *_ in ONLY_IN_JSON for key in keys.split()}
# The value of a key whose block is missing.
NO_OFFLOAD = {"zero_optimization.offload_optimizer.device": "none", "zero_optimization.offload_param.device": "none"}


def read_user_json(path: str | Path) -> Json:
    """Read the user's DeepSpeed JSON, its keys checked and under their usual names, without its remarks.

    Raises:
        InputError: no such file, not JSON (with the line), a key that occurs twice, not an object, unknown keys,
            an optimizer or scheduler, values that exclude each other.
    """
    try:
        content = json.loads(readable(path).read_text(encoding="utf-8-sig"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise InputError(f"--deepspeed-config: {path}: cannot read it: {error.strerror}") from None
    except json.JSONDecodeError as error:
        reason = "JSON has no comments" if error.doc.startswith(("//", "/*", "#"), error.pos) else error.msg
        raise InputError(f"--deepspeed-config: {path}: line {error.lineno}: not JSON: {reason}") from None
    except (ValueError, RecursionError, InputError) as error:
        raise InputError(f"--deepspeed-config: {path}: {error}") from None
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "a single value"
        raise InputError(f"--deepspeed-config: {path}: got {kind}, expected an object {{...}}")
    check_keys(content, str(path))
    refuse_optimizer(content, str(path))
    content = usual_names(without_refused(content), str(path))
    raise_lines(f"{path}: {error}" for error in contradictions(dict(leaves(content))))
    return content


def autotuning_file(word: str) -> str:
    """Return the file of a configuration that DeepSpeed's autotuner hands over in base64, or a word as it is.

    The autotuner writes the file beside its measurements. After `--autotuning run` it starts the best configuration
    as it was measured, to end after a few steps: then the file is the one without measuring, which trains to the end.
    """
    try:
        content = json.loads(base64.urlsafe_b64decode(word)) if word.startswith(BASE64_OBJECT) else {}
        measured = Path(content["autotuning"]["metric_path"])
    except (ValueError, LookupError, TypeError):
        return word
    optimal = measured.parents[1] / "ds_config_optimal.json"
    return str(optimal if measured.exists() and optimal.exists() else measured.with_name("ds_config.json"))


def without_refused(content: Json, path: str = "") -> Json:
    """Leave out the keys that may only be switched off: DeepSpeed ends at some of them, whatever their value."""
    accepted = {key: value for key, value in content.items() if f"{path}{key}" not in REFUSED}
    if isinstance(zero := accepted.get("zero_optimization"), dict):
        accepted["zero_optimization"] = without_refused(zero, "zero_optimization.")
    return accepted


def contradictions(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each pair of values of one JSON that exclude each other. Keys are dotted."""
    if said.get("bf16.enabled") is True and said.get("fp16.enabled") is True:
        yield "bf16 and fp16: both are enabled, expected one"
    if said.get("bf16.bf16_master_weights_and_grads") is True and said.get("bf16.bf16_optimizer_states") is not True:
        yield "bf16.bf16_master_weights_and_grads: got True, needs bf16.bf16_optimizer_states too"
    stage, zero = said.get("zero_optimization.stage", "auto"), "zero_optimization"
    for block, needed in (("offload_optimizer", 1), ("offload_param", 3)):
        device = said.get(f"{zero}.{block}.device", "none")
        if device != "none" and stage != "auto" and stage < needed:
            yield f"{zero}.{block}.device: got {device!r}, needs {zero}.stage {needed} or higher, got {stage}"
        if device == "nvme" and not said.get(f"{zero}.{block}.nvme_path"):
            yield f"{zero}.{block}.device: got 'nvme', expected a folder as {zero}.{block}.nvme_path too"
        if device != "nvme" and said.get(f"{zero}.{block}.nvme_path"):
            yield f"{zero}.{block}.nvme_path: got a folder, needs {zero}.{block}.device nvme, got {device!r}"
    group = said.get(f"{zero}.zero_hpz_partition_size", 1)
    if group not in ("auto", 0, 1) and stage not in ("auto", 3):
        yield f"{zero}.zero_hpz_partition_size: got {group}, needs {zero}.stage 3, got {stage}"
    sizes = [said.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", ACCUMULATION)]
    batch, micro, accumulation = (size if isinstance(size, int) else 0 for size in sizes)
    if batch and batch % (max(micro, 1) * max(accumulation, 1)):
        yield f"train_batch_size: got {batch}, which {max(micro, 1)} x {max(accumulation, 1)} rows do not divide"


def usual_names(content: Json, source: str) -> Json:
    """Rename `bfloat16` to `bf16`, and ZeRO's fields that also have a `stage3_` name to that one.

    Raises:
        InputError: both names of a key.
    """
    fields = blocks()["zero_optimization"]

    def usual(block: Json, rename: Callable[[str], str], prefix: str = "") -> Json:
        for key in block:
            if rename(key) != key and rename(key) in block:
                raise InputError(f"{source}: {prefix}{key}: it is {rename(key)}, which is given too; remove one")
        return {rename(key): value for key, value in block.items()}

    def in_zero(key: str) -> str:
        key = {"stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save"}.get(key, key)
        return f"stage3_{key}" if f"stage3_{key}" in fields else key

    result = usual(content, lambda key: "bf16" if key == "bfloat16" else key)
    if isinstance(zero := result.get("zero_optimization"), dict):
        result["zero_optimization"] = usual(zero, in_zero, "zero_optimization.")
    return result


def unique_keys(pairs: list[tuple[str, Any]]) -> Json:
    """Make a dict of a JSON object's pairs but for remarks; raise InputError where a key occurs twice."""
    result: Json = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"{key}: occurs twice in one block")
        if not REMARK.match(key):
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


def at_stages(user: Json, stages: Set[int]) -> tuple[Json, list[str]]:
    """Return the user's JSON without the keys that DeepSpeed reads at none of these ZeRO stages, and those keys."""
    zero = user.get("zero_optimization") or {}
    unread = [key for key, value in zero.items() if value != "auto" and not stages & READ_AT.get(key, stages)]
    if not unread:
        return user, []
    remaining = {key: value for key, value in zero.items() if key not in unread}
    return user | {"zero_optimization": remaining}, [f"zero_optimization.{key}" for key in unread]


def flags_from_json(
    user: Mapping[str, Any], table: Mapping[str, Flag], *, dtype: str = "auto"
) -> dict[str, tuple[str, Any]]:
    """Return {flag: (key of the JSON, value)} for all that the user's JSON says about flags; 'auto' says nothing.

    dtype: --dtype. Where it is auto, bf16 switched off means fp32: auto is no choice of fp16.
    """
    said = {key: value for key, value in leaves(user) if value != "auto"}
    flags = {}
    for name, flag in table.items():
        # Where several keys belong to a flag, the value of one is not the flag's.
        key = flag.deepspeed[0] if len(flag.deepspeed) == 1 else ""
        if not key.endswith(".device") and key in said:
            flags[name] = key, said[key]
        elif said.get(key) in ("cpu", "none") and flag.default is False:  # nvme stays the JSON's own: no flag says it
            flags[name] = key, said[key] == "cpu"
    for name in ("bf16", "fp16"):
        if said.get(f"{name}.enabled") is True:
            flags["dtype"] = (f"{name}.enabled", name)
    off = [said.get(f"{name}.enabled") is False for name in ("bf16", "fp16")]
    if all(off) or (off[0] and dtype == "auto" and "dtype" not in flags):
        flags["dtype"] = ("bf16.enabled", "fp32")
    return flags


def block_of(user: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a block of the JSON; {} if it has none, or is "auto"."""
    block = user.get(name)
    return block if isinstance(block, Mapping) else {}


def overrides(
    user: Mapping[str, Any], table: Mapping[str, Flag], changed: Mapping[str, str], *, dtype: str
) -> Iterator[str]:
    """Yield lines on what the user's JSON changes: flags, further keys, and keys without effect.

    Args:
        user: the JSON without keys of other ZeRO stages (`at_stages`).
        changed: the flags that it gives another value, with the value.
        dtype: --dtype; what the JSON says of fp16 has no effect under another one.
    """
    flag_keys = {key for flag in table.values() for key in flag.deepspeed}
    off = [name for name in MONITORS if block_of(user, name).get("enabled") is False]
    said = {
        key: value
        for key, value in leaves(user)
        if value not in ("auto", USUAL.get(key, "auto"))
        and key not in flag_keys
        and key.partition(".")[0] not in ("optimizer", "scheduler", *off)
    }
    idle = {key: name for key in said for name in IDLE if f"{key}.".startswith(f"{name}.")}
    of_fp16 = [key for key in said if key.startswith("fp16.") and dtype != "fp16"]
    if changed:
        yield f"sets {', '.join(f'{dashed(name)} {text}' for name, text in changed.items())}"
    if further := [f"{key} {shown(key, value)}" for key, value in said.items() if key not in (*idle, *of_fp16)]:
        yield f"gives to DeepSpeed {', '.join(further)}"
    if of_fp16:
        yield f"{', '.join(of_fp16)}: has no effect: it needs --dtype fp16, got {dtype}"
    if schedule := SCHEDULES.get(dict(leaves(user)).get("scheduler.type", "")):
        yield f"scheduler: has no effect here: use --lr-scheduler-type {schedule}"
    for name in dict.fromkeys(idle.values()):
        yield f"{name}: has no effect here: {IDLE[name]}"


def merge_user_json(built: Json, user: Json, table: Mapping[str, Flag], origins: Origins, *, source: str) -> Json:
    """Join the user's JSON with the one built from the flags, as a new dict.

    Keys that DeepSpeed does not read at the ZeRO stage are left out. For every other value of the user's JSON:
    1. "auto" becomes ours; where we have none the key is left out and DeepSpeed's own default holds.
    2. A value equal to ours is fine, and so is one where we have none.
    3. A micro-batch or accumulation that differs from ours is refused, since the loaders follow the flags.
    4. A value that differs from a flag which was given is refused.
    5. Any other value wins over ours.
    What the user's JSON does not mention is ours. `parse` has already turned the JSON's values into flags
    (`flags_from_json`), so that after it only values without a flag are left to rule 5.

    Raises:
        InputError: one line for each value that rules 3 and 4 refuse.
    """
    ours, errors = NO_OFFLOAD | dict(leaves(built)), []
    user, _ = at_stages(user, {ours[ZERO_STAGE]})
    for key, value in leaves(user):
        names = [name for name, flag in table.items() if key in flag.deepspeed]
        if value == "auto" or not names or value == ours.get(key, value):
            continue
        set_by = {name: origins.get(name, DEFAULT) for name in names}
        is_given = any(origin.is_given for origin in set_by.values())
        if is_given or key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            setters = [f"{dashed(name)} ({origin})" for name, origin in set_by.items() if not origin.is_default]
            by = " and ".join(setters) or dashed(names[0])
            errors.append(f"{source}: {key}: got {value!r}, but {by} makes it {ours[key]!r}")
    raise_lines(errors)
    return overlay(built, {key: value for key, value in user.items() if key not in ("optimizer", "scheduler")})


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> Json:
    """Put the values of `top` over those of `base`, block by block; 'auto' in `top` changes nothing."""
    result = dict(base)
    for key, value in top.items():
        if isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = overlay(inner if isinstance(inner, Mapping) else {}, value)
        elif value not in ("auto", result.get(key, "auto")):
            result[key] = value
    return result


def refuse_optimizer(user: Mapping[str, Any], source: str) -> None:
    """Raise InputError for an optimizer or scheduler block that says more than "auto"."""
    for block in ("optimizer", "scheduler"):
        content = user.get(block) or "auto"
        said = dict(leaves({block: content})) if isinstance(content, Mapping) else {block: content}
        if block == "optimizer" and said.get("optimizer.type") in ("Adam", "AdamW"):
            del said["optimizer.type"]
        if str(said.get("scheduler.type")) in SCHEDULES and len(said) > 1:
            del said["scheduler.type"]
        if wrong := [f"{key} {value!r}" for key, value in said.items() if value != "auto"]:
            raise InputError(
                f"{source}: {wrong[0]}: the optimizer is torch.optim.AdamW and the schedule ours; remove the {block}"
                ' block or write "auto", and use --learning-rate, --adam-beta1, --lr-scheduler-type, ...'
            )


def check_ranks(config: Json, world_size: int, source: str) -> None:
    """Raise InputError where train_batch_size is not micro-batch x accumulation x ranks, or groups of ranks differ."""
    group = config["zero_optimization"].get("zero_hpz_partition_size", 1)
    if world_size % min(max(group, 1), world_size):
        raise InputError(
            f"{source}: zero_optimization.zero_hpz_partition_size: got {group}, no divisor of {world_size} ranks"
        )
    micro, accumulation = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    given_batch, expected_batch = config.get("train_batch_size"), micro * accumulation * world_size
    if given_batch not in (None, expected_batch):
        fitting = [f'"train_batch_size": {expected_batch} (or "auto")']
        for flag, rest in (
            ("gradient_accumulation_steps", micro * world_size),
            ("per_device_train_batch_size", accumulation * world_size),
        ):
            if isinstance(given_batch, int) and given_batch > 0 and given_batch % rest == 0:
                fitting.append(f"{dashed(flag)} {given_batch // rest}")
        raise InputError(
            f"{source}: train_batch_size: got {given_batch}, but --per-device-train-batch-size {micro} x"
            f" --gradient-accumulation-steps {accumulation} x {counted(world_size, 'rank')} = {expected_batch};"
            f" right are {' or '.join(fitting)}"
        )
