"""Parameters that may be partitioned by ZeRO-3, for modules that do not import deepspeed.

A parameter that is not partitioned is handled as well: its values are all on this rank.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pipeline import dist

# Largest share of a device's memory that a model's 16-bit weights may take for `--zero3-gather auto` to gather them
# once a phase (pipeline/engine/zero3.py).
GATHERED_SHARE_OF_DEVICE = 1 / 8


def is_partitioned(parameter: Any) -> bool:
    """Return whether ZeRO-3 has partitioned this parameter."""
    return hasattr(parameter, "ds_id")


def mark_partitioned(parameter: Any) -> None:
    """Mark a parameter of a planned model, on the meta device, as partitioned by ZeRO-3."""
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = 0, parameter.shape, parameter.numel()


def has_shards_on_disk(parameter: Any) -> bool:
    """Return whether the shards of a ZeRO-3 parameter are in files (offload to NVMe)."""
    return is_partitioned(parameter) and parameter.ds_tensor.final_location == "nvme"


def gathered(parameters: Iterable[torch.Tensor], *, writer: bool = False) -> AbstractContextManager[Any]:
    """Gather ZeRO-3 parameters while the context lasts; with `writer`, what rank 0 writes to them reaches every rank.

    A collective: every rank enters it for the same parameters. Without partitioned parameters nothing happens.
    """
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not partitioned:
        return nullcontext()
    import deepspeed  # loaded already, by what has partitioned the parameters

    return deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if writer else None)


def whole_numel(parameter: Any) -> int:
    """Return the number of elements of the whole parameter."""
    return parameter.ds_numel if is_partitioned(parameter) else parameter.numel()


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(parameter.ds_shape if is_partitioned(parameter) else parameter.shape)


def local_share(parameter: Any) -> torch.Tensor:
    """Return this rank's values of a parameter: its ZeRO-3 shard (flat, maybe padded), or all of it."""
    return parameter.ds_tensor.data if is_partitioned(parameter) else parameter.data


def local_range(parameter: Any) -> tuple[int, int]:
    """Return (start, elements) of `local_share` in the flattened parameter, without padding."""
    if not is_partitioned(parameter):
        return 0, parameter.numel()
    shard = parameter.partition_numel()
    start = min(dist.rank() * shard, parameter.ds_numel)
    return start, min(shard, parameter.ds_numel - start)


def drop_whole_copy(parameter: Any) -> None:
    """Drop the gathered values of a ZeRO-3 parameter (small ones stay whole): the next gather reads the shards."""
    if is_partitioned(parameter):
        if parameter.ds_status.name == "AVAILABLE":
            parameter.partition()
        parameter.ds_secondary_tensor = None  # of ZeRO++'s hpZ, which is read in place of the shards
