"""Gathering of ZeRO-3 weights: all of a model once a phase, or layer by layer.

A phase is the passes of a model between two calls of `release_gathered`: scoring, or training up to the optimizer step.
DeepSpeed gathers the weights of a module around each pass, from Python: about 3 ms of the host's time for a decoder
layer, whose kernels take less on an H200. With `--zero3-gather auto`, weights that take at most an eighth of the
GPU's memory are all gathered at the first forward pass of a phase and released at its end. Gradients and optimizer
states stay partitioned.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import deepspeed
import torch
from torch import Tensor, nn

from pipeline import dist
from pipeline.cache_memory import memory_of
from pipeline.configuration.ds_config import device_of
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.models.loading import base_model
from pipeline.models.partitions import GATHERED_SHARE_OF_DEVICE, whole_numel

log = logging.getLogger(__name__)

Gather = Literal["auto", "once", "layers"]

# Elements gathered in one collective, during which DeepSpeed has them in memory twice.
BUCKET_NUMEL = 200_000_000


class Zero3Weights:
    """The ZeRO-3 weights of `module`, which DeepSpeed has partitioned.

    offload: the module's DeepSpeedZeRoOffload, which owns DeepSpeed's hooks; it exists without CPU offload too.
    once: `gather` gathers all weights and `release_gathered` releases them; False: DeepSpeed's hooks do both for each
        layer.
    """

    def __init__(self, module: nn.Module, offload: Any, *, once: bool) -> None:
        self.once = once
        self._offload = offload
        self._parameters: list[Any] = list(module.parameters())
        if once:
            remove_hooks(offload, self._parameters)
        else:
            module.register_forward_hook(self._end_forward)
        for parameter in self._parameters:
            parameter.gathered_by_layer = not once
        _replace_deepspeed_linear()

    def gather(self) -> None:
        """Gather all released weights if `once`: a collective at the first call of a phase, later ones do nothing."""
        if self.once:
            released = [parameter for parameter in self._parameters if is_released(parameter)]
            # One collective must not read both shards and ZeRO++'s second partition, which weights have after a gather.
            for second in (False, True):
                for bucket in buckets(p for p in released if (p.ds_secondary_tensor is not None) == second):
                    bucket[0].all_gather_coalesced(bucket).wait()

    def release_gathered(self) -> None:
        """Free gathered weights except for this rank's shards; small weights stay whole."""
        if self.once and (whole := [p for p in self._parameters if not is_released(p) and not p.ds_persist]):
            whole[0].partition(param_list=whole)

    def _end_forward(self, *_: Any) -> None:
        """Release what DeepSpeed gathers ahead for the backward pass, if none follows.

        DeepSpeed does it only at the next forward pass. Until then a gather of such a weight is in flight: a context of
        `pipeline.models.partitions.gathered` would read it before its values have arrived, and could not release it.
        """
        if not torch.is_grad_enabled():
            self._offload.get_param_coordinator()._clean_inflight_param_registry()

    def release_all(self) -> None:
        """Free all weights except for this rank's shards, also those that a failed pass has gathered."""
        self._offload.partition_all_parameters()


def is_released(parameter: Any) -> bool:
    """Return whether this rank has only the shard of this ZeRO-3 parameter."""
    return parameter.ds_status.name == "NOT_AVAILABLE"


def buckets(parameters: Iterable[Any]) -> Iterator[list[Any]]:
    """Split parameters, in their order, into buckets of up to BUCKET_NUMEL elements."""
    bucket: list[Any] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.ds_numel > BUCKET_NUMEL:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.ds_numel
    if bucket:
        yield bucket


def set_gathering(module: nn.Module, config: dict[str, Any], requested: Gather) -> bool:
    """Prepare a model that DeepSpeed will partition; return True if its weights are to be gathered once a phase.

    For gathering by layer, it marks decoder layers as DeepSpeed's leaf modules. Arguments are those of `gathers_once`.

    Raises:
        InputError: `requested` is "once", but the engine's JSON offloads the shards.
    """
    if gathers_once(module, config, requested):
        return True
    # Decoder layers are gathered as wholes: hooks at every linear layer take more time than gathering.
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    if classes := {type(part).__name__ for part in module.modules()} & names:
        deepspeed.utils.set_z3_leaf_modules(module, sorted(classes))
        # With LoRA, the first layer's input would require no gradient: DeepSpeed would not gather that layer for its
        # backward pass.
        if len({parameter.requires_grad for parameter in module.parameters()}) == 2:
            base_model(module.get_submodule("model")).enable_input_require_grads()
    return False


def gathers_once(module: nn.Module, config: dict[str, Any], requested: Gather) -> bool:
    """Return True if the weights are gathered once a phase, False if layer by layer.

    Args:
        config: the engine's JSON. If it offloads the shards, the device is taken to have no memory for whole weights.
        requested: --zero3-gather. "auto" is once if the weights take at most GATHERED_SHARE_OF_DEVICE of the memory of
            each rank's GPU, which it logs; without CUDA it is always once.

    Raises:
        InputError: `requested` is "once", but `config` offloads the shards.
    """
    on_host = device_of(config["zero_optimization"], "offload_param") != "none"
    if on_host and requested == "once":
        raise InputError("--zero3-gather once: got offloaded weights, expected them on the device; use auto or layers")
    if requested != "auto" or on_host:
        return requested == "once"
    if not torch.cuda.is_available():
        return True
    needed = sum(whole_numel(p) * p.element_size() for p in module.parameters())
    device = torch.device("cuda", torch.cuda.current_device())
    budget = int(GATHERED_SHARE_OF_DEVICE * memory_of(device)[1])
    once = dist.max_over_ranks(float(needed > budget), device) == 0  # ranks make the same collectives
    how = "once a phase" if once else "layer by layer"
    log.info("ZeRO-3: %.2f GiB of weights, an eighth of the device is %.2f GiB: gathered %s (--zero3-gather)",
             needed / GIB, budget / GIB, how)  # fmt: skip
    return once


def remove_hooks(offload: Any, parameters: Iterable[Any]) -> None:
    """Remove the hooks by which DeepSpeed gathers the weights of modules."""
    for parameter in parameters:
        parameter.ds_active_sub_modules.clear()
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []


# torch's F.linear, and DeepSpeed's replacement once anything is partitioned.
_torch_linear: Any = torch.nn.functional.linear
_deepspeed_linear: Any = None


def _replace_deepspeed_linear() -> None:
    """Make F.linear choose, by the weight, between DeepSpeed's version and torch's.

    DeepSpeed's replacement reads the weight again in the backward pass. Only weights that are gathered layer by layer
    need that. For all others torch's is faster: no Python function in each pass, and one kernel less for the bias.
    """
    global _deepspeed_linear
    if torch.nn.functional.linear is not _linear:
        _deepspeed_linear, torch.nn.functional.linear = torch.nn.functional.linear, _linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    by_layer = getattr(weight, "gathered_by_layer", False)
    return _deepspeed_linear(input, weight, bias) if by_layer else _torch_linear(input, weight, bias)
