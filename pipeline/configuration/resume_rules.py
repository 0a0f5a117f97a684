"""Which flags a resumed run must share with its checkpoint, which may change, and the comparison of the two sets."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import flat_items
from pipeline.errors import InputError

log = logging.getLogger(__name__)


# Flags that a resumed run may change: they decide how long it is and what it writes, not what it learns.
CHANGEABLE = frozenset(
    "output_dir run_dir max_steps num_train_epochs save_steps keep_checkpoints resume overwrite save_dtype print_steps "
    "eval_interval eval_iters enable_tensorboard enable_csv enable_wandb process_group_timeout_s debug local_rank "
    "deepspeed data_output_path deepspeed_monitor wall_clock_breakdown keep_best save_adapter_only max_bad_steps "
    "rank_timeout_s force_resume save_in_background offload_optimizer_during_rollout "
    "release_inference_cache".split()
)


# Flags that decide how the same work is cut: another value changes numbers by rounding only.
LAYOUT = frozenset(
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps "
    "per_device_generation_batch_size generation_batches zero_stage actor_zero_stage critic_zero_stage "
    "offload offload_parameters offload_reference_model offload_reward_model gradient_checkpointing "
    "actor_gradient_checkpointing critic_gradient_checkpointing attn_implementation actor_attn_implementation "
    "critic_attn_implementation communication_data_type reduce_bucket_size allgather_bucket_size overlap_comm "
    "deterministic stage3_param_persistence_threshold zero3_gather generation_engine rollout_weights inference_tp_size "
    "merge_lora_for_generation".split()
)


# Compared by content (fingerprints.py): a folder that was moved is the same.
COMPARED_BY_CONTENT = frozenset(
    "data_path eval_data_path sft_only_data_path unsupervised_data_path model_name_or_path actor_model_name_or_path "
    "critic_model_name_or_path reward_model_name_or_path".split()
)


def settings_of(config: BaseModel) -> dict[str, Any]:
    """The flags that a resumed run must share, as JSON values."""
    left_out = CHANGEABLE | LAYOUT | COMPARED_BY_CONTENT
    return {name: value for name, value in flat_items(config) if name not in left_out}


def layout_of(config: BaseModel) -> dict[str, Any]:
    """The flags that decide how the work is cut."""
    return {name: value for name, value in flat_items(config) if name in LAYOUT}


def defaults_of(config: BaseModel) -> dict[str, Any]:
    """The defaults of all flags that have one."""
    table = flag_table(type(config))
    return {name: flag.default for name, flag in table.items() if flag.default is not PydanticUndefined}


def check_same_settings(
    folder: Path,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Raise InputError, a line for each flag, where a checkpoint was written under other settings; `force`: log it.

    defaults: what an older version did that did not know a flag yet. What it held and need not be the same is left out.
    """
    names = sorted((saved.keys() - CHANGEABLE - LAYOUT - COMPARED_BY_CONTENT) | current.keys())
    held = {**(defaults or {}), **saved}
    changed = [name for name in names if held.get(name) != current.get(name)]
    lines = [f"--{name}: found {current.get(name)!r}, the checkpoint has {held.get(name)!r}" for name in changed]
    refuse(folder, lines, "resume with the same flags, or start over with --overwrite", force=force)


def check_same_fingerprints(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any], *, force: bool) -> None:
    """Raise InputError, a line each, where data, start models or the rows of a step are other ones; `force`: log it."""
    changed = [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]
    lines = [
        f"{name}: found {short(current.get(name))}, the checkpoint has {short(saved.get(name))}" for name in changed
    ]
    refuse(folder, lines, "give the same data, models and batch sizes, or start over with --overwrite", force=force)


def short(value: Any) -> str:
    """A number as it is, a hash by its first characters."""
    return f"content {value[:12]}" if isinstance(value, str) else str(value)


def refuse(folder: Path, lines: list[str], hint: str, *, force: bool) -> None:
    """Raise InputError with the lines and the hint, if there are any; with `force`, log them."""
    if lines and not force:
        raise InputError("\n".join([*lines, f"{folder}: {hint}; --force_resume goes on nevertheless"]))
    for line in lines:
        log.warning("resumed nevertheless: %s", line)
