"""Gradients that DeepSpeed has reduced over the ranks: stream synchronisation and their global norm."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipeline import dist
from pipeline.tensor_ops import tensor_norms


def synchronise_on_device(optimizer: Any) -> None:
    """Make a DeepSpeed optimizer's streams wait for reduced gradients, where its host waits after a backward pass.

    The host then enqueues the next model's kernels meanwhile; small ones take longer to enqueue than to run.
    """
    stream = getattr(optimizer, "reduce_and_partition_stream", None)  # ZeRO stage 3
    if stream is not None and torch.cuda.is_available():
        stream.synchronize = lambda: torch.cuda.current_stream().wait_stream(stream)
    stages_1_2 = hasattr(optimizer, "reduction_stream") and optimizer.contiguous_gradients
    if not stages_1_2 or not optimizer.overlap_comm or optimizer.cpu_offload:
        return
    epilogue = optimizer.independent_gradient_partition_epilogue

    def without_host_wait() -> None:
        optimizer.reduce_ipg_grads()
        torch.cuda.current_stream().wait_stream(optimizer.reduction_stream)
        optimizer.overlap_comm = False  # nothing is left to reduce, so the epilogue has nothing to wait for
        try:
            epilogue()
        finally:
            optimizer.overlap_comm = True

    optimizer.independent_gradient_partition_epilogue = without_host_wait


def global_norm(partition: Iterable[Tensor]) -> Tensor:
    """Return the (1,) fp32 L2 norm of gradients that are partitioned over the ranks; -1 where any is not finite.

    A collective. DeepSpeed's own function takes a kernel and a copy for every parameter.
    """
    norms = tensor_norms(list(partition))
    total = dist.sum_over_ranks(norms.double().square().sum()).sqrt().float()
    return torch.where(total.isfinite(), total, -1.0).reshape(1)
