"""Prepare a loaded model: refuse weights with NaN or infinity, put layers on devices, and share weights.

Chat, comparison and the report on a reward model call `on_devices` once after loading; engines, which place weights
themselves, call `check_finite`. `rlhf serve` calls `sharing_weights` for each model on a base that several have.
`checkpoints/model_folder.py` checks that only finite weights are saved.
"""

import copy
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from torch import nn

from pipeline import dist
from pipeline.cache_memory import memory_of
from pipeline.errors import InputError, say
from pipeline.files import GIB
from pipeline.models.loading import default_device, with_adapter
from pipeline.models.partitions import has_shards_on_disk, local_range, local_share
from pipeline.models.paths import read_adapter_config
from pipeline.models.source import ModelSource
from pipeline.models.weight_files import ADAPTER_WEIGHTS, weight_files
from pipeline.rendezvous import num_ranks

# Share of a GPU's free memory for weights; the rest is for the KV cache and activations. Chosen by hand.
WEIGHTS_SHARE = 0.8

M = TypeVar("M", bound=nn.Module)


def on_devices(model: M, path: str) -> M:
    """Check a frozen model, and put it on the default device; if it is too large, on all GPUs and the host.

    Layers fill the GPUs in order; layers on the host are copied to the first GPU in each pass, which a line notes.

    Raises:
        InputError: a weight is not finite, or no GPU holds the largest layer.
    """
    model.eval()
    gc.collect()  # the hooks of a model before this one hold it in a cycle
    limits = memory_limits()
    parts = [part for part in [*model.parameters(), *model.buffers()] if not part.is_cuda]  # nf4 is loaded onto the GPU
    size = sum(part.numel() * part.element_size() for part in parts)
    if size <= next(iter(limits.values())):
        check_finite(model.to(default_device()), path)
        return model
    check_finite(model, path)
    from accelerate import dispatch_model, infer_auto_device_map

    whole = sorted({name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()})
    devices = infer_auto_device_map(model, limits, no_split_module_classes=whole, offload_buffers=True)
    shares = Counter("the host" if device == "cpu" else f"GPU {device}" for device in devices.values())
    if set(shares) == {"the host"}:
        raise InputError(
            f"{path}: no layer fits into {limits[0] / GIB:.1f} GiB, 80 % of the GPU's free memory; free more"
        )
    where = ", ".join(f"{count} on {device}" for device, count in shares.items())
    say(f"{path}: {size / GIB:.1f} GiB of weights, more than a GPU takes: {where}")
    return dispatch_model(model, devices, offload_buffers=True)


def sharing_weights(base: nn.Module, source: ModelSource) -> Any:
    """Return the model of `source` on the weights of its base: the base itself or an adapter, which is not merged.

    It has modules of its own over the same parameters and buffers, so that it is a model like any other.

    Raises:
        InputError: the adapter cannot be loaded, or a weight of it is not finite.
    """
    model: Any = copy.deepcopy(base, {id(one): one for one in [*base.parameters(), *base.buffers()]})
    if source.base is None:
        return model
    model = with_adapter(model, source.path, merged=False).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:  # of the adapter, which peft keeps in fp32
            parameter.data = parameter.data.to(base.device, base.dtype)
    check_finite(model, source.path)
    return model


def memory_limits() -> dict[int | str, int]:
    """Return the bytes that weights may take on each GPU, and on the host, where they were loaded: no limit."""
    count = torch.cuda.device_count() if dist.has_gpu() else 0
    # With several ranks, the other GPUs belong to other ranks.
    devices = [torch.cuda.current_device()] if count and num_ranks() > 1 else range(count)
    gpus: dict[int | str, int] = {n: int(WEIGHTS_SHARE * memory_of(torch.device("cuda", n))[0]) for n in devices}
    return gpus | {"cpu": sys.maxsize}


def check_finite(model: nn.Module, path: str) -> None:
    """Refuse a model, loaded from `path`, with a weight that is not finite. A collective under ZeRO-3.

    One reduction on the weights' device, whose result is read once.

    Raises:
        InputError: with the file and the tensor, where the file is a safetensors file on this machine.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.is_floating_point()}
    largest = [largest_magnitude(weight) for weight in weights.values()]
    if not largest:
        return
    flags = torch.stack([value.to(largest[0].device) for value in largest]).isfinite().logical_not().tolist()
    # Each rank has checked its own shards. As objects: offloaded weights are where NCCL reduces no tensor.
    ranks = dist.gather_objects(flags)
    bad = [name for name, *on_ranks in zip(weights, *ranks, strict=True) if any(on_ranks)]
    unseen = [name for name, weight in model.named_parameters() if is_unseen(weight)]
    if unseen and bad_tensor(path):
        bad += unseen
    if bad:
        raise not_finite(path, bad[0], next(iter(weights.values())).dtype)


def is_unseen(weight: torch.Tensor) -> bool:
    """Return True if its values cannot be checked: bitsandbytes hides NaN in its codes, shards may be on a disk."""
    return hasattr(weight, "quant_state") or has_shards_on_disk(weight)


def largest_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in this rank's share of a weight, a fp32 scalar; NaN where there is a NaN."""
    count = local_range(weight)[1]
    share = local_share(weight).flatten()[:count]  # what pads a shard was never written
    return torch.linalg.vector_norm(share, ord=torch.inf).float() if count else share.new_zeros((), dtype=torch.float32)


def not_finite(path: str, name: str, dtype: torch.dtype) -> InputError:
    """Return the error for a model whose weight `name` is not finite, with the file and the tensor if there is one."""
    if where := bad_tensor(path):
        return InputError(f"{where} holds NaN or infinity; fetch the file again, or train it again")
    if any(local_files(Path(path).expanduser())):
        kind = str(dtype).removeprefix("torch.")
        return InputError(f"{path}: {name} is finite in its file, but not in {kind}; give --dtype bf16 or fp32")
    return InputError(f"{path}: {name} holds NaN or infinity; fetch the model again, or train it again")


def bad_tensor(path: str) -> str | None:
    """Return "FILE: NAME" of the first tensor of a model's local files that is not finite, None if there is none."""
    for file in local_files(Path(path).expanduser()):
        with safetensors.safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            # The codes of bitsandbytes may be stored as 16-bit numbers, which mean nothing.
            for key in sorted(key for key in names if f"{key}.absmax" not in names):
                if not opened.get_tensor(key).isfinite().all():
                    return f"{file}: {key}"
    return None


def local_files(folder: Path) -> Iterator[Path]:
    """Yield the safetensors files that a model is loaded from; none for a hub id or pickles."""
    adapter = read_adapter_config(folder)
    if adapter is not None:
        yield folder / ADAPTER_WEIGHTS
        yield from local_files(Path(adapter["base_model_name_or_path"]).expanduser())
    elif folder.is_dir():
        yield from weight_files(folder)
