"""Gradients that DeepSpeed has reduced over the ranks: waiting for them, their norm, and the step of several models."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipeline import dist


def wait_on_device(optimizer: Any) -> None:
    """Where DeepSpeed's host waits for reduced gradients after a backward pass, let the device's queue wait instead.

    The host then hands out the next model's kernels meanwhile; small ones take longer to hand out than to run.
    """
    stream = getattr(optimizer, "reduce_and_partition_stream", None)  # of stage 3
    if stream is not None and torch.cuda.is_available():
        stream.synchronize = lambda: torch.cuda.current_stream().wait_stream(stream)
    stages_1_2 = hasattr(optimizer, "reduction_stream") and optimizer.contiguous_gradients
    if not stages_1_2 or not optimizer.overlap_comm or optimizer.cpu_offload:
        return
    epilogue = optimizer.independent_gradient_partition_epilogue

    def without_waiting() -> None:
        optimizer.reduce_ipg_grads()
        torch.cuda.current_stream().wait_stream(optimizer.reduction_stream)
        optimizer.overlap_comm = False  # what is left to reduce is nothing, and what is left to wait for
        try:
            epilogue()
        finally:
            optimizer.overlap_comm = True

    optimizer.independent_gradient_partition_epilogue = without_waiting


def global_norm(partition: Iterable[Tensor]) -> Tensor:
    """(1,) fp32 L2 norm over all ranks' gradients, of which each rank holds a part; -1 where any is not finite.

    DeepSpeed's own takes a kernel and a copy for every parameter.
    """
    norms = torch.stack(torch._foreach_norm(list(partition), dtype=torch.float32))
    total = dist.sum_over_ranks(norms.double().square().sum()).sqrt().float()
    return torch.where(total.isfinite(), total, -1.0).reshape(1)
