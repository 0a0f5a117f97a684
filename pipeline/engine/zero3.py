"""When the whole weights of a ZeRO-3 model are on the device: once a phase, or layer by layer.

DeepSpeed gathers a module's weights when its forward or backward pass begins and lets them go when it ends, from
Python, for each micro-batch: about 3 ms of the host's time for a decoder layer, which takes less than that on an H200.
Where the 16-bit weights are small beside the device, all of them are gathered at the first forward pass of a phase
instead and let go at its end. Gradients, masters and optimizer states stay partitioned, and between phases so do the
weights.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline import dist
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.models.loading import base_model

log = logging.getLogger(__name__)

Gather = Literal["auto", "once", "layers"]

# Of the device's memory that a model's 16-bit weights may take for `auto` to keep them whole during a phase.
SHARE_OF_DEVICE = 1 / 8
# Elements that are gathered together: DeepSpeed holds them twice meanwhile.
BUNCH = 200_000_000


class Weights:
    """The ZeRO-3 weights of `module`, which DeepSpeed has partitioned and put its hooks on (`offload`)."""

    def __init__(self, module: nn.Module, offload: Any, *, once: bool) -> None:
        self.once = once
        self._parameters: list[Any] = list(module.parameters())
        if once:
            remove_hooks(offload, self._parameters)
        for parameter in self._parameters:
            parameter.gathered_by_layer = not once
        _take_over_linear()

    def gather(self) -> None:
        """All weights are whole behind this; a collective the first time in a phase. Nothing where layers do it."""
        if self.once:
            for bunch in bunches(parameter for parameter in self._parameters if is_away(parameter)):
                bunch[0].all_gather_coalesced(bunch).wait()

    def release_gathered(self) -> None:
        """Each rank keeps its share alone; small weights stay."""
        if self.once and (whole := [p for p in self._parameters if not is_away(p) and not p.ds_persist]):
            whole[0].partition(param_list=whole)


def is_away(parameter: Any) -> bool:
    return parameter.ds_status.name == "NOT_AVAILABLE"


def bunches(parameters: Iterable[Any]) -> Iterator[list[Any]]:
    """Parameters one after the other, up to BUNCH elements together."""
    bunch: list[Any] = []
    size = 0
    for parameter in parameters:
        if bunch and size + parameter.ds_numel > BUNCH:
            yield bunch
            bunch, size = [], 0
        bunch.append(parameter)
        size += parameter.ds_numel
    if bunch:
        yield bunch


def gathers_once(module: nn.Module, config: dict[str, Any], wanted: Gather) -> bool:
    """What `wanted` says; auto: an eighth of each rank's device holds the weights. The arithmetic is logged.

    Args:
        config: the engine's JSON. Where it puts shards in host memory, there is no room for them on the device.

    Raises:
        InputError: once, with shards in host memory.
    """
    on_host = (config["zero_optimization"].get("offload_param") or {}).get("device", "none") != "none"
    if on_host and wanted == "once":
        raise InputError("--zero3_gather once: needs weights on the device, found them offloaded; use auto or layers")
    if wanted != "auto" or on_host:
        return wanted == "once"
    if not torch.cuda.is_available():
        return True
    needed = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in module.parameters())
    device = torch.device("cuda", torch.cuda.current_device())
    room = int(SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory)
    once = dist.max_over_ranks(float(needed > room), device) == 0  # ranks make the same gathers
    how = "once a phase" if once else "layer by layer"
    log.info("ZeRO-3: %.2f GiB of weights, an eighth of the device is %.2f GiB: gathered %s (--zero3_gather)",
             needed / GIB, room / GIB, how)  # fmt: skip
    return once


def layer_classes(module: nn.Module) -> list[str]:
    """Names of the classes of decoder layers in `module`."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return sorted({type(part).__name__ for part in module.modules()} & names)


def inputs_need_gradients(module: Any) -> None:
    """With LoRA the first layer's input would need no gradient, and DeepSpeed not gather that layer going back."""
    if len({parameter.requires_grad for parameter in module.parameters()}) == 2:
        base_model(module.model).enable_input_require_grads()


def remove_hooks(offload: Any, parameters: Iterable[Any]) -> None:
    """Take DeepSpeed's gathering off the modules."""
    for parameter in parameters:
        parameter.ds_active_sub_modules.clear()
    for hook in [*offload.forward_hooks, *offload.backward_hooks]:
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []


# F.linear as torch has it, and as DeepSpeed puts it in its place once anything is partitioned.
_plain_linear: Any = torch.nn.functional.linear
_frugal_linear: Any = None


def _take_over_linear() -> None:
    """DeepSpeed's linear layer remembers a weight, not its values, which layers let go of: for those weights alone.

    It takes a Python function forwards and one backwards, and a kernel more for the bias.
    """
    global _frugal_linear
    if torch.nn.functional.linear is not _linear:
        _frugal_linear, torch.nn.functional.linear = torch.nn.functional.linear, _linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    by_layer = getattr(weight, "gathered_by_layer", False)
    return _frugal_linear(input, weight, bias) if by_layer else _plain_linear(input, weight, bias)
