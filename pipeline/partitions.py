"""Parameters that ZeRO-3 may hold in pieces, for code that must not need deepspeed to be imported."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from pipeline import dist


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 holds this parameter in pieces."""
    return hasattr(parameter, "ds_id")


def gathered(parameters: Iterable[nn.Parameter], *, writer: bool = False) -> AbstractContextManager[Any]:
    """Whole values of ZeRO-3 parameters inside the context; with `writer`, what rank 0 writes reaches every rank.

    A collective: every rank enters it for the same parameters. Without partitioned parameters nothing happens.
    """
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not partitioned:
        return nullcontext()
    import deepspeed  # a parameter that is partitioned has loaded it already

    return deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if writer else None)


def local_share(parameter: Any) -> torch.Tensor:
    """This rank's values of a parameter: its ZeRO-3 shard (flat, maybe padded), or all of it."""
    return parameter.ds_tensor.data if is_partitioned(parameter) else parameter.data


def local_range(parameter: Any) -> tuple[int, int]:
    """(start, elements) of `local_share` in the flattened parameter, padding left out."""
    if not is_partitioned(parameter):
        return 0, parameter.numel()
    shard = parameter.partition_numel()
    start = min(dist.rank() * shard, parameter.ds_numel)
    return start, min(shard, parameter.ds_numel - start)


def drop_whole_copy(parameter: Any) -> None:
    """Forget the gathered values of a ZeRO-3 parameter (small ones stay whole): the next gather reads the shards."""
    if is_partitioned(parameter) and parameter.ds_status.name == "AVAILABLE":
        parameter.partition()
