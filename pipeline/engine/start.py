"""The start of DeepSpeed in a process, and loading of models straight into ZeRO-3 partitions."""

import copy
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger
from pydantic import ValidationError
from torch import nn
from transformers import AutoModel

from pipeline import dist
from pipeline.engine.private_names import check_private_names
from pipeline.errors import InputError, raise_lines
from pipeline.models.source import ModelSource, check_whole_experts


def start_deepspeed(*, deterministic: bool = False, verbose: bool = False) -> None:
    """Attach DeepSpeed to the existing process group, without compilation.

    Args:
        deterministic: choose kernels that give the same bits each time, where torch has such kernels.
        verbose: let DeepSpeed log more than warnings.

    Raises:
        EnvironmentFault: the installed DeepSpeed lacks a private name that this project uses.
    """
    check_private_names()
    # Container images for Hopper set it to 9.0a, which DeepSpeed cannot parse when it compiles its NVMe writer.
    # Without the variable it asks the GPU.
    os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
    deepspeed_logger.setLevel(logging.INFO if verbose else logging.WARNING)
    for handler in deepspeed_logger.handlers:
        handler.setLevel(logging.NOTSET)
    deepspeed.utils.nvtx.enable_nvtx = False  # profiler ranges, thousands of times a step
    if get_accelerator().device_name() == "cpu":
        # Only inference kernels use it; building it needs a compiler and 50 s.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), verbose=verbose)


def check_values(config: dict[str, Any]) -> None:
    """Raise InputError if DeepSpeed itself refuses a value in the JSON of an engine, before a model is loaded."""
    try:
        deepspeed.DeepSpeedConfig(config)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))}: got {one['input']!r}: {one['msg']}" for one in error.errors()]
        raise InputError("\n".join(f"DeepSpeed refuses {line}" for line in wrong)) from None
    except (AssertionError, ValueError, deepspeed.DeepSpeedConfigError) as error:
        raise InputError(f"DeepSpeed refuses its JSON: {' '.join(str(error).split())}") from None


def has_asynchronous_files() -> bool:
    """Return whether libaio and its headers are installed, with which DeepSpeed compiles its NVMe offload."""
    return bool(get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False))


def check_swap_buffers(config: dict[str, Any], source: ModelSource) -> None:
    """Check that the model's weights fit the buffers through which DeepSpeed swaps them with a disk.

    A buffer has one weight. Buffers are needed for the layer that computes, the next one, and those within the reuse
    distance.

    Raises:
        InputError: the buffers are too small or too few.
    """
    zero = deepspeed.DeepSpeedConfig(config).zero_config
    if zero.offload_param is None or zero.offload_param.device != "nvme":
        return
    with torch.device("meta"):
        model = AutoModel.from_config(copy.deepcopy(source.config))
    layers = [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())] or [model]
    size, count = max((sum(weight.numel() for weight in layer.parameters()), matrices(layer)) for layer in layers)
    layers_held = 2 + -(-zero.max_reuse_distance // size)
    needed = {
        "buffer_size": max(weight.numel() for weight in model.parameters()),
        "buffer_count": min(layers_held * count, matrices(model) + 1),  # and the head
    }
    advice = {"buffer_count": "; zero_optimization.stage3_max_reuse_distance 0 needs fewer"}
    raise_lines(
        f"zero_optimization.offload_param.{key}: got {given}, {source.path} needs {number} or more"
        + advice.get(key, "")
        for key, number in needed.items()
        if (given := getattr(zero.offload_param, key)) < number
    )


def matrices(module: nn.Module) -> int:
    """Return the number of weight matrices: not biases and norms, which are small enough to stay in memory."""
    return sum(weight.dim() > 1 for weight in module.parameters())


@contextmanager
def partitioned_loading(config: dict[str, Any], source: ModelSource) -> Iterator[None]:
    """Make `from_pretrained` put the weights at `source` straight into ZeRO-3 partitions; below stage 3 do nothing.

    Raises:
        InputError: the model is a mixture of experts, or DeepSpeed refuses the JSON `config`.
    """
    check_values(config)
    check_swap_buffers(config, source)
    if config["zero_optimization"]["stage"] < 3:
        yield
        return
    check_whole_experts(source)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # of ZeRO++'s hpZ; each engine creates its own
    dist.meet()  # loading runs collectives
    keep_alive = HfDeepSpeedConfig(config)  # transformers holds a weak reference to it
    try:
        yield
    finally:
        del keep_alive
        unset_hf_deepspeed_config()
